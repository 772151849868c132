"""A watch over drafts that hardly ever stand: they cost, and the pair may be a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_batch.decoder.policy import Landed, Policy, RowView, Spec


class Guarded:
    """A `Policy` that does as another does, but parks drafts of which next to none stand.

    Judged are `CYCLES` cycles together. Parked, it decodes plainly for `WAIT` cycles, tries again
    for `TRIAL` ones, and waits twice as long each time in vain: later texts may be easier to draft.
    The first time it warns.
    """

    LEAST = 0.05  # share of drafts that must stand
    CYCLES = 64
    TRIAL = 8
    WAIT, LONGEST_WAIT = 128, 4096

    def __init__(self, inner: Policy, warn: Callable[[str], object]) -> None:
        self.inner = inner
        self.notice: str | None = None
        self._warn = warn
        self._wait = self.WAIT
        self._parked = 0  # cycles still to be plain
        self._due = self.CYCLES  # cycles with drafts to be judged together
        self._cycles = self._drafted = self._accepted = 0

    @property
    def parked(self) -> bool:
        """Whether drafts are off for now."""
        return self._parked > 0

    def choose(self, rows: Sequence[RowView], width: int, context: int) -> int:
        if self._parked:
            self._parked -= 1
            return 0
        return self.inner.choose(rows, width, context)

    def landed(self, cycle: Landed) -> None:
        self.inner.landed(cycle)
        if cycle.tokens == 1 or self._parked or not cycle.rows:
            return
        self._cycles += 1
        self._drafted += sum(row.drafted for row in cycle.rows)
        self._accepted += sum(row.accepted for row in cycle.rows)
        if self._cycles >= self._due:
            self._judge()

    def admit_more(self, live: int, ready: int, context: int) -> int:
        return self.inner.admit_more(live, ready, context)

    def effective(self, cycles: int, plain: int) -> Spec:
        mostly_plain = self.notice is not None and 2 * plain > cycles
        return "auto-off" if mostly_plain else self.inner.effective(cycles, plain)

    def close(self) -> None:
        self.inner.close()

    def _judge(self) -> None:
        share = self._accepted / max(1, self._drafted)
        if share >= self.LEAST:
            self._wait, self._due = self.WAIT, self.CYCLES
        else:
            if self.notice is None:
                self.notice = (
                    f"drafts are parked: of {self._drafted:,} there was room for in {self._cycles} "
                    f"cycles {share:.1%} stood. They are tried again now and then"
                )
                self._warn(self.notice)
            self._parked, self._due = self._wait, self.TRIAL
            self._wait = min(2 * self._wait, self.LONGEST_WAIT)
        self._cycles = self._drafted = self._accepted = 0
