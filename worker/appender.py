"""A file of lines, appended to by one process at a time, and repaired after a crash."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_batch.worker.errors import UserError


class OutputTaken(UserError):
    """Raised when an output file holds something other than this batch, or is in use."""

    code = "output_taken"


class OutputFailed(UserError):
    """Raised when an output file cannot be read or written, as when the disk is full."""

    code = "output_failed"


@dataclass
class Appender:
    """A file that only ever ends in a whole line, unless the machine dies in mid-write."""

    path: Path
    fd: int | None = field(default=None, init=False)
    size: int = field(default=0, init=False)
    dirty: bool = field(default=False, init=False)

    def open(self) -> int:
        """Open for appending, made if it is not there, and keep others out."""
        if self.fd is not None:
            return self.fd
        try:
            is_new = not self.path.exists()
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            if is_new:
                _folder_to_disk(self.path.parent)
        except OSError as error:
            raise self._failed("open", error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise OutputTaken(
                f"{self.path} is being written by another command; wait for it, or name another "
                "file with -o."
            ) from error
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.dirty = self.size > 0  # who wrote it may have died before it was on disk
        return fd

    def empty(self) -> None:
        """Throw away what the file holds."""
        if self.path.exists():
            try:
                os.ftruncate(self.open(), 0)
            except OSError as error:
                raise self._failed("empty", error) from error
            self.size = 0

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line with its LF, the last one perhaps without, and where it starts."""
        if not self.path.exists():
            return
        self.open()
        start = 0
        try:
            with self.path.open("rb") as file:
                for line in file:
                    yield start, line
                    start += len(line)
        except OSError as error:
            raise self._failed("read", error) from error

    def append(self, text: str) -> None:
        fd = self.open()
        data = memoryview(text.encode())
        done = 0
        try:
            while done < len(data):
                done += os.write(fd, data[done:])
        except OSError as error:
            # A torn line would be cut at the next start anyway; better not to leave one.
            os.ftruncate(fd, self.size)
            raise self._failed("write", error) from error
        self.size += done
        self.dirty = True

    def sync(self) -> None:
        if self.fd is None or not self.dirty:
            return
        try:
            _to_disk(self.fd)
        except OSError as error:
            raise self._failed("write", error) from error
        self.dirty = False

    def remove(self, torn: Sequence[tuple[int, int]], end: int) -> None:
        """Remove byte ranges: by cutting if all lie behind `end`, else by copying the rest."""
        fd = self.open()
        try:
            if torn[0][0] >= end:
                os.ftruncate(fd, end)
            else:
                self._copy_without(torn)
            _to_disk(self.open())
        except OSError as error:
            raise self._failed("repair", error) from error
        self.size = self.path.stat().st_size

    def _copy_without(self, torn: Sequence[tuple[int, int]]) -> None:
        """Only a power failure tears a line that has whole ones behind it."""
        starts = {start for start, _ in torn}
        copy = self.path.with_name(f".{self.path.name}.repair")
        with copy.open("wb") as file:
            file.writelines(line for start, line in self.lines() if start not in starts)
            _to_disk(file.fileno())
        copy.replace(self.path)
        _folder_to_disk(self.path.parent)
        self.close()
        self.open()

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _failed(self, verb: str, error: OSError) -> OutputFailed:
        return OutputFailed(
            f"cannot {verb} {self.path}: {error.strerror or error}. Whole lines are kept; put it "
            "right and run the same command again to continue."
        )


def _to_disk(fd: int) -> None:
    """fsync; on macOS that stops at the drive's own memory, and F_FULLFSYNC does not."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
        except OSError:
            # Network file systems do not know it.
            os.fsync(fd)
        return
    os.fsync(fd)


def _folder_to_disk(folder: Path) -> None:
    """Make the names in a folder last: a file whose name is lost is lost."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
