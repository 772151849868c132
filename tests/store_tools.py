"""A store for tests: small prefixes, disks that fill up or die, and a child process."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dflash_batch.decoder.store.blob import Tensor
from dflash_batch.decoder.store.files import Files
from dflash_batch.decoder.store.store import Limits, Put, Store

MODEL = "fingerprint-of-a-model"
ROOMY = Limits(cap=1 << 30, floor=0, daily=1 << 40)


def tokens(start: int, length: int = 32) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def tensors(seed: int, size: int = 4096) -> dict[str, Tensor]:
    data = np.random.default_rng(seed).integers(0, 256, size=size, dtype=np.uint8)
    return {"a": Tensor("BF16", (size // 4, 2), data), "b": Tensor("F32", (0, 3), data[:0])}


def put(store: Store, start: int, size: int = 4096) -> Put:
    """Store the prefix that begins with token `start`."""
    return store.put(MODEL, "model", tokens(start), tensors(start, size), {"kind": "test"})[0]


def key(store: Store, start: int) -> str | None:
    found = [k for k, entry in store.entries().items() if entry.tokens[0] == start]
    return found[0] if found else None


def starts(store: Store) -> set[int]:
    """Which prefixes are there, by their first token."""
    return {int(entry.tokens[0]) for entry in store.entries().values()}


def sound(store: Store, start: int) -> bool:
    """Whether a prefix is served, and is what was put in; a wrong one is an error."""
    name = key(store, start)
    stored = store.get(name) if name else None
    if stored is None:
        return False
    for tensor, kept in zip(tensors(start).values(), stored.tensors.values(), strict=True):
        assert tensor.dtype == kept.dtype
        assert tensor.shape == kept.shape
        assert bytes(tensor.data) == bytes(kept.data)
    return True


class FullDisk(Files):
    """Has room for `room` bytes, whatever it says."""

    def __init__(self, room: int) -> None:
        self.room = room

    def create(self, path: Path) -> BinaryIO:
        return _Filling(super().create(path), self)  # type: ignore[return-value]


class _Filling:
    """A file on a disk that fills up."""

    def __init__(self, file: BinaryIO, disk: FullDisk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> _Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: memoryview) -> int:
        if not self._disk.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._file.write(data[: self._disk.room])  # a full disk takes the beginning
        self._disk.room -= written
        return written


class Dying(Files):
    """The process dies by SIGKILL before or after the rename."""

    def __init__(self, after: bool) -> None:
        self._after = after

    def rename(self, part: Path, path: Path) -> None:
        if self._after:
            super().rename(part, path)
        os.kill(os.getpid(), signal.SIGKILL)
