"""The goodput policy on machines we do not have: computed costs, drifting acceptance, real code.

    python tests/benchmarks/policy_simulation.py [--jobs N] [--json FILE]

Costs come from a roofline model of a cycle (B rows, T tokens each, M = BT):

    t_fwd   = Σ linears max(bytes/BW, 2·N·M/F)        stock 4-bit kernels below 32 rows:
              + experts max(hit(M)·bytes/BW, 2·N·M/F)  bytes/BW · max(1, min(0.33·M + 0.2, tile)),
              + B·(C·kv + c·state)/BW                  from there ⌈M/32⌉ tiles of 32 rows
              + attention and scan arithmetic + t0    hit = E·(1 - (1 - k/E)^M'), M' = M^0.7
    t_draft = the draft's weights, the target's head on BT rows, the draft's context, t0

Bandwidths, arithmetic and sizes are assumptions, not measurements. Every job has its own
acceptance, which drifts over the batch and within the job; the batch fills, runs and drains. The
policy is given the table a sweep would have measured, noisy cycle times, and hears of a cycle one
cycle late. It is compared with every fixed (B, T) on the same jobs, chosen in hindsight, and with
plain decoding without a drafter at the same greatest width.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from random import Random

import numpy as np

from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.policy import (
    SIZES,
    Goodput,
    Landed,
    RowOutcome,
    RowView,
    arena_width,
)

CONTEXTS = (2048, 32768)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHUNK = 16  # cycles whose features a parked draft takes in at once
DRAFT_WINDOW = 4096  # context columns a draft layer reads at most


@dataclass(frozen=True)
class Machine:
    """Effective rates: bytes/s, FLOP/s of bf16 and of quantised matmuls; seconds of launches."""

    name: str
    bandwidth: float
    bf16: float
    quantised: float
    dense_t0: float
    moe_t0: float


@dataclass(frozen=True)
class Model:
    """Sizes in parameters and bytes."""

    name: str
    linear: float  # parameters every token uses, head included
    head: float
    bytes_per_parameter: float
    kv: float  # bytes per token
    state: float  # bytes per row
    attention: float  # FLOP per token and column
    scan: float  # FLOP per token
    draft: float  # parameters, bf16
    commit: float  # parameters that turn features into the draft's context, bf16
    expert: float = 0.0  # parameters of one expert over all layers
    experts: float = 0.0
    per_token: float = 0.0


KIB, MIB = 1024.0, 1024.0**2
MACHINES = (
    Machine("M3 Ultra", 680e9, 24e12, 20e12, 1.5e-3, 6e-3),
    Machine("M4 Max", 480e9, 14.5e12, 13e12, 1.5e-3, 6e-3),
    Machine("M5 Max", 560e9, 50e12, 30e12, 1.5e-3, 4.6e-3),
    Machine("H200", 4300e9, 600e12, 200e12, 2e-3, 5e-3),
)
_NINE = {
    "linear": 7.93e9,
    "head": 1.017e9,
    "kv": 32 * KIB,
    "state": 49.1 * MIB,
    "attention": 4.0 * 4096 * 8,
    "scan": 6.0 * 128 * 128 * 32 * 24,
    "draft": 1.05e9,
    "commit": 5.0 * 4096**2 + 5 * 4096 * 2048,
}
MODELS = (
    Model("9B bf16", bytes_per_parameter=2.0, **_NINE),
    Model("9B 4-bit", bytes_per_parameter=0.5625, **_NINE),
    Model(
        "35B-A3B 4-bit",
        linear=1.9e9,
        head=0.51e9,
        bytes_per_parameter=0.5625,
        kv=20 * KIB,
        state=61.4 * MIB,
        attention=4.0 * 4096 * 10,
        scan=6.0 * 128 * 128 * 32 * 30,
        draft=0.5e9,
        commit=5.0 * 2048**2 + 5 * 2048 * 2048,
        expert=3.15e6 * 40,
        experts=256,
        per_token=8,
    ),
)


class Costs:
    """Seconds of a cycle's parts on a machine."""

    def __init__(self, machine: Machine, model: Model) -> None:
        self.machine, self.model = machine, model

    def forward(self, rows: int, tokens: int, context: int) -> float:
        """Plain or verifying forward, without a drafter's share."""
        machine, model = self.machine, self.model
        m = rows * tokens
        t0 = machine.moe_t0 if model.experts else machine.dense_t0
        reads = 2 if tokens == 1 else 4  # of the state: with replay
        memory = rows * (context * model.kv + reads * model.state) / machine.bandwidth
        arithmetic = m * (context * model.attention + model.scan) / machine.bf16
        return t0 + self._linear(model.linear, m) + self._experts(m) + memory + arithmetic

    def draft(self, rows: int, tokens: int, context: int) -> float:
        """Drafting a block and taking its features in."""
        machine, model = self.machine, self.model
        m = rows * tokens
        weights = self._bf16(model.draft, m) + self._bf16(model.commit, m)
        seen = rows * min(context, DRAFT_WINDOW) * 20 * KIB / machine.bandwidth
        return 0.5e-3 + weights + self._linear(model.head, m) + seen

    def upkeep(self, rows: int) -> float:
        """A parked drafter's share of a plain cycle: features taken in by chunks."""
        return self._bf16(self.model.commit, rows * CHUNK) / CHUNK

    def cycle(self, rows: int, tokens: int, context: int) -> float:
        """A cycle with a drafter at hand."""
        extra = self.upkeep(rows) if tokens == 1 else self.draft(rows, tokens, context)
        return self.forward(rows, tokens, context) + extra

    def table(self) -> CostTable:
        """What a sweep would have measured."""
        table = CostTable()
        for b in WIDTHS:
            for c in CONTEXTS:
                for t in SIZES:
                    extra = self.upkeep(b) if t == 1 else 0.0
                    table.forward.put(b, t, c, self.forward(b, t, c) + extra)
                    if t > 1:
                        table.draft.put(b, t, c, self.draft(b, t, c))
        return table

    def _bf16(self, parameters: float, m: int) -> float:
        return max(2 * parameters / self.machine.bandwidth, 2 * parameters * m / self.machine.bf16)

    def _linear(self, parameters: float, m: int) -> float:
        if self.model.bytes_per_parameter == 2.0:
            return self._bf16(parameters, m)
        read = self.model.bytes_per_parameter * parameters / self.machine.bandwidth
        tile = max(read, 2 * parameters * 32 / self.machine.quantised)
        return min(read * max(1.0, 0.33 * m + 0.2), tile) if m < 32 else -(-m // 32) * tile

    def _experts(self, m: int) -> float:
        model = self.model
        if not model.experts:
            return 0.0
        independent = math.pow(m, 0.7)  # neighbours choose alike
        hit = model.experts * (1 - math.pow(1 - model.per_token / model.experts, independent))
        read = hit * model.expert * model.bytes_per_parameter / self.machine.bandwidth
        return max(read, 2 * model.expert * model.per_token * m / self.machine.quantised)


@dataclass(frozen=True)
class Job:
    """A row to come: its length, and its acceptance, which drifts."""

    tokens: int
    start: float  # acceptance of a first draft at the first token
    end: float  # and at the last
    decay: float  # of acceptance from one place in the block to the next
    hard: tuple[float, ...]  # how hard each token is, 0..1: the same for whoever drafts it

    def accepted(self, at: int, drafts: int) -> int:
        """Drafts accepted of a block that starts at token `at`."""
        p = self.start + (self.end - self.start) * at / self.tokens
        p = min(max(p, 0.02), 0.97)
        for place in range(drafts):
            if self.hard[at + place] >= p:
                return place
            p *= self.decay
        return drafts


def make_jobs(count: int, level: float, seed: int) -> list[Job]:
    """Jobs around an acceptance `level`, harder and easier in waves over the batch."""
    random = np.random.default_rng(seed)
    jobs = []
    for i in range(count):
        wave = 0.10 * np.sin(2 * np.pi * (i / count) * 1.5)
        start = level + wave + random.normal(0.0, 0.08)
        tokens = int(np.clip(random.lognormal(5.3, 0.5), 40, 800))
        jobs.append(
            Job(
                tokens=tokens,
                start=float(start),
                end=float(start + random.normal(0.0, 0.08)),
                decay=0.99,
                hard=tuple(random.random(tokens).tolist()),
            )
        )
    return jobs


@dataclass(frozen=True)
class Played:
    """What came of a run."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Live:
    """A row that runs."""

    def __init__(self, uid: int, job: Job) -> None:
        self.uid, self.job, self.at = uid, job, 0

    @property
    def left(self) -> int:
        return self.job.tokens - self.at


def play_policy(
    policy: Goodput, costs: Costs, jobs: Sequence[Job], cap: int, context: int, seed: int
) -> Played:
    """Run the jobs under a policy in an arena as the engine keeps it."""
    random = Random(seed)
    waiting = deque(Live(i, job) for i, job in enumerate(jobs))
    live: list[Live] = []
    width, seconds = 1, 0.0
    unheard: deque[Landed] = deque()
    while waiting or live:
        ready = min(len(waiting), cap - len(live))
        more = policy.admit_more(len(live), ready, context) if ready else 0
        live += [waiting.popleft() for _ in range(more)]
        need = arena_width(len(live))
        width = need if need > width or not more else width
        rows = [RowView(row.uid, row.left) for row in live]
        tokens = policy.choose(rows, width, context) + 1
        took = costs.cycle(width, tokens, context)
        seconds += took
        outcomes = []
        for row in live:
            drafts = min(tokens - 1, row.left)
            kept = row.job.accepted(row.at, drafts)
            row.at += min(kept + 1, row.left)
            outcomes.append(RowOutcome(row.uid, drafts, kept))
        heard = None if more else took * random.lognormvariate(0.0, 0.03)
        unheard.append(Landed(width, tokens, context, heard, outcomes))
        if len(unheard) > 1:
            policy.landed(unheard.popleft())
        live = [row for row in live if row.left > 0]
    return Played(sum(job.tokens for job in jobs), seconds)


class Hindsight:
    """Every fixed (B, T) on the same jobs. A job's cycles do not depend on its neighbours."""

    def __init__(self, costs: Costs, jobs: Sequence[Job], context: int) -> None:
        self.costs, self.jobs, self.context = costs, jobs, context
        self._cycles = {t: list(self._needed(t)) for t in SIZES}

    def fixed(self, rows: int, tokens: int) -> Played:
        """A drafter at hand, `rows` at most, always `tokens` per row."""
        return self._play(rows, tokens, [self.costs.cycle(w, tokens, self.context) for w in WIDTHS])

    def plain(self, rows: int) -> Played:
        """No drafter at all."""
        return self._play(rows, 1, [self.costs.forward(w, 1, self.context) for w in WIDTHS])

    def _needed(self, tokens: int) -> Iterator[int]:
        for job in self.jobs:
            if tokens == 1:
                yield job.tokens
                continue
            at = cycles = 0
            while at < job.tokens:
                at += job.accepted(at, min(tokens - 1, job.tokens - at)) + 1
                cycles += 1
            yield cycles

    def _play(self, rows: int, tokens: int, price: Sequence[float]) -> Played:
        """List scheduling: the next job takes the slot that falls free first."""
        by_width = dict(zip(WIDTHS, price, strict=True))
        free = [0] * min(rows, len(self.jobs))
        for cycles in self._cycles[tokens]:
            heapq.heappush(free, heapq.heappop(free) + cycles)
        seconds, before = 0.0, 0
        for done, end in enumerate(sorted(free)):
            seconds += (end - before) * by_width[arena_width(len(free) - done)]
            before = end
        return Played(sum(job.tokens for job in self.jobs), seconds)


@dataclass(frozen=True)
class Result:
    """One scenario: tokens per second, and the two ratios that count."""

    machine: str
    model: str
    context: int
    level: float  # mean acceptance of a first draft
    cap: int
    plain: float  # without a drafter, at this cap
    best_fixed: float
    best_at: tuple[int, int]  # (B, T)
    policy: float

    @property
    def of_best(self) -> float:
        return self.policy / self.best_fixed

    @property
    def of_plain(self) -> float:
        return self.policy / self.plain


def scenario(
    machine: Machine,
    model: Model,
    context: int,
    level: float,
    cap: int,
    count: int,
    *,
    cold: bool = False,
    seed: int = 1,
) -> Result:
    """Play one scenario. `cold`: the policy starts without a table and learns as it goes."""
    costs = Costs(machine, model)
    jobs = make_jobs(count, level, seed)
    hindsight = Hindsight(costs, jobs, context)
    tried = {(b, t): hindsight.fixed(b, t).speed for b in WIDTHS if b <= cap for t in SIZES}
    best_at = max(tried, key=lambda at: tried[at])
    # a copy: the policy writes into its table
    table = CostTable() if cold else copy.deepcopy(_measured(machine, model))
    policy = Goodput(table, SIZES[-1])
    played = play_policy(policy, costs, jobs, cap, context, seed + 1)
    return Result(
        machine.name,
        model.name,
        context,
        level,
        cap,
        hindsight.plain(cap).speed,
        tried[best_at],
        best_at,
        played.speed,
    )


@cache
def _measured(machine: Machine, model: Model) -> CostTable:
    return Costs(machine, model).table()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=6, help="jobs per slot of the batch")
    parser.add_argument("--caps", default="1,8,32,64")
    parser.add_argument("--levels", default="0.85,0.6")
    parser.add_argument("--cold", action="store_true", help="without a measured table")
    parser.add_argument("--json", help="write all results to this file")
    options = parser.parse_args()
    results = []
    print(f"{'machine':<10}{'model':<15}{'ctx':>6}{'p':>6}{'cap':>5}{'plain':>8}{'best fixed':>12}"
          f"{'@(B,T)':>9}{'policy':>9}{'/best':>8}{'/plain':>8}")  # fmt: skip
    for machine in MACHINES:
        for model in MODELS:
            for context in CONTEXTS:
                for level in map(float, options.levels.split(",")):
                    for cap in map(int, options.caps.split(",")):
                        count = max(24, options.jobs * cap)
                        r = scenario(machine, model, context, level, cap, count, cold=options.cold)
                        results.append(r)
                        at = f"({r.best_at[0]},{r.best_at[1]})"
                        print(f"{r.machine:<10}{r.model:<15}{r.context:>6}{r.level:>6}{r.cap:>5}"
                              f"{r.plain:>8.0f}{r.best_fixed:>12.0f}{at:>9}{r.policy:>9.0f}"
                              f"{r.of_best:>8.3f}{r.of_plain:>8.3f}", flush=True)  # fmt: skip
    print(
        f"{len(results)} scenarios: policy / best fixed ≥ {min(r.of_best for r in results):.3f}, "
        f"policy / plain ≥ {min(r.of_plain for r in results):.3f}"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(r) for r in results], file, indent=1)


if __name__ == "__main__":
    main()
