"""What a snapshot depends on, by content: two models under one name are two models.

Weights are hashed whole. That takes seconds for tens of gigabytes, so a file's hash is remembered
for as long as the file is the same by everything the system says of it; its change time among
that, which no program sets as it likes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

_PIECE = 4 << 20
_THREADS = 4


class Memory(Protocol):
    """Where hashes are remembered."""

    def memo(self, name: str) -> Any: ...
    def remember(self, name: str, value: Any) -> None: ...


def weights_digest(folder: Path, memory: Memory) -> str:
    """SHA-256 over names and contents of a model folder's weights. Raises OSError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors")
    digests = [[path.name, file_digest(path, memory)] for path in files]
    return _hash(digests)


def file_digest(path: Path, memory: Memory) -> str:
    """SHA-256 over the SHA-256 of the pieces of a file. Raises OSError."""
    # Of what a link points to: the hub's cache links names to blobs.
    found = path.stat()
    state = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    name = f"weights:{path.resolve()}"
    known = memory.memo(name)
    if isinstance(known, dict) and known.get("state") == state:
        return str(known["digest"])
    starts = range(0, found.st_size, _PIECE)
    with ThreadPoolExecutor(_THREADS) as threads:
        pieces = list(threads.map(lambda start: _piece_digest(path, start), starts))
    digest = hashlib.sha256(b"".join(pieces)).hexdigest()
    memory.remember(name, {"state": state, "digest": digest})
    return digest


def fingerprint(parts: Sequence[Any]) -> str:
    """32 hex digits that stand for JSON values."""
    return _hash(list(parts))[:32]


def _piece_digest(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        return hashlib.sha256(file.read(_PIECE)).digest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
