"""Tokens per second, smoothed, for people who look."""

from __future__ import annotations

import time


class Speed:
    """Made from a counter that is read now and then."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.tokens_per_s = 0.0
        self._tokens: int | None = None
        self._at = 0.0

    def update(self, tokens: int) -> None:
        """`tokens`: completed since the engine started."""
        now = time.monotonic()
        if self._tokens is not None and now > self._at:
            speed = (tokens - self._tokens) / (now - self._at)
            self.tokens_per_s = 0.8 * self.tokens_per_s + 0.2 * speed
        self._tokens, self._at = tokens, now
