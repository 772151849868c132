"""The guard of memory: looks at what an engine takes, and says when it has to be replaced."""

from __future__ import annotations

import os
from collections.abc import Callable

from dflash_batch.worker.footprint import Pressure, footprint, pressure

SHARE = 0.9
"""Of the machine's memory, if no limit is set: beyond it macOS swaps the model itself."""


class Guard:
    """Looks at one engine. `limit` is in bytes; None: a share of what the machine has."""

    def __init__(
        self,
        limit: int | None,
        *,
        taken: Callable[[int], int | None] = footprint,
        shortness: Callable[[], Pressure] = pressure,
    ) -> None:
        self.limit = limit or int(SHARE * _memory())
        self.highest = 0  # bytes the engine was seen to take
        self.was_short = False  # at the last look: over the limit, or the system had none left
        self._taken = taken
        self._shortness = shortness

    def look(self, pid: int) -> bool:
        """Whether process `pid` takes more than it may."""
        taken = self._taken(pid) or 0
        self.highest = max(self.highest, taken)
        over = taken > self.limit
        self.was_short = over or self._shortness() is Pressure.CRITICAL
        return over

    def forget(self) -> None:
        """The engine is gone."""
        self.highest, self.was_short = 0, False


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
