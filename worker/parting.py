"""Rows that leave their shard: unstarted ones to a worker that is idle, failed ones to a later try.

The engine is asked for rows it has not started when another worker has nothing to do; what it
hands over, and rows that failed for a reason that may pass, wait in the holdings until the queue
has made shards of their own of them.
"""

from __future__ import annotations

import time

from dflash_batch.worker.holdings import Held, Holdings
from dflash_batch.worker.keeper import Keeper
from dflash_batch.worker.leases import Parted
from dflash_batch.worker.log import say
from dflash_batch.worker.queue import Queue

ASK_S = 0.5
"""Between requests to the engine: the idle worker needs a moment to find what was given back."""


class Parting:
    """Moves rows out of held shards."""

    def __init__(self, queue: Queue, keeper: Keeper, holdings: Holdings) -> None:
        self._queue = queue
        self._keeper = keeper
        self._holdings = holdings
        self._next_ask = 0.0

    def feed(self) -> None:
        """Another worker is idle: have the engine hand over half of what it has not started."""
        if time.monotonic() >= self._next_ask and not self._holdings.alone:
            self._next_ask = time.monotonic() + ASK_S
            self._keeper.ask_back()

    def settle(self) -> tuple[list[str], bool]:
        """Tell the queue. Returns the shards that ended by it, and whether one may be lost."""
        ended: list[str] = []
        lost = False
        for held in self._holdings:
            if not held.leaving and (held.returned or held.again):
                held_on = self._give(held) and self._try_later(held)
                lost = lost or not held_on
                if held.over:
                    ended.append(held.lease.shard.id)
        return ended, lost

    def _give(self, held: Held) -> bool:
        """False when the shard is not held any more."""
        if not held.returned:
            return True
        parted = self._queue.give_back(held.lease, held.returned)
        if parted is None:
            return False
        say("given_back", shard=held.lease.shard.id, rows=len(held.returned))
        held.returned.clear()
        self._part(held, parted)
        return True

    def _try_later(self, held: Held) -> bool:
        """False when the shard is not held any more."""
        while held.again:
            result = held.again[-1]
            row = next(row for row in held.lease.shard.rows if row.index == result.index)
            parted = self._queue.retry_row(held.lease, row)
            if parted is None:
                return False
            held.again.pop()
            if parted.gone:
                say("tried_later", shard=held.lease.shard.id, row=row.index, why=result.code,
                    in_s=parted.pause_s)  # fmt: skip
                self._part(held, parted)
            else:
                self._holdings.finish(held, result)
        return True

    def _part(self, held: Held, parted: Parted) -> None:
        held.lease = parted.lease
        held.over = parted.shard_done
