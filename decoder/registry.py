"""Which public draft goes with which target: `--draft auto`."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from dflash_batch.decoder import demo

DEMO = "demo"
"""The name of the bundled pair."""


def pairs() -> list[tuple[str, str]]:
    """(target, draft) names from the registry file."""
    text = resources.files("dflash_batch.decoder").joinpath("drafts.json").read_text("utf-8")
    return [(pair["target"], pair["draft"]) for pair in json.loads(text)["pairs"]]


def draft_for(target: str) -> str | None:
    """The draft that goes with a target's id or folder, or None.

    The organisation is left out and case does not matter. `Qwen3-4B` matches `Qwen3-4B-4bit`
    but not `Qwen3-4Bx`; the longest match wins.
    """
    if target == DEMO or Path(target).resolve() == Path(demo.TARGET_DIR).resolve():
        return str(demo.DRAFT_DIR)
    name = target.rstrip("/").rsplit("/", 1)[-1].lower()
    found = [
        (len(base), draft)
        for base, draft in pairs()
        if name == base.lower() or name.startswith((base.lower() + "-", base.lower() + "_"))
    ]
    return max(found)[1] if found else None
