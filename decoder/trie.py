"""The plan: which waiting prompts share which prefix, and in what order to take them. Pure logic.

A token trie, kept as its leaves in order. What any two prompts share is the least of the borders
between them, so a sorted list with the length shared by neighbours says all that a trie would:

    leaf            border      trie
    1 1 1 1 5                    1 1 1 1 ─┬─ 5
    1 1 1 1 6       4                     └─ 6        branch at 4
    1 1 2 2 7       2            └ at 2 ─ 2 2 7
    3 1             0

Taking, each time, the leaf that shares most with the one before walks the trie depth first: a
subtree is empty before its parent is left, and a parent's snapshot need not come back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from dflash_batch.decoder.prefix import Tokens, common

T = TypeVar("T")

PATIENCE = 256
"""Most rows that came later and may be taken before one that shares nothing with them."""

FAR = 256
"""Neighbours looked at on either side: that many rows behind a prefix are as good as more."""


class Branch(NamedTuple):
    """A point where prompts part, as one of them sees it."""

    depth: int  # tokens before it
    leaves: int  # different prompts with these tokens, itself among them


@dataclass(slots=True, eq=False)
class Leaf(Generic[T]):
    """One prompt, and those who wait with it, the oldest first."""

    tokens: Tokens
    key: bytes
    items: list[tuple[int, T]] = field(default_factory=list)  # arrival, item


class Trie(Generic[T]):
    """Prompts that wait, each with its items."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []  # sorted
        self._leaves: list[Leaf[T]] = []
        self._borders: list[int] = []  # [i]: tokens that leaves i and i+1 share
        self._arrivals: dict[int, Leaf[T]] = {}  # of each item, in order
        self._arrived = 0

    def __len__(self) -> int:
        """Items waiting."""
        return len(self._arrivals)

    def __iter__(self) -> Iterator[T]:
        """Items in the order of their arrival."""
        for arrival, leaf in self._arrivals.items():
            yield next(item for at, item in leaf.items if at == arrival)

    @property
    def leaves(self) -> list[Leaf[T]]:
        """The different prompts, in order."""
        return self._leaves

    @property
    def ideal(self) -> int:
        """Tokens of all edges: what prefilling every prompt must cost at least."""
        return sum(len(leaf.tokens) for leaf in self._leaves) - sum(self._borders)

    def add(self, tokens: Tokens, item: T) -> None:
        key = _key(tokens)
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            self._insert(at, Leaf(tokens, key))
        leaf = self._leaves[at]
        leaf.items.append((self._arrived, item))
        self._arrivals[self._arrived] = leaf
        self._arrived += 1

    def take(self, leaf: Leaf[T], most: int) -> list[T]:
        """Take out up to `most` items of a leaf, the oldest first."""
        taken, leaf.items = leaf.items[:most], leaf.items[most:]
        for arrival, _ in taken:
            del self._arrivals[arrival]
        if not leaf.items:
            self._remove(bisect_left(self._keys, leaf.key))
        return [item for _, item in taken]

    def discard(self, item: T) -> None:
        """Take out one item, if it waits."""
        for arrival, leaf in self._arrivals.items():
            if (arrival, item) in leaf.items:
                leaf.items.remove((arrival, item))
                del self._arrivals[arrival]
                if not leaf.items:
                    self._remove(bisect_left(self._keys, leaf.key))
                return

    def order(self, after: Tokens | None, least: int) -> Iterator[Leaf[T]]:
        """Leaves in the order to take them; `after` is the prompt that was taken last.

        First all that share at least `least` tokens with it, those that share most before those
        that share less; then the oldest, and so on. The trie must not change meanwhile.
        """
        left = dict.fromkeys(range(len(self._leaves)))
        overdue = self._overdue()
        first = overdue or next(iter(self._arrivals.values()), None)
        if after is not None and overdue is None:
            shared, near = self.nearest(after)
            first = near if shared >= least else first
        at = self._at(first)
        oldest = iter(self._arrivals.values())
        while at is not None:
            yield from self._drain(at, least, left)
            at = next((i for leaf in oldest if (i := self._at(leaf)) in left), None)

    def branches(self, tokens: Tokens) -> list[Branch]:
        """Where waiting prompts part from `tokens`, the shallowest first.

        Each prompt's last token is always run, so none parts at its very end.
        """
        key, most = _key(tokens), len(tokens) - 1
        at = bisect_left(self._keys, key)
        own = at < len(self._keys) and self._keys[at] == key
        counts: dict[int, int] = {}
        for side in self._sides(tokens, at, own):
            for depth in side:
                if depth < 1:
                    break
                depth = min(depth, most)
                counts[depth] = counts.get(depth, 0) + 1
        found, leaves = [], 1
        for depth in sorted(counts, reverse=True):
            leaves += counts[depth]
            found.append(Branch(depth, leaves))
        return [branch for branch in reversed(found) if branch.depth > 0]

    def newest(self, leaf: Leaf[T]) -> bool:
        """Whether nothing has come after this prompt."""
        return leaf.items[-1][0] == self._arrived - 1

    def nearest(self, tokens: Tokens) -> tuple[int, Leaf[T] | None]:
        """How many tokens `tokens` shares with any prompt, at most; and the shortest such."""
        at = bisect_left(self._keys, _key(tokens))
        near = self._leaves[max(0, at - 1) : at + 1]
        shared = [(common(tokens, leaf.tokens), -len(leaf.tokens), leaf) for leaf in near]
        best = max(shared, key=lambda found: found[:2], default=(0, 0, None))
        return best[0], best[2]

    def check(self) -> None:
        """What must always hold."""
        assert self._keys == sorted(set(self._keys))
        assert len(self._borders) == max(0, len(self._leaves) - 1)
        for i, border in enumerate(self._borders):
            assert border == common(self._leaves[i].tokens, self._leaves[i + 1].tokens)
        assert sum(len(leaf.items) for leaf in self._leaves) == len(self)
        assert all(leaf.items for leaf in self._leaves)

    def _sides(self, tokens: Tokens, at: int, own: bool) -> Iterator[Iterator[int]]:
        """Tokens shared with the leaves to the left, and with those to the right, nearest first.

        leaf      at-2     at-1   [at]   at+1     at+2          own: `tokens` is leaf `at`
        border       at-2     at-1     at     at+1
        """
        first = at + 1 if own else at
        before = self._shared(tokens, at - 1, own and at > 0, at - 1)
        after = self._shared(tokens, first, own and first < len(self._leaves), at)
        yield _falling(before, (self._borders[i] for i in range(at - 2, max(-1, at - FAR), -1)))
        stop = min(len(self._borders), first + FAR)
        yield _falling(after, (self._borders[i] for i in range(first, stop)))

    def _shared(self, tokens: Tokens, leaf: int, known: bool, border: int) -> int | None:
        """Tokens shared with a leaf next to them; None where there is none."""
        if known:
            return self._borders[border]
        inside = 0 <= leaf < len(self._leaves)
        return common(tokens, self._leaves[leaf].tokens) if inside else None

    def _insert(self, at: int, leaf: Leaf[T]) -> None:
        self._keys.insert(at, leaf.key)
        self._leaves.insert(at, leaf)
        around = [
            common(leaf.tokens, self._leaves[other].tokens)
            for other in (at - 1, at + 1)
            if 0 <= other < len(self._leaves)
        ]
        self._borders[max(0, at - 1) : at] = around

    def _remove(self, at: int) -> None:
        del self._keys[at], self._leaves[at]
        around = self._borders[max(0, at - 1) : at + 1]
        inner = [min(around)] if len(around) == 2 else []
        self._borders[max(0, at - 1) : at + 1] = inner

    def _at(self, leaf: Leaf[T] | None) -> int | None:
        return None if leaf is None else bisect_left(self._keys, leaf.key)

    def _overdue(self) -> Leaf[T] | None:
        """The oldest, if too many that came later went before it."""
        oldest = next(iter(self._arrivals), None)
        if oldest is None or self._arrived - len(self) - oldest <= PATIENCE:
            return None
        return self._arrivals[oldest]

    def _drain(self, at: int, least: int, left: dict[int, None]) -> Iterator[Leaf[T]]:
        """From leaf `at` outwards, always to the side that shares more, while that is enough."""
        del left[at]
        yield self._leaves[at]
        low, high = at - 1, at
        below = self._borders[low] if low >= 0 else -1  # shared with the leaves not yet taken
        above = self._borders[high] if high < len(self._borders) else -1
        while max(below, above) >= least:
            if above >= below:
                at, high = high + 1, high + 1
                above = min(above, self._borders[high]) if high < len(self._borders) else -1
            else:
                at, low = low, low - 1
                below = min(below, self._borders[low]) if low >= 0 else -1
            if at in left:
                del left[at]
                yield self._leaves[at]


def _falling(first: int | None, borders: Iterator[int]) -> Iterator[int]:
    """Tokens shared with one leaf after the other: the least of the borders up to there."""
    if first is None:
        return
    yield first
    for border in borders:
        first = min(first, border)
        yield first


def _key(tokens: Tokens) -> bytes:
    """Bytes in whose order prompts are sorted: token by token, the shorter before the longer."""
    return tokens.astype(">i4").tobytes()
