"""The models at hand: what is in the Hugging Face cache, fetched with care and taken off again.

Weights are taken as safetensors only. A pickle can run code when it is read, so files of that kind
are never fetched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from huggingface_hub import HfApi, scan_cache_dir, snapshot_download
from huggingface_hub.errors import CacheNotFound, HfHubHTTPError, HFValidationError

from dflash_batch.decoder import demo
from dflash_batch.decoder.draft_config import KINDS
from dflash_batch.decoder.reckoning import Footprint, footprint
from dflash_batch.worker.errors import UserError

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".msgpack", ".h5")
"""Endings of weights that are not read."""

WANTED = ["*.json", "model*.safetensors", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken"]


class ShelfError(UserError):
    """Raised when a model is not to be had, or not at hand."""

    code = "model_not_found"


@dataclass(frozen=True)
class Held:
    """A revision of a model in the cache."""

    name: str
    revision: str
    folder: Path
    bytes: int  # on disk

    @property
    def config(self) -> dict[str, Any] | None:
        """Its `config.json`, or None where there is none to be read."""
        return _config(self.folder)

    @property
    def is_draft(self) -> bool:
        """Whether it is a DFlash draft."""
        return any(kind in KINDS for kind in (self.config or {}).get("architectures") or ())

    @property
    def footprint(self) -> Footprint | None:
        """What it needs in memory; None where its config does not tell."""
        return folder_footprint(self.folder)


class Hub(Protocol):
    """What is asked of the Hugging Face hub and of its cache."""

    def files(self, name: str, revision: str | None) -> list[str]:
        """Paths in a repository."""
        ...

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Download files; the folder of the snapshot."""
        ...

    def held(self) -> list[Held]:
        """The models in the cache."""
        ...

    def remove(self, revisions: Sequence[str]) -> None:
        """Take revisions out of the cache."""
        ...


class HuggingFace:
    """The real one. `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` and the rest count."""

    def files(self, name: str, revision: str | None) -> list[str]:
        return HfApi().list_repo_files(name, revision=revision)

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))

    def held(self) -> list[Held]:
        try:
            cache = scan_cache_dir()
        except CacheNotFound:
            return []
        found = [
            Held(repo.repo_id, revision.commit_hash, revision.snapshot_path, revision.size_on_disk)
            for repo in cache.repos
            if repo.repo_type == "model"
            for revision in repo.revisions
        ]
        return sorted(found, key=lambda held: (held.name.lower(), held.revision))

    def remove(self, revisions: Sequence[str]) -> None:
        scan_cache_dir().delete_revisions(*revisions).execute()


@dataclass(frozen=True)
class Pulled:
    """A model that was fetched."""

    name: str
    folder: Path
    skipped: list[str]  # pickles that were left where they are


def pull(hub: Hub, name: str, revision: str | None = None) -> Pulled:
    """Fetch a model, its weights as safetensors. Raises ShelfError."""
    try:
        files = hub.files(name, revision)
        pickles = [file for file in files if PurePosixPath(file).suffix in PICKLES]
        if not any(file.endswith(".safetensors") for file in files):
            why = f"only pickles ({', '.join(pickles[:3])}), which can run code and are refused"
            raise ShelfError(f"{name} has no *.safetensors" + (f", {why}" if pickles else ""))
        return Pulled(name, hub.fetch(name, revision, WANTED), pickles)
    except (HfHubHTTPError, HFValidationError, OSError) as e:
        raise ShelfError(f"{name}: {str(e).strip().splitlines()[0]}") from e


def find(hub: Hub, name: str) -> list[Held]:
    """All revisions of a model at hand. Raises ShelfError when there is none."""
    found = [held for held in hub.held() if held.name.lower() == name.lower()]
    if not found:
        raise ShelfError(f"{name} is not in the Hugging Face cache")
    return found


def bundled() -> tuple[Held, Held]:
    """The bundled target and its draft."""
    target, draft = (Path(str(folder)) for folder in (demo.TARGET_DIR, demo.DRAFT_DIR))
    return (
        Held("demo", "bundled", target, _size(target, "*")),
        Held("demo (draft)", "bundled", draft, _size(draft, "*")),
    )


def folder_footprint(folder: Path) -> Footprint | None:
    """What the model in a folder needs in memory; None where its config does not tell."""
    config = _config(folder)
    try:
        return footprint(config, _size(folder, "model*.safetensors")) if config else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # of a kind whose config has other keys


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _size(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
