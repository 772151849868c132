"""Files that are there whole or not at all: written beside their place, flushed, then renamed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx


def save_weights(arrays: Mapping[str, mx.array], path: Path, metadata: dict[str, str]) -> None:
    """A safetensors file. Raises OSError."""
    temporary = path.with_name(f".{path.stem}.tmp.safetensors")  # mlx wants that ending
    mx.save_safetensors(str(temporary), dict(arrays), metadata=metadata)
    _settle(temporary, path)


def save_text(text: str, path: Path) -> None:
    """A text file in UTF-8. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    _settle(temporary, path)


def _settle(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
