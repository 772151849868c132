"""Prefixes at hand: in memory, within a bound of bytes, and behind it on SSD.

What is used least recently goes first. Prompts are taken depth first, and a parent is used for
each of its children, so it stays while its subtree drains, and what is drained goes before it:

    P ─┬─ q1 ─┬─         use        P  q1  P  q2  P  q3 …
       ├─ q2 ─┼─         goes              q1     q2
       └─ q3 ─┴─

On SSD goes what has proved of use a second time: a later forward starts from it, or it is computed
and had been before, by whatever process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from dflash_batch.decoder.prefix import COLD, Held, Start, Tokens
from dflash_batch.decoder.ssd import Ssd

GiB = 1 << 30

_ENDLESS = 1 << 62


class Tiers:
    """The prefixes of one target and draft."""

    def __init__(self, cuttable: bool, ram: int = 2 * GiB, ssd: Ssd | None = None) -> None:
        """`ram` bounds the bytes of snapshots held in memory."""
        self.ram = ram
        self.ssd = ssd
        self._cuttable = cuttable
        self._held: OrderedDict[int, Held] = OrderedDict()  # by id, the latest used last
        self._uses: dict[int, int] = {}  # by id, the longest use so far
        self.longest = _ENDLESS  # tokens of a prefix that may fit into memory

    @property
    def held(self) -> list[Held]:
        """What is in memory, the least recently used first."""
        return list(self._held.values())

    @property
    def bytes(self) -> int:
        """Bytes of what is in memory, for writes under way too."""
        pending = self.ssd.pending_bytes if self.ssd is not None else 0
        return sum(held.bytes for held in self._held.values()) + pending

    def start(self, prompt: Tokens) -> Start:
        """The prefix in memory that saves most of `prompt`."""
        best = COLD
        for held in reversed(self._held.values()):  # of equal ones, the one used last
            length = held.serves(prompt, self._cuttable)
            if length > best.length:
                best = Start(length, held)
        return best

    def fetch(self, prompt: Tokens) -> Start:
        """The same, read from SSD before if that saves enough."""
        start = self.start(prompt)
        if self.ssd is not None and start.length < len(prompt) - 1:
            held = self.ssd.load(prompt, start.length)
            if held is not None and self._keep(held):
                return self.start(prompt)
        return start

    def add(self, held: Held) -> None:
        """Hold a prefix that was computed."""
        if not self._keep(held):
            return
        if self.ssd is not None and held.logits is None and self.ssd.met(held.tokens):
            self.ssd.offer(held, len(held.tokens))

    def use(self, starts: Sequence[Start]) -> None:
        """One forward starts from these. Of what one prefix gives them, all share the least."""
        for name in {id(start.held) for start in starts} & self._held.keys():
            held = self._held[name]
            length = min(start.length for start in starts if start.held is held)
            self._held.move_to_end(name)
            before = self._uses.get(name, 0)
            self._uses[name] = max(before, length)
            twice = min(before, length)
            whole = held.logits is not None and twice == len(held.tokens)  # a prompt, not a prefix
            if self.ssd is not None and twice > held.ssd and not whole:
                self.ssd.offer(held, twice)

    def computed(self, tokens: int, seconds: float) -> None:
        """A forward of prompt tokens took so long."""
        if self.ssd is not None:
            self.ssd.computed(tokens, seconds)

    def why_not(self, prompt: Tokens, start: Start) -> str | None:
        """Why SSD had no part in this start, if it might have had."""
        return None if self.ssd is None or start.ssd else self.ssd.why_not(prompt, start.length)

    def forget(self) -> None:
        """Give the memory back."""
        self._held.clear()
        self._uses.clear()

    def close(self) -> None:
        self.forget()
        if self.ssd is not None:
            self.ssd.close()
            self.ssd = None

    def _keep(self, held: Held) -> bool:
        """Make room for a prefix and hold it; whether it fits at all."""
        if held.bytes > self.ram:
            self.longest = min(self.longest, len(held.tokens) - 1)
            return False
        while self._held and self.bytes + held.bytes > self.ram:
            name, _ = self._held.popitem(last=False)
            self._uses.pop(name, None)
        if self.bytes + held.bytes > self.ram:
            return False
        self._held[id(held)] = held
        return True


def memory(snapshot: Any) -> int:
    """Bytes of the arrays in a snapshot, which is a tree of tuples."""
    if isinstance(snapshot, mx.array):
        return snapshot.nbytes
    return sum(map(memory, snapshot)) if isinstance(snapshot, tuple) else 0
