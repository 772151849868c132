"""How rows in prefix order are cut into shards: groups by themselves, the rest packed.

Rows that share a prefix are neighbours in the order. A border is the number of whole blocks that
a row shares with the one before it:

    row       a0  a1  a2  a3  b0  c0  c1  c2  c3  c4
    border     0   2   2   2   0   0   1   1   3   1
    depth      2   2   2   2   0   1   1   1   1   1     best of the windows of GROUP_ROWS rows
    run       '----- A -----' '' '------- C -------'

Positions are kept as ranges, so that a million rows take little memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_batch.worker.contract import SHARD_ROWS

GROUP_ROWS = 4
"""Fewest rows that make a shared prefix a group."""

SMALLEST_SHARD = 8
"""Fewest rows to a shard, where the batch has them."""

Ranges = list[tuple[int, int]]
"""Positions from, up to but not including; in the order they are to be run."""


class Order(Protocol):
    """Rows in prefix order, by their position."""

    @property
    def borders(self) -> array[int]: ...

    def name(self, at: int, depth: int) -> str:
        """The name of the prefix of `depth` (> 0) blocks of a row: equal name, equal prefix."""

    def depth_between(self, first: int, last: int) -> int:
        """The number of blocks that two rows share."""


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes one shard."""

    group: str
    ranges: Ranges

    @property
    def positions(self) -> Iterator[int]:
        for start, stop in self.ranges:
            yield from range(start, stop)


@dataclass(frozen=True, slots=True)
class Cut:
    parts: list[Part]  # in prefix order
    groups: int  # prefixes of at least one block that GROUP_ROWS or more rows share


def shard_rows(rows: int) -> int:
    """Most rows to a shard: a quarter of a small batch, so that a second worker finds some.

    It depends on the batch alone, since an upload that goes on after a crash must cut the same.
    """
    return min(SHARD_ROWS, max(SMALLEST_SHARD, -(-rows // 4)))


def cut(order: Order, limit: int) -> Cut:
    """Parts of at most `limit` rows that, where they can, hold one group each.

    The group of a row is the deepest run of whole blocks that it shares with at least
    GROUP_ROWS - 1 others. A group of half a shard or more is cut by itself, evenly; smaller ones
    and single rows are packed together in prefix order.
    """
    groups = _groups(order)
    single = groups.pop("", [])
    large = {name for name, ranges in groups.items() if 2 * _size(ranges) >= limit}
    parts = [Part(name, part) for name in large for part in _even(groups[name], limit)]
    small = [ranges for name, ranges in groups.items() if name not in large]
    parts += [Part(_label(order, part), part) for part in _packed(single, small, limit)]
    parts.sort(key=lambda part: part.ranges[0])
    return Cut(parts, len(groups))


def _depths(borders: array[int]) -> array[int]:
    """Of each row, the most blocks it shares with GROUP_ROWS - 1 others.

    A prefix shared by GROUP_ROWS neighbours is the least of GROUP_ROWS - 1 borders in succession,
    and a row has the best of its windows.
    """
    depths = array("I", bytes(4 * len(borders)))
    windows = zip(*(borders[ahead:] for ahead in range(1, GROUP_ROWS)), strict=False)
    for start, window in enumerate(windows):
        depth = min(window)
        if depth:
            for at in range(start, start + GROUP_ROWS):
                if depths[at] < depth:
                    depths[at] = depth
    return depths


def _groups(order: Order) -> dict[str, Ranges]:
    """The runs of each group; "" holds the rows without one."""
    borders = order.borders
    depths = _depths(borders)
    groups: dict[str, Ranges] = {}
    name, start, before = "", 0, 0
    for at, depth in enumerate(depths):
        # The name before holds on while the depth does and the border is that deep.
        if not (at and depth == before and borders[at] >= depth):
            if at:
                groups.setdefault(name, []).append((start, at))
            name, start = order.name(at, depth) if depth else "", at
        before = depth
    if depths:
        groups.setdefault(name, []).append((start, len(depths)))
    return groups


def _size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _even(ranges: Ranges, limit: int) -> Iterator[Ranges]:
    """`ranges` in as few parts of at most `limit` as it takes, all of nearly one size."""
    size = _size(ranges)
    count = -(-size // limit)
    rest = list(reversed(ranges))
    for number in range(count):
        wanted = size * (number + 1) // count - size * number // count
        part: Ranges = []
        while wanted:
            start, stop = rest.pop()
            middle = min(stop, start + wanted)
            part.append((start, middle))
            wanted -= middle - start
            if middle < stop:
                rest.append((middle, stop))
        yield part


def _packed(single: Ranges, small: Sequence[Ranges], limit: int) -> Iterator[Ranges]:
    """Fill parts up to `limit`; a small group, less than half of one, is never cut."""
    units = [(ranges, True) for ranges in small] + [([one], False) for one in single]
    units.sort(key=lambda unit: unit[0][0])
    part: Ranges = []
    room = limit
    for ranges, whole in units:
        if whole and _size(ranges) > room:
            yield part
            part, room = [], limit
        for start, stop in ranges:
            while start < stop:
                if not room:
                    yield part
                    part, room = [], limit
                middle = min(stop, start + room)
                part.append((start, middle))
                room -= middle - start
                start = middle
    if part:
        yield part


def _label(order: Order, part: Ranges) -> str:
    """The blocks that all rows of a packed part share, as a group name."""
    first = min(start for start, _ in part)
    last = max(stop for _, stop in part) - 1
    depth = order.depth_between(first, last)
    return order.name(first, depth) if depth else ""
