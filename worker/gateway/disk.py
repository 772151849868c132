"""Small records kept on disk: one JSON file each, replaced whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Generic, TypeVar

from dflash_batch.worker.contract import Record
from dflash_batch.worker.home import private_dir


class Named(Record):
    """A record with an id that is a safe file name."""

    id: str


_R = TypeVar("_R", bound=Named)


class Shelf(Generic[_R]):
    """Records of one kind in memory, each also in `folder`. May be used by several threads."""

    def __init__(self, folder: Path, kind: type[_R]) -> None:
        """Reads what is there. Raises HomeError, OSError and pydantic.ValidationError."""
        self.folder = private_dir(folder)
        self._lock = threading.RLock()
        found = (kind.parse(path.read_bytes()) for path in self.folder.glob("*.json"))
        self._records: dict[str, _R] = {record.id: record for record in found}

    def get(self, name: str) -> _R | None:
        """The record of that id."""
        return self._records.get(name)

    def all(self) -> list[_R]:
        """All records, in no order."""
        with self._lock:
            return list(self._records.values())

    def save(self, record: _R) -> _R:
        """Keep the record, on disk before anyone sees it."""
        with self._lock:
            path = self._path(record.id)
            draft = path.with_suffix(".tmp")
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(record.dump())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            self._records[record.id] = record
        return record

    def change(self, name: str, **changes: object) -> _R:
        """The record with these fields changed, kept. Raises KeyError."""
        with self._lock:
            return self.save(self._records[name].model_copy(update=changes))

    def drop(self, name: str) -> None:
        """Forget the record."""
        with self._lock:
            self._path(name).unlink(missing_ok=True)
            self._records.pop(name, None)

    @property
    def lock(self) -> threading.RLock:
        """Held while several steps have to be one."""
        return self._lock

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
