"""Files of the gateway: uploaded batches, and the results of finished ones."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from dflash_batch.worker.gateway.disk import Named, Shelf

Purpose = Literal["batch", "batch_output"]


class FileRecord(Named):
    """A file that can be fetched. Its bytes lie beside the record, under the same id."""

    bytes: int
    created_at: int  # Unix seconds
    filename: str
    purpose: Purpose

    def shown(self) -> dict[str, Any]:
        """The file object of the API."""
        return self.model_dump() | {"object": "file", "status": "processed"}


class Files:
    """All files, and where their bytes are."""

    def __init__(self, folder: Path) -> None:
        self.shelf = Shelf(folder, FileRecord)
        for left in self.shelf.folder.glob("*.part"):
            left.unlink()  # of uploads that a crash cut off

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are, or are to be."""
        return self.shelf.folder / f"{file_id}.jsonl"

    def part(self) -> Path:
        """A new place for an upload that may not end well."""
        return self.shelf.folder / f"{uuid.uuid4().hex}.part"

    def adopt(self, part: Path, filename: str) -> FileRecord:
        """Make an upload that is whole, and on disk, a file."""
        file_id = f"file-{uuid.uuid4().hex}"
        part.replace(self.path(file_id))
        return self.enter(file_id, filename, "batch")

    def enter(self, file_id: str, filename: str, purpose: Purpose) -> FileRecord:
        """Say that the bytes of `file_id` are all there."""
        return self.shelf.save(
            FileRecord(
                id=file_id,
                bytes=os.stat(self.path(file_id)).st_size,
                created_at=int(time.time()),
                filename=filename,
                purpose=purpose,
            )
        )

    def remove(self, file_id: str) -> None:
        """Delete record and bytes."""
        self.shelf.drop(file_id)
        self.path(file_id).unlink(missing_ok=True)
