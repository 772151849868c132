"""How many rows an engine decodes together: fewer after trouble with memory, more after a while.

An engine that got into trouble soon after its start was given too much. One that ran well for
long has leaked or fragmented its memory: the next one may have as much.
"""

from __future__ import annotations

import time

SETTLED_S = 600.0
"""An engine that has run for so long without trouble was not too wide."""


class Width:
    """Between 1 and `most`; changes from one engine to the next."""

    def __init__(self, most: int) -> None:
        self.rows = self._most = most
        self._started = time.monotonic()

    @property
    def least(self) -> bool:
        """Whether rows run one at a time: what is out of memory then is a row by itself."""
        return self.rows == 1

    def start(self) -> None:
        """An engine starts."""
        self._started = time.monotonic()

    def trouble(self) -> None:
        """It has run out of memory, or takes too much."""
        if not self._settled:
            self.rows = max(1, self.rows // 2)

    def peace(self) -> None:
        """It ended for another reason."""
        if self._settled:
            self.rows = min(self._most, 2 * self.rows)

    @property
    def _settled(self) -> bool:
        return time.monotonic() - self._started > SETTLED_S
