"""Which public draft goes with which target: `--draft auto`. Also the short names of targets."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from dflash_batch.decoder import demo

DEMO = "demo"
"""The name of the bundled pair."""

LOOKUP = "ngram"
"""The name of drafting by lookup; behind a draft's name and a plus, of both together."""


class Draft(NamedTuple):
    """A draft to be found."""

    name: str  # folder or Hugging Face id
    revision: str | None = None  # commit on the hub; None: the newest


class Pair(NamedTuple):
    """A public target and its draft."""

    target: str  # last part of the target's name
    draft: Draft
    repo: str | None  # the target on the hub

    @property
    def alias(self) -> str:
        """The short name of the target."""
        return self.target.lower()


def pairs() -> list[Pair]:
    """The registry file."""
    text = resources.files("dflash_batch.decoder").joinpath("drafts.json").read_text("utf-8")
    return [
        Pair(pair["target"], Draft(pair["draft"], pair.get("revision")), pair.get("repo"))
        for pair in json.loads(text)["pairs"]
    ]


def split(draft: str) -> tuple[str, bool]:
    """What `--draft` says: the name of a draft model or "none", and whether lookup drafts too."""
    if draft == LOOKUP:
        return "none", True
    name = draft.removesuffix(f"+{LOOKUP}")
    return name, name != draft


def repo_for(alias: str) -> str | None:
    """The Hugging Face id that a short name stands for, such as `qwen3-4b`."""
    return next((pair.repo for pair in pairs() if pair.alias == alias.lower()), None)


def draft_for(target: str) -> Draft | None:
    """The draft that goes with a target's id or folder, or None.

    The organisation is left out and case does not matter. `Qwen3-4B` matches `Qwen3-4B-4bit`
    but not `Qwen3-4Bx`; the longest match wins.
    """
    if target == DEMO or Path(target).resolve() == Path(demo.TARGET_DIR).resolve():
        return Draft(str(demo.DRAFT_DIR))
    name = target.rstrip("/").rsplit("/", 1)[-1].lower()
    found = [
        (len(pair.alias), pair.draft)
        for pair in pairs()
        if name == pair.alias or name.startswith((f"{pair.alias}-", f"{pair.alias}_"))
    ]
    return max(found)[1] if found else None
