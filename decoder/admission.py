"""Admission: waiting rows come in, in groups, a chunk of prompt tokens at a time.

While rows decode, they wait for no more than `STALL` seconds of prompts between two of their
cycles, so a long prompt does not hold them up; while none does, prompts run through.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from dflash_batch.decoder.echo import Scorer
from dflash_batch.decoder.prefill import Prefiller, Staged, Start
from dflash_batch.decoder.row import Row

LOOK_AHEAD = 32
"""Waiting rows compared to find a shared prefix."""

STALL = 0.5
"""Seconds of prompt work between two cycles of rows that decode."""


class Group(NamedTuple):
    """Rows whose prompts have been run; row i of `staged` is rows[i], its first token to come."""

    rows: list[Row]
    started: float
    staged: Staged


class Rider(NamedTuple):
    """A row that needs no forward of its own: the end of its prompt rides in cycles."""

    row: Row
    start: Start


class Admission:
    """The rows that wait, and the group that is on its way in."""

    def __init__(self, prefiller: Prefiller, scorer: Scorer) -> None:
        self._prefiller = prefiller
        self._scorer = scorer
        self._waiting: deque[Row] = deque()
        self._group: list[Row] = []
        self._run: Generator[None, None, Staged] | None = None
        self._started = 0.0

    def __len__(self) -> int:
        """Rows that wait or are on their way."""
        return len(self._waiting) + len(self._group)

    def __iter__(self) -> Iterator[Row]:
        return iter((*self._waiting, *self._group))

    @property
    def group(self) -> list[Row]:
        """The rows on their way."""
        return self._group

    @property
    def coming(self) -> int:
        """Rows on their way: they have a place already."""
        return len(self._group)

    @property
    def waiting(self) -> deque[Row]:
        """Rows without a place, in their order."""
        return self._waiting

    def add(self, row: Row) -> None:
        self._waiting.append(row)

    def drop_cancelled(self) -> None:
        """Forget waiting rows that were cancelled; a group goes on unless all of it was."""
        self._waiting = deque(row for row in self._waiting if not row.cancelled)
        if self._group and all(row.cancelled for row in self._group):
            self._leave()

    def clear(self) -> None:
        self._waiting.clear()
        self._leave()
        self._prefiller.forget()

    def riders(self, free: int, most: int, may: Callable[[Row], bool]) -> Iterator[Rider]:
        """Rows at the head, at most `free`, of whose prompts at most `most` tokens are left.

        None while a group is on its way: rows come in in their order.
        """
        while free and self._waiting and not self._group and may(self._waiting[0]):
            prompts = [row.prompt for row in self._ahead()]
            start = self._prefiller.rides(prompts[0], prompts[1:], most)
            if start is None:
                return
            free -= 1
            yield Rider(self._waiting.popleft(), start)

    def advance(self, free: int, until: float | None) -> Group | None:
        """Work on the group on its way, or on a new one of at most `free` rows.

        Returns it when it is done; None when `until` (time.perf_counter) has passed, which may be
        after a chunk, or when there is nothing to do.
        """
        if self._run is None:
            if not (free and self._waiting):
                return None
            self._begin(free)
        # Chunks are of a size that can be waited for, as soon as it is known how long they take.
        rate = self._prefiller.rate
        self._prefiller.most_tokens = int(STALL * rate) if until and rate else None
        while self._run is not None:
            try:
                next(self._run)
            except StopIteration as end:
                group = Group(self._group, self._started, end.value)
                self._group, self._run = [], None
                return group
            if until is not None and time.perf_counter() > until:
                break
        return None

    def _begin(self, free: int) -> None:
        prompts = [row.prompt for row in self._ahead()]
        scored = self._waiting[0].request.scored
        most = self._scorer.group if scored else self._prefiller.group
        count = most(prompts, free)
        self._group = [self._waiting.popleft() for _ in range(count)]
        if scored:
            self._run = self._scorer.run(self._group)
        else:
            self._run = self._prefiller.run(prompts[:count], prompts[count:])
        self._started = time.perf_counter()

    def _ahead(self) -> list[Row]:
        """Rows at the head that come in alike: all scored, or none."""
        ahead = itertools.islice(self._waiting, LOOK_AHEAD)
        scored = self._waiting[0].request.scored
        return list(itertools.takewhile(lambda row: row.request.scored == scored, ahead))

    def _leave(self) -> None:
        if self._run is not None:
            self._run.close()
        self._group, self._run = [], None
