"""How many tokens to draft: a policy chooses a block length for each cycle, and the width.

Three of them, behind one Protocol: `Fixed` always drafts, `Plain` never does, `Goodput` takes what
brings most tokens per second by what cycles cost here (`cost`) and how drafts have fared
(`Survival`). No policy changes a token. Pure arithmetic: no mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_batch.decoder.cost import CostTable

Spec = Literal["on", "off", "auto-off"]

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts the arena is made for: few shapes, little idle width."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Block lengths to choose from, anchor included: each new shape is planned anew on a GPU."""

Floats = NDArray[np.float64]


class RowView(NamedTuple):
    """A live row, as a policy sees it."""

    uid: int
    left: int  # tokens it may still emit


class RowOutcome(NamedTuple):
    """How a row fared in a cycle."""

    uid: int
    drafted: int  # or could have been: a draft that was not found is as one refused
    accepted: int


class Landed(NamedTuple):
    """A cycle that was read."""

    width: int  # rows of the arena, idle ones included
    tokens: int  # per row, anchor included
    context: int  # visible columns
    seconds: float | None  # None: something else happened in between
    rows: Sequence[RowOutcome]


class Policy(Protocol):
    """Chooses block lengths. With cycles in flight, `landed` comes a cycle after `choose`."""

    @property
    def notice(self) -> str | None:
        """What people should know of how it went so far."""
        ...

    def choose(self, rows: Sequence[RowView], width: int, context: int) -> int:
        """Drafts per row, k, for the next cycle of `rows` in an arena `width` wide."""
        ...

    def landed(self, cycle: Landed) -> None:
        """Learn from a cycle."""
        ...

    def admit_more(self, live: int, ready: int, context: int) -> int:
        """How many of `ready` rows to add to `live` ones; all of them if in doubt."""
        ...

    def effective(self, cycles: int, plain: int) -> Spec:
        """The setting a row had that was decoded in `cycles`, `plain` of them without a draft."""
        ...

    def close(self) -> None:
        """Keep what was learned: the decoder ends."""
        ...


class Fixed:
    """Always drafts `k`. `trim`: no more than some row may still emit (a new shape each time)."""

    notice: str | None = None

    def __init__(self, k: int, *, trim: bool) -> None:
        self._k = k
        self._trim = trim

    def choose(self, rows: Sequence[RowView], width: int, context: int) -> int:
        return min(self._k, max(row.left for row in rows)) if self._trim else self._k

    def landed(self, cycle: Landed) -> None:
        pass

    def admit_more(self, live: int, ready: int, context: int) -> int:
        return ready

    def effective(self, cycles: int, plain: int) -> Spec:
        return "on" if self._k else "off"

    def close(self) -> None:
        pass


class Plain(Fixed):
    """Never drafts."""

    def __init__(self) -> None:
        super().__init__(0, trim=False)


class Survival:
    """How likely a draft is accepted, per row and place in the block, given those before it were.

    Decayed counts. A row leans on the curve of all rows, the curve at a place on the place before
    it, the first place on the long run: where little was seen, what is next to it speaks.
    """

    WINDOW = 160  # row-cycles that the common counts remember,
    SHORT, LONG = 12, 96  # within these numbers of cycles
    ROW_FADE = 0.96  # of a row's counts, a cycle with drafts
    LONG_FADE = 0.999
    LEAN = 4.0  # drafts that the place before counts for
    ROW_LEAN = 8.0  # drafts that the curve of all rows counts for
    HOPE = 0.75  # of a draft nobody has tried

    def __init__(self, places: int) -> None:
        self._uids: list[int] = []
        self._tried = np.zeros((0, places))
        self._kept = np.zeros((0, places))
        self._all_tried = np.zeros(places)
        self._all_kept = np.zeros(places)
        self._long_tried, self._long_kept = 4.0, 4.0 * self.HOPE
        self._place = np.arange(places)

    def track(self, uids: list[int]) -> None:
        """The rows there are; others are forgotten."""
        if uids == self._uids:
            return
        old = {uid: i for i, uid in enumerate(self._uids)}
        tried, kept = (np.zeros((len(uids), len(self._place))) for _ in range(2))
        for i, uid in enumerate(uids):
            if uid in old:
                tried[i], kept[i] = self._tried[old[uid]], self._kept[old[uid]]
        self._uids, self._tried, self._kept = list(uids), tried, kept

    def observe(self, rows: Sequence[RowOutcome]) -> None:
        """Count a cycle's drafts. Those after the first one refused were not tried."""
        rows = [row for row in rows if row.drafted]
        if not rows:
            return
        drafted, accepted = np.array([row[1:] for row in rows]).T[:, :, None]
        kept = self._place < accepted
        tried = self._place < np.minimum(accepted + 1, drafted)
        fade = 1.0 - 1.0 / min(max(self.WINDOW / len(rows), self.SHORT), self.LONG)
        self._all_tried = self._all_tried * fade + tried.sum(axis=0)
        self._all_kept = self._all_kept * fade + kept.sum(axis=0)
        self._long_tried = self._long_tried * self.LONG_FADE + float(tried[:, 0].sum())
        self._long_kept = self._long_kept * self.LONG_FADE + float(kept[:, 0].sum())
        self._tried *= self.ROW_FADE
        self._kept *= self.ROW_FADE
        index = {uid: i for i, uid in enumerate(self._uids)}
        here = [(i, index[row.uid]) for i, row in enumerate(rows) if row.uid in index]
        if here:
            source, place = map(list, zip(*here, strict=True))
            self._tried[place] += tried[source]
            self._kept[place] += kept[source]

    def doubt(self, share: float) -> None:
        """Keep only a share of the evidence: it is old."""
        for counts in (self._all_tried, self._all_kept, self._tried, self._kept):
            counts *= share

    def curve(self) -> Floats:
        """Acceptance at each place over all rows, given the places before."""
        before = self._long_kept / self._long_tried
        curve = np.empty(len(self._place))
        for j, (tried, kept) in enumerate(zip(self._all_tried, self._all_kept, strict=True)):
            before = curve[j] = (kept + self.LEAN * before) / (tried + self.LEAN)
        return curve

    def emitted(self, left: Sequence[int], sizes: Sequence[int]) -> Floats:
        """Expected tokens of a cycle, summed over the tracked rows, at each block length.

        E_r(T) = 1 + Σ_{j<T} Π_{i≤j} p_{r,i}, of which a row takes no more than it has left.
        """
        curve = self.curve()
        rows = (self._kept + self.ROW_LEAN * curve) / (self._tried + self.ROW_LEAN)
        reach = np.cumprod(rows, axis=1)
        reach[self._place[None, :] + 1 >= np.array(left)[:, None]] = 0.0
        total = len(left) + np.concatenate([[0.0], np.cumsum(reach.sum(axis=0))])
        emitted: Floats = total[np.array(sizes) - 1]
        return emitted

    def per_row(self, sizes: Sequence[int]) -> Floats:
        """Expected tokens of a cycle for a row nobody knows, at each block length."""
        total = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(self.curve()))])
        emitted: Floats = total[np.array(sizes) - 1]
        return emitted


class Goodput:
    """The block length with most expected tokens per second, "no draft" among the choices.

    - Hysteresis: another length is taken at once when it promises `MARGIN` more, and otherwise
      when its promise has added up: 1 % more counts as much in forty cycles as 5 % in eight.
    - Probes: every `PROBE_EVERY` cycles a neighbouring length is tried for a few cycles. A probe
      that changes nothing doubles the wait for the next one. All probes together may cost
      `PROBE_SHARE` of the time.
    - Parked at length 1 it probes the most promising other length, and so comes back.
    - With an empty table it first climbs: a few cycles at each length, until longer blocks could
      not pay even if every draft were right.
    """

    notice: str | None = None

    MARGIN = 0.07
    PATIENCE = 0.4
    PLAIN_MARGIN = 0.02
    PLAIN_PATIENCE = 0.1
    PROBE_EVERY = 64
    PROBE_RARELY = 2048
    PROBE_SHARE = 0.006
    PROBE_ROWS = 24  # row-cycles that tell enough
    PROBE_CYCLES = 6  # at most
    WIDE_ENOUGH = 0.02  # goodput a wider batch may lack
    KEEP_EVERY = 2048  # timed cycles

    def __init__(
        self, table: CostTable, most: int, keep: Callable[[CostTable], object] | None = None
    ) -> None:
        """`most` is the longest block the drafter makes, anchor included; `keep` saves the table
        once in a while and at the end."""
        self.table = table
        self._keep = keep
        self._news = 0  # cycles learned from since the table was kept
        self.sizes = (*(size for size in SIZES if size < most), most)
        self.survival = Survival(max(most - 1, 1))
        self._at = len(self.sizes) - 1  # index of the settled length
        self._promise = 0.0  # added up, of the length in `_rival`
        self._rival = -1
        self._clock = 0
        self._wait = self.PROBE_EVERY
        self._next_probe = self.PROBE_EVERY
        self._probe = (0, 0)  # cycles left, index
        self._upward = False
        self._elapsed, self._spent = 0.0, 0.0  # seconds, as predicted
        self._climbed = False
        self._seen: set[tuple[int, int, int]] = set()

    @property
    def parked(self) -> bool:
        """Whether drafts are off for now."""
        return self._at == 0

    def choose(self, rows: Sequence[RowView], width: int, context: int) -> int:
        if len(self.sizes) == 1:
            return 0
        self.survival.track([row.uid for row in rows])
        self._clock += 1
        if not self._climbed and (size := self._climb()) is not None:
            return size - 1
        seconds = self.table.cycle(width, self.sizes, context)
        goodput = self.survival.emitted([row.left for row in rows], self.sizes) / seconds
        self._settle(goodput)
        at = self._probing(goodput, seconds, len(rows))
        self._elapsed += float(seconds[at])
        self._spent += float(seconds[at] * max(0.0, 1.0 - goodput[at] / goodput[self._at]))
        return self.sizes[at] - 1

    def landed(self, cycle: Landed) -> None:
        self.survival.observe(cycle.rows)
        shape = (cycle.width, cycle.tokens, cycle.context)
        if shape not in self._seen:
            self._seen.add(shape)  # its first time holds compiling and planning
        elif cycle.seconds is not None and cycle.tokens in self.sizes:
            self.table.observe(cycle.width, cycle.tokens, cycle.context, cycle.seconds)
            self._news += 1
            if self._news >= self.KEEP_EVERY:
                self.close()

    def admit_more(self, live: int, ready: int, context: int) -> int:
        if self.table.empty:
            return ready
        steps = [w for w in WIDTHS if live < w < live + ready]
        counts = [n for n in (live, *steps, live + ready) if n]
        each = self.survival.per_row(self.sizes)
        best = [
            float((n * each / self.table.cycle(arena_width(n), self.sizes, context)).max())
            for n in counts
        ]
        enough = (1.0 - self.WIDE_ENOUGH) * max(best)
        widest = max(n for n, goodput in zip(counts, best, strict=True) if goodput >= enough)
        return widest - live

    def effective(self, cycles: int, plain: int) -> Spec:
        if len(self.sizes) == 1:
            return "off"
        return "auto-off" if 2 * plain > cycles else "on"

    def close(self) -> None:
        if self._keep is not None and self._news:
            self._keep(self.table)
        self._news = 0

    def _climb(self) -> int | None:
        """The next length to try while costs are unknown; None at the top."""
        forward = self.table.forward
        below = 1
        for size in [size for size in (1, 2, 4, 8) if size < self.sizes[-1]] + [self.sizes[-1]]:
            if size > 1 and self._hopeless(below):
                break
            if forward.count(size) < 2:
                return size
            below = size
        self._climbed = True
        self._at = 0
        return None

    def _hopeless(self, size: int) -> bool:
        """Whether `size` costs more than it could bring at best, wherever it was measured."""
        if size == 1:
            return False
        widths = {(b, c) for b, t, c in self.table.forward.cells if t == size}
        ratios = [float(np.divide(*self.table.cycle(b, (size, 1), c))) for b, c in widths]
        return min(ratios, default=0.0) >= size

    def _settle(self, goodput: Floats) -> None:
        """Change the settled length if another one is clearly, or steadily, better."""
        best = int(goodput.argmax())
        gain = float(goodput[best] / goodput[self._at]) - 1.0
        if best == self._at:
            self._promise, self._rival = 0.0, best
            return
        if best != self._rival and (best == 0) != (self._rival == 0):
            self._promise = 0.0
        self._rival = best
        self._promise += gain
        margin, patience = (
            (self.MARGIN, self.PATIENCE) if best else (self.PLAIN_MARGIN, self.PLAIN_PATIENCE)
        )
        if gain > margin or self._promise > patience:
            self._at, self._promise = best, 0.0
            self._wait = self.PROBE_EVERY
            self._next_probe = self._clock + self._wait
            self._probe = (0, 0)

    def _probing(self, goodput: Floats, seconds: Floats, rows: int) -> int:
        """The length of this cycle: the settled one, or one on trial."""
        left, at = self._probe
        if left:
            self._probe = (left - 1, at)
            return at
        if self._clock < self._next_probe:
            return self._at
        at = self._candidate(goodput)
        cycles = min(max(2, -(-self.PROBE_ROWS // rows)), self.PROBE_CYCLES)
        loss = cycles * float(seconds[at]) * max(0.0, 1.0 - float(goodput[at] / goodput[self._at]))
        if self._spent + loss > self.PROBE_SHARE * self._elapsed:
            return self._at
        if self.parked:
            self.survival.doubt(0.25)
        self._wait = min(2 * self._wait, self.PROBE_RARELY)
        self._next_probe = self._clock + cycles + self._wait
        self._probe = (cycles - 1, at)
        return at

    def _candidate(self, goodput: Floats) -> int:
        if self.parked:
            return 1 + int(goodput[1:].argmax())
        self._upward = not self._upward
        up = self._upward and self._at + 1 < len(self.sizes)
        return self._at + 1 if up else self._at - 1


def arena_width(rows: int) -> int:
    """The smallest arena width for `rows` live rows."""
    return next((width for width in WIDTHS if width >= rows), rows)


class Choice(NamedTuple):
    """The best width and block length at an acceptance, as the table has it."""

    context: int
    acceptance: float  # of each draft, given those before it
    rows: int
    tokens: int
    tokens_per_s: float
    plain_rows: int
    plain_tokens_per_s: float  # at the best width without drafts


def best_choices(table: CostTable, acceptances: Sequence[float]) -> list[Choice]:
    """What is best among the measured points: B·E(T)/t(B,T), with E(T) = (1 - pᵀ)/(1 - p)."""
    points = sorted(table.forward.cells)
    choices = []
    for context in sorted({c for _, _, c in points}):
        here = [(b, t) for b, t, c in points if c == context]
        seconds = {(b, t): float(table.cycle(b, [t], context)[0]) for b, t in here}
        plain = {at: at[0] / seconds[at] for at in here if at[1] == 1}
        if not plain:
            continue
        plain_at = max(plain, key=lambda at: plain[at])
        for p in acceptances:
            speeds = {(b, t): b * (1 - p**t) / (1 - p) / seconds[b, t] for b, t in here}
            at = max(speeds, key=lambda at: speeds[at])
            choices.append(Choice(context, p, *at, speeds[at], plain_at[0], plain[plain_at]))
    return choices
