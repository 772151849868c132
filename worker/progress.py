"""What a run tells whoever watches it: phases, news, and where it stands."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dflash_batch.worker.results import ResultFiles

SHOW_S = 0.2
"""Fewest seconds between progress reports."""

RATE_S = 20.0
"""Seconds over which speed is averaged."""


@dataclass(frozen=True)
class Progress:
    """A run at one moment. Counts cover the whole batch, speeds the last seconds."""

    total: int  # rows, without rejected lines
    done: int  # of these, written
    ok: int
    failed: int  # rejected lines included
    running: int  # rows in the decoder
    completion_tokens: int
    tokens_per_s: float
    tokens_per_cycle: float
    cached_share: float  # of the prompt tokens
    elapsed_s: float  # over all sessions
    eta_s: float | None


class Watcher(Protocol):
    """Who is told what a run does. Called from the thread that runs, so it must be quick."""

    def on_phase(self, text: str, share: float | None) -> None:
        """A phase has begun or moved on; `share` (0..1) of it is done, None if unknown."""

    def on_progress(self, progress: Progress) -> None:
        """Rows are being decoded."""

    def on_note(self, text: str) -> None:
        """Something happened that a person may want to know."""


class Reporter:
    """Turns the files' totals into progress reports, a few a second."""

    def __init__(
        self, watch: Watcher, files: ResultFiles, rows: int, elapsed_s: Callable[[], float]
    ) -> None:
        self._watch = watch
        self._files = files
        self._rows = rows
        self._elapsed_s = elapsed_s
        self._shown = 0.0
        self._points: deque[tuple[float, int, int]] = deque()  # time, rows, tokens

    def note(self, text: str) -> None:
        self._watch.on_note(text)

    def loading(self, share: float | None) -> None:
        """The worker is there, its model is not."""
        if self._is_due():
            self._watch.on_phase("loading the model", share)

    def running(self, active: int, tokens_per_s: float) -> None:
        """Report where the run stands. `tokens_per_s` is the worker's own figure, 0 if unknown."""
        if self._is_due():
            self._watch.on_progress(self._progress(active, tokens_per_s))

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self._shown < SHOW_S:
            return False
        self._shown = now
        return True

    def _progress(self, active: int, tokens_per_s: float) -> Progress:
        totals, done = self._files.totals, len(self._files.written)
        rows_per_s, written_per_s = self._speed(done, totals.completion_tokens)
        return Progress(
            total=self._rows,
            done=done,
            ok=totals.ok,
            failed=totals.failed,
            running=active,
            completion_tokens=totals.completion_tokens,
            tokens_per_s=tokens_per_s or written_per_s,
            tokens_per_cycle=totals.tokens_per_cycle,
            cached_share=totals.cached_tokens / max(1, totals.prompt_tokens),
            elapsed_s=self._elapsed_s(),
            eta_s=(self._rows - done) / rows_per_s if rows_per_s else None,
        )

    def _speed(self, rows: int, tokens: int) -> tuple[float, float]:
        """Rows and tokens a second since the oldest point of the window."""
        now = time.monotonic()
        self._points.append((now, rows, tokens))
        # Rows may take longer than the window: the point before the last change stays.
        while len(self._points) > 2 and now - self._points[1][0] > RATE_S:
            if self._points[1][1] == rows:
                break
            self._points.popleft()
        began, rows_then, tokens_then = self._points[0]
        seconds = max(now - began, 1e-3)
        return (rows - rows_then) / seconds, (tokens - tokens_then) / seconds
