"""From which length on reading a prefix beats computing it, as this machine has shown.

Reading costs a start and time for each byte; computing, at the margin, time for each token:

    seconds │        ╱ compute
            │      ╱  __── read
            │  __╳──             the break-even length lies where they cross
            └────┴──────── tokens
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

LEARNING = 0.2
"""Weight of a new measurement."""

SMALL, LARGE = 1 << 20, 4 << 20
"""Bytes up to which a read is mostly its start, and from which it is mostly bytes."""

FEWEST = 32
"""Tokens from which on a forward says what a token costs."""


class Judge(Protocol):
    """Whether an entry of `size` bytes is worth reading, or writing, for `tokens` tokens."""

    def worth(self, tokens: int, size: int) -> bool: ...
    def computed(self, tokens: int, seconds: float) -> None: ...
    def read(self, size: int, seconds: float) -> None: ...


@dataclass(slots=True)
class Pace:
    """Measured seconds. What was not measured yet is taken for an ordinary SSD."""

    token_s: float | None = None  # to compute one
    start_s: float = 2e-3  # before the first byte is there
    byte_s: float = 1e-9

    def worth(self, tokens: int, size: int) -> bool:
        return self.token_s is not None and self.read_s(size) < tokens * self.token_s

    def read_s(self, size: int) -> float:
        return self.start_s + size * self.byte_s

    def break_even(self, bytes_per_token: float) -> float:
        """Tokens from which on reading pays; infinite where it never does."""
        gain = (self.token_s or 0.0) - bytes_per_token * self.byte_s
        return self.start_s / gain if gain > 0 else math.inf

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in a prefill of one row."""
        if tokens >= FEWEST:
            self.token_s = _learn(self.token_s, seconds / tokens)

    def read(self, size: int, seconds: float) -> None:
        """Take in a read from the disk, its check included."""
        if size <= SMALL:
            self.start_s = _learn(self.start_s, seconds)
        elif size >= LARGE:
            self.byte_s = _learn(self.byte_s, max(seconds - self.start_s, seconds / 2) / size)

    def dump(self) -> dict[str, float | None]:
        return asdict(self)

    @classmethod
    def restored(cls, data: Any) -> Pace:
        """What an earlier process had learned; anything else is ignored."""
        pace = cls()
        if isinstance(data, dict):
            for name in ("token_s", "start_s", "byte_s"):
                value = data.get(name)
                if isinstance(value, float) and 0 < value < math.inf:
                    setattr(pace, name, value)
        return pace


def _learn(known: float | None, new: float) -> float:
    return new if known is None else known + LEARNING * (new - known)
