"""The policies: what they choose, how they learn, and that they come back from a park."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.policy import (
    SIZES,
    WIDTHS,
    Fixed,
    Goodput,
    Landed,
    Plain,
    RowOutcome,
    RowView,
    Survival,
    arena_width,
)


def table(per_row_ms: float, base_ms: float = 20.0, draft_ms: float = 2.0) -> CostTable:
    """A machine whose forward costs `base_ms`, or `per_row_ms` a token if that is more."""
    costs = CostTable()
    for b in WIDTHS[:10]:
        for t in SIZES:
            costs.forward.put(b, t, 1024, 1e-3 * max(base_ms, per_row_ms * b * t))
            if t > 1:
                costs.draft.put(b, t, 1024, 1e-3 * draft_ms)
    return costs


def play(policy: Goodput, accept: float, cycles: int, rows: int = 4, seed: int = 0) -> list[int]:
    """Block lengths chosen while drafts are accepted with a fixed probability."""
    random = Random(seed)
    chosen = []
    for _ in range(cycles):
        k = policy.choose([RowView(uid, 1000) for uid in range(rows)], rows, 1024)
        chosen.append(k + 1)
        outcomes = []
        for uid in range(rows):
            kept = next((i for i in range(k) if random.random() >= accept), k)
            outcomes.append(RowOutcome(uid, k, kept))
        seconds = policy.table.cycle(rows, [k + 1], 1024)[0]
        policy.landed(Landed(rows, k + 1, 1024, float(seconds), outcomes))
    return chosen


def test_fixed_always_drafts_and_plain_never() -> None:
    rows = [RowView(0, 5), RowView(1, 3)]
    assert Fixed(15, trim=True).choose(rows, 2, 64) == 5
    assert Fixed(15, trim=False).choose(rows, 2, 64) == 15
    assert Plain().choose(rows, 2, 64) == 0
    assert Fixed(15, trim=True).admit_more(3, 9, 64) == 9
    assert (Fixed(15, trim=True).effective(9, 0), Plain().effective(9, 9)) == ("on", "off")


def test_where_verifying_is_free_it_drafts_whole_blocks() -> None:
    policy = Goodput(table(per_row_ms=0.01), 16)
    assert np.mean(play(policy, 0.9, 300)[50:]) > 14
    assert policy.effective(100, 3) == "on"


def test_where_every_token_costs_the_same_it_parks_at_once() -> None:
    policy = Goodput(table(per_row_ms=10.0), 16)
    chosen = play(policy, 0.9, 400)
    assert set(chosen[5:60]) == {1}
    assert policy.parked
    assert np.mean(np.array(chosen) > 1) < 0.05
    assert policy.effective(400, 390) == "auto-off"


def test_drafts_that_are_refused_park_it_and_better_times_bring_it_back() -> None:
    policy = Goodput(table(per_row_ms=0.3), 16)
    play(policy, 0.9, 100)
    assert not policy.parked
    play(policy, 0.02, 200)
    assert policy.parked
    later = play(policy, 0.9, 600, seed=1)
    assert not policy.parked
    assert np.mean(later[-50:]) > 4


def test_block_lengths_settle() -> None:
    chosen = play(Goodput(table(per_row_ms=0.4), 16), 0.8, 500)[100:]
    assert np.mean(np.diff(chosen) != 0) < 0.1


def test_probes_become_rare_when_they_bring_nothing() -> None:
    policy = Goodput(table(per_row_ms=0.01), 16)
    chosen = np.array(play(policy, 0.95, 1500, rows=2))
    early, late = (chosen[50:450] != 16).sum(), (chosen[-400:] != 16).sum()
    assert late < early


@pytest.mark.parametrize("accept", [0.0, 0.5])
def test_without_a_table_it_stops_climbing_where_no_block_can_pay(accept: float) -> None:
    """A machine where sixteen tokens cost sixteen times one, as MLX's CPU backend nearly is."""
    truth = table(per_row_ms=10.0, base_ms=0.0)
    policy = Goodput(CostTable(), 16)
    random, chosen = Random(0), []
    for _ in range(64):
        k = policy.choose([RowView(uid, 500) for uid in range(16)], 16, 1024)
        chosen.append(k + 1)
        outcomes = [RowOutcome(u, k, int(random.random() < accept) if k else 0) for u in range(16)]
        seconds = float(truth.cycle(16, [k + 1], 1024)[0])
        policy.landed(Landed(16, k + 1, 1024, seconds, outcomes))
    assert max(chosen) == 2
    assert set(chosen[8:]) == {1}
    assert policy.parked


def test_a_wider_batch_is_taken_when_it_brings_more() -> None:
    free = Goodput(table(per_row_ms=0.01), 16)
    assert free.admit_more(4, 12, 1024) == 12
    assert Goodput(CostTable(), 16).admit_more(4, 12, 1024) == 12
    # twice the rows in four times the time
    costs = CostTable()
    for b in WIDTHS[:8]:
        for t in SIZES:
            costs.forward.put(b, t, 1024, 1e-3 * b * b * t)
    dear = Goodput(costs, 16)
    assert dear.admit_more(4, 12, 1024) == 0
    assert dear.admit_more(0, 12, 1024) == 1, "an empty batch always takes a row"


def test_rows_near_their_end_expect_no_more_than_they_may_emit() -> None:
    survival = Survival(15)
    survival.track([1, 2])
    assert survival.emitted([1, 1], SIZES).tolist() == [2.0] * len(SIZES)
    assert survival.emitted([2, 1], SIZES)[-1] <= 3.0


def test_survival_learns_the_curve_and_what_sets_a_row_apart() -> None:
    survival, random = Survival(7), Random(0)
    survival.track([1, 2])
    for _ in range(300):
        outcomes = []
        for uid, p in ((1, 0.9), (2, 0.4)):
            kept = next((i for i in range(7) if random.random() >= p), 7)
            outcomes.append(RowOutcome(uid, 7, kept))
        survival.observe(outcomes)
    first = survival.emitted([100, 0], (8,))[0] - 1.0  # the other row is at its end
    second = survival.emitted([0, 100], (8,))[0] - 1.0
    assert first == pytest.approx((1 - 0.9**8) / 0.1 - 1, rel=0.2)
    assert second < 0.5 * first, "a row leans on the others, but not for long"


def test_a_place_nobody_tried_is_like_the_one_before() -> None:
    survival = Survival(15)
    survival.track([1])
    for _ in range(200):
        survival.observe([RowOutcome(1, 2, 0)])
    assert survival.curve()[-1] < 0.1


def test_a_drafter_that_makes_no_blocks_leaves_nothing_to_choose() -> None:
    policy = Goodput(CostTable(), 1)
    assert policy.choose([RowView(0, 9)], 1, 64) == 0
    assert policy.effective(9, 9) == "off"


def test_arena_widths() -> None:
    assert [arena_width(n) for n in (1, 5, 16, 17, 1000)] == [1, 6, 16, 24, 1000]
