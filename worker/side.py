"""What both sides of the queue stand on: the client, the view, the scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from dflash_batch.worker.contract import Key
from dflash_batch.worker.mirror import Mirror

CHUNK = 200
"""Most commands in one pipeline."""

_T = TypeVar("_T")


class Side:
    """The attributes that `Queue` sets."""

    client: Any
    mirror: Mirror | None
    _view: str  # key of RQ's list, or ""
    _script: Any

    def _run(self, operation: str, *args: str | bytes | int | float) -> Any:
        return self._script(keys=[Key.META], args=[operation, *args])


def chunks(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
