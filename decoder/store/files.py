"""The disk as the store uses it; tests hand in one that fills up or dies."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from dflash_batch.decoder.store.errors import StoreUnusable

_F_NOCACHE = 48  # fcntl of macOS, which Python does not name


class Files:
    """Blobs appear whole or not at all."""

    def free(self, folder: Path) -> int:
        """Bytes that we may still write in the file system of `folder`."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def create(self, path: Path) -> BinaryIO:
        """A new unbuffered file, mode 0600, to be written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        return cast(BinaryIO, os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0))

    def open(self, path: Path) -> BinaryIO:
        """An unbuffered file to be read."""
        return cast(BinaryIO, path.open("rb", buffering=0))

    def sync(self, file: BinaryIO) -> None:
        """The bytes of `file` reach the disk before this returns; then memory forgets them.

        What is read afterwards comes from the disk, so a check of it is one, and its time too.
        """
        os.fsync(file.fileno())
        if sys.platform == "darwin":
            fcntl.fcntl(file.fileno(), _F_NOCACHE, 1)
        else:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def rename(self, part: Path, path: Path) -> None:
        """Give a written file its name, for good."""
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def own_folder(path: Path) -> Path:
    """`path` as a folder of mode 0700 that is ours. Raises StoreUnusable."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise StoreUnusable(f"{path} belongs to another user")
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise StoreUnusable(f"{path}: {error.strerror or error}") from error
    return path


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether the lock on `path` is ours while the block lasts; dropped however we end."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(lock)
        yield False
        return
    try:
        yield True
    finally:
        os.close(lock)
