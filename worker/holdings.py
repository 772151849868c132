"""What a worker holds: leased shards, which of their rows are where, and records not yet committed.

Plain state, no Redis and no engine. A row of a held shard is waiting (not in the engine yet),
running, finished (its record waits for the commit), or about to leave for a shard of its own:
returned by the engine unstarted, or to be tried again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from dflash_batch.worker import rows
from dflash_batch.worker.contract import Crash, JobSpec, Lease, RowResult
from dflash_batch.worker.scripts import CRASH

_WORDS = 300  # characters of an engine's last words that are kept


class Care(IntEnum):
    """How a shard is run, by the suspicion against it.

    An engine that dies takes all rows in it down, so one death says little. Rows that were there
    run by themselves the next time, one after the other: then the row that was running is the one.
    Even so it may have been chance (a person, the system short of memory): a row is condemned when
    engine after engine has died on it alone, `max_attempts` in all with the first in company. A
    lease that only ran out says less; its shard runs without others beside it.
    """

    TOGETHER = 0
    ALONE = 1
    ROW_BY_ROW = 2
    CONDEMNED = 3  # its first row is

    @classmethod
    def of(cls, lease: Lease, crash: Crash | None = None) -> Care:
        """`crash`: how an engine died on the shard last."""
        # suspicion counts CRASH for a death that was seen, less for a lease that only ran out
        if lease.deaths <= 0:
            return cls.TOGETHER
        if _is_condemned(lease, crash):
            return cls.CONDEMNED
        return cls.ROW_BY_ROW if lease.deaths >= CRASH else cls.ALONE


def _is_condemned(lease: Lease, crash: Crash | None) -> bool:
    limit = CRASH * lease.max_attempts
    if crash is not None and crash.row is not None:
        first = lease.pending[0] if lease.pending else None
        lone = crash.row == first and crash.lone >= lease.max_attempts - 1
        return lone or lease.deaths >= 2 * limit
    return lease.deaths >= limit  # nobody saw which row it was: a row that takes machines down


@dataclass(slots=True)
class Held:
    """One leased shard."""

    lease: Lease
    care: Care
    waiting: deque[JobSpec]
    running: set[int] = field(default_factory=set)  # row indices
    finished: list[RowResult] = field(default_factory=list)
    returned: list[JobSpec] = field(default_factory=list)  # by the engine, unstarted
    again: list[RowResult] = field(default_factory=list)  # failures that may pass
    over: bool = False  # nothing is left to do in it
    leaving: bool = False  # to be given back once `finished` is committed
    crashed: bool = False  # … with blame: an engine died on it
    before: Crash | None = None  # how one died on it in earlier hands
    lone: int | None = None  # the row that ran by itself when it died

    @property
    def open_rows(self) -> int:
        """Rows without a record."""
        return len(self.waiting) + len(self.running) + len(self.returned) + len(self.again)

    def crash(self, words: str) -> Crash:
        """How the engine died on it, for who holds it next."""
        again = self.before is not None and self.before.row == self.lone
        lone = (self.before.lone if self.before is not None and again else 0) + 1
        return Crash(words=words[:_WORDS], row=self.lone, lone=0 if self.lone is None else lone)


HOT_GROUPS = 16
"""Most groups whose prefixes are taken to be in the engine's cache."""


class Holdings:
    """All shards a worker holds. A row that fails with a code of `passing` is tried again later."""

    def __init__(self, passing: Collection[str] = ()) -> None:
        self._passing = passing
        self.hot: list[str] = []  # groups leased lately, the last one first
        self._held: dict[str, Held] = {}
        self._oldest: float | None = None  # monotonic time of the oldest record not committed

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    @property
    def leases(self) -> list[Lease]:
        return [held.lease for held in self._held.values()]

    @property
    def open_rows(self) -> int:
        return sum(held.open_rows for held in self._held.values())

    @property
    def running(self) -> bool:
        """Whether the engine has rows."""
        return any(held.running for held in self._held.values())

    @property
    def alone(self) -> bool:
        """Whether a suspect is held, beside which nothing else may run."""
        return any(held.care > Care.TOGETHER for held in self._held.values())

    @property
    def uncommitted(self) -> int:
        return sum(len(held.finished) for held in self._held.values())

    @property
    def uncommitted_s(self) -> float:
        """Age of the oldest record that is not committed."""
        return 0.0 if self._oldest is None else time.monotonic() - self._oldest

    def take(self, lease: Lease, crash: Crash | None = None) -> Held:
        """Begin to hold a shard: its rows without a record are waiting.

        `crash`: how an engine died on it last.
        """
        pending = set(lease.pending)
        waiting = deque(row for row in lease.shard.rows if row.index in pending)
        held = Held(lease, Care.of(lease, crash), waiting, before=crash)
        self._held[lease.shard.id] = held
        if group := lease.shard.group:
            others = [other for other in self.hot if other != group]
            self.hot = [group, *others[: HOT_GROUPS - 1]]
        if held.care is Care.CONDEMNED and waiting:
            row = waiting.popleft()
            self.finish(
                held,
                rows.poison(row, lease.owner, lease.max_attempts, crash.words if crash else ""),
            )
        return held

    def to_admit(self) -> list[tuple[Lease, list[JobSpec]]]:
        """Rows the engine should be given now; they count as running from here on."""
        batches = []
        for held in self._held.values():
            if held.leaving or not held.waiting:
                continue
            if held.care < Care.ROW_BY_ROW:
                admitted = list(held.waiting)
                held.waiting.clear()
            elif not held.running:
                admitted = [held.waiting.popleft()]
            else:
                continue
            held.running.update(row.index for row in admitted)
            batches.append((held.lease, admitted))
        return batches

    def record(self, shard_id: str, epoch: int, result: RowResult) -> bool:
        """A row has ended. False when it is not ours any more."""
        held = self._held.get(shard_id)
        if held is None or held.lease.epoch != epoch or result.index not in held.running:
            return False
        held.running.discard(result.index)
        if result.code in self._passing:
            held.again.append(result)
        else:
            self.finish(held, result)
        return True

    def hand_back(self, shard_id: str, epoch: int, indices: Iterable[int]) -> None:
        """The engine has returned rows it had not started."""
        held = self._held.get(shard_id)
        if held is None or held.lease.epoch != epoch:
            return
        returned = held.running.intersection(indices)
        held.running -= returned
        held.returned += [row for row in held.lease.shard.rows if row.index in returned]

    def committed(self, held: Held) -> None:
        """The finished rows of the shard are in the queue."""
        held.finished.clear()
        if not self.uncommitted:
            self._oldest = None

    def engine_died(self, *, blame: bool) -> None:
        """Nothing runs any more. Shards with rows in the engine leave, with or without blame."""
        self.hot = []
        for held in self._held.values():
            if held.open_rows:
                held.leaving = True
                held.crashed = held.crashed or (blame and bool(held.running))
                if held.care >= Care.ROW_BY_ROW and len(held.running) == 1:
                    (held.lone,) = held.running

    def give_back_all(self) -> None:
        """Every shard that is not complete is to leave, without blame."""
        for held in self._held.values():
            held.leaving = held.leaving or bool(held.open_rows)

    def let_go(self, shard_id: str) -> Held | None:
        """Stop holding a shard."""
        held = self._held.pop(shard_id, None)
        if not self.uncommitted:
            self._oldest = None
        return held

    def finish(self, held: Held, result: RowResult) -> None:
        """The record of a row is to be committed."""
        held.finished.append(result)
        if self._oldest is None:
            self._oldest = time.monotonic()
