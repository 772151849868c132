"""Admission: waiting rows come in, in groups, a chunk of prompt tokens at a time.

While rows decode, they wait for no more than `STALL` seconds of prompts between two of their
cycles, so a long prompt does not hold them up; while none does, prompts run through.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from typing import NamedTuple

from dflash_batch.decoder.echo import Scorer
from dflash_batch.decoder.prefill import WORTH, Copies, Prefiller, Staged
from dflash_batch.decoder.prefix import Start, Tokens
from dflash_batch.decoder.row import Row
from dflash_batch.decoder.trie import Trie

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
        self._scored: deque[Row] = deque()  # rows whose prompts are scored: they share nothing
        self._waiting = Trie[Row]()
        self._last: Tokens | None = None  # the prompt taken last
        self._group: list[Row] = []
        self._run: Generator[None, None, Staged] | None = None
        self._started = 0.0

    def __len__(self) -> int:
        """Rows that wait or are on their way."""
        return self.waiting + len(self._group)

    def __iter__(self) -> Iterator[Row]:
        return iter((*self._waiting, *self._scored, *self._group))

    @property
    def group(self) -> list[Row]:
        """The rows on their way."""
        return self._group

    @property
    def coming(self) -> int:
        """Rows on their way: they have a place already."""
        return len(self._group)

    @property
    def waiting(self) -> int:
        """Rows without a place."""
        return len(self._waiting) + len(self._scored)

    def ahead(self, count: int) -> list[Row]:
        """The rows whose turn is next, at most `count`."""
        leaves = self._waiting.order(self._last, WORTH)
        others = (row for leaf in leaves for _, row in leaf.items)
        scored = self._scored if self._scores() else ()
        return list(islice((*scored, *others), count))

    def add(self, row: Row) -> None:
        if row.request.scored:
            self._scored.append(row)
        else:
            self._waiting.add(row.prompt, row)

    def _scores(self) -> bool:
        """Whether it is the turn of rows whose prompts are scored: the oldest of all is one."""
        oldest = next(iter(self._waiting), None)
        return bool(self._scored) and (oldest is None or self._scored[0].added <= oldest.added)

    def drop_cancelled(self) -> None:
        """Forget waiting rows that were cancelled; a group goes on unless all of it was."""
        for row in [row for row in self._waiting if row.cancelled]:
            self._waiting.discard(row)
        self._scored = deque(row for row in self._scored if not row.cancelled)
        if self._group and all(row.cancelled for row in self._group):
            self._leave()

    def clear(self) -> None:
        self._waiting, self._last = Trie[Row](), None
        self._scored.clear()
        self._leave()
        self._prefiller.close()

    def riders(self, free: int, most: int, may: Callable[[Row], bool]) -> Iterator[Rider]:
        """Rows whose turn it is, at most `free`, of whose prompts at most `most` tokens are left.

        None while a group is on its way: rows come in in their order.
        """
        while free and self._waiting and not (self._group or self._scores()):
            leaf = next(self._waiting.order(self._last, WORTH))
            if not may(leaf.items[0][1]):
                return
            start = self._prefiller.rides(leaf, self._waiting, most)
            if start is None:
                return
            free -= 1
            self._last = leaf.tokens
            (row,) = self._waiting.take(leaf, 1)
            self._prefiller.tiers.use([start])
            row.came(self._prefiller.origin(row.prompt, start))
            yield Rider(row, start)

    def advance(self, free: int, until: float | None) -> Group | None:
        """Work on the group on its way, or on a new one of at most `free` rows.

        Returns it when it is done; None when `until` (time.perf_counter) has passed, which may be
        after a chunk, or when there is nothing to do.
        """
        if self._run is None:
            if not (free and self.waiting):
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
                for row, origin in zip(group.rows, group.staged.origins, strict=True):
                    row.came(origin)
                self._group, self._run = [], None
                return group
            if until is not None and time.perf_counter() > until:
                break
        return None

    def _begin(self, free: int) -> None:
        self._started = time.perf_counter()
        if self._scores():
            count = self._scorer.group([row.prompt for row in self._scored], free)
            self._group = [self._scored.popleft() for _ in range(count)]
            self._run = self._scorer.run(self._group)
            return
        group = self._prefiller.group(self._waiting, self._last, free)
        depths = self._prefiller.depths(group[0][0].tokens, self._waiting)
        copies = [Copies(leaf.tokens, n, n < len(leaf.items)) for leaf, n in group]
        self._group = [row for leaf, n in group for row in self._waiting.take(leaf, n)]
        self._last = copies[-1].tokens
        self._run = self._prefiller.run(copies, depths)

    def _leave(self) -> None:
        if self._run is not None:
            self._run.close()
        self._group, self._run = [], None
