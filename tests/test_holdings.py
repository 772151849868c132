"""What a worker holds, and how careful it is with suspects. No server, no processes."""

from __future__ import annotations

import pytest
from queue_tools import done, row

from dflash_batch.worker.contract import Crash, Lease, RowStatus, Shard
from dflash_batch.worker.holdings import Care, Holdings


def lease(
    name: str = "s", count: int = 4, pending: list[int] | None = None, deaths: int = 0
) -> Lease:
    rows = [row(i) for i in range(count)]
    return Lease(
        shard=Shard(id=name, batch_id="b", rows=rows),
        epoch=1,
        owner="w",
        deadline_ms=0,
        pending=list(range(count)) if pending is None else pending,
        model_key="k",
        deaths=deaths,
        max_attempts=3,
    )


def admitted(holdings: Holdings) -> dict[str, list[int]]:
    return {lease.shard.id: [spec.index for spec in rows] for lease, rows in holdings.to_admit()}


@pytest.mark.parametrize(
    ("deaths", "care"),
    [
        (0, Care.TOGETHER),
        (1, Care.ALONE),
        (2, Care.ROW_BY_ROW),
        (4, Care.ROW_BY_ROW),
        (5, Care.ROW_BY_ROW),
        (6, Care.CONDEMNED),
    ],
)
def test_care_follows_suspicion(deaths: int, care: Care) -> None:
    assert Care.of(lease(deaths=deaths)) is care


def test_rows_with_a_record_are_not_run_again() -> None:
    holdings = Holdings()
    holdings.take(lease(pending=[1, 3]))
    assert admitted(holdings) == {"s": [1, 3]}
    assert admitted(holdings) == {}
    assert holdings.open_rows == 2


def test_a_record_counts_once_and_only_for_the_lease_it_was_made_under() -> None:
    holdings = Holdings()
    held = holdings.take(lease())
    admitted(holdings)
    assert not holdings.record("s", 2, done(0))
    assert not holdings.record("other", 1, done(0))
    assert holdings.record("s", 1, done(0))
    assert not holdings.record("s", 1, done(0))
    assert (holdings.open_rows, holdings.uncommitted) == (3, 1)
    assert holdings.uncommitted_s >= 0
    holdings.committed(held)
    assert (holdings.uncommitted, holdings.uncommitted_s) == (0, 0.0)


def test_row_by_row_means_one_at_a_time_in_order() -> None:
    holdings = Holdings()
    holdings.take(lease(deaths=4))
    assert holdings.alone
    assert admitted(holdings) == {"s": [0]}
    assert admitted(holdings) == {}
    holdings.record("s", 1, done(0))
    assert admitted(holdings) == {"s": [1]}


def test_the_first_row_of_a_condemned_shard_ends_and_the_others_go_on() -> None:
    holdings = Holdings()
    held = holdings.take(lease(deaths=6, pending=[2, 3]))
    assert [(result.index, result.status) for result in held.finished] == [(2, RowStatus.POISON)]
    assert admitted(holdings) == {"s": [3]}


def test_a_row_is_condemned_when_engines_died_on_it_by_itself_and_no_other_is() -> None:
    crash: Crash | None = None
    cares = []
    for deaths in (2, 4, 6):
        holdings = Holdings()
        held = holdings.take(lease(deaths=deaths), crash)
        cares.append(held.care)
        if held.care is Care.CONDEMNED:
            break
        admitted(holdings)
        holdings.engine_died(blame=True)
        crash = held.crash("killed by SIGKILL")
    assert cares == [Care.ROW_BY_ROW, Care.ROW_BY_ROW, Care.CONDEMNED]
    assert crash == Crash(words="killed by SIGKILL", row=0, lone=2)
    (poison,) = held.finished
    assert poison.response is not None
    assert "killed by SIGKILL" in poison.response["body"]["error"]["message"]
    rest = lease(deaths=6, pending=[1, 2, 3])
    assert Care.of(rest, crash) is Care.ROW_BY_ROW, "its neighbour has done nothing"
    assert Care.of(rest.model_copy(update={"deaths": 12}), crash) is Care.CONDEMNED


def test_a_death_in_company_is_no_evidence_against_a_row() -> None:
    holdings = Holdings()
    held = holdings.take(lease(deaths=1))
    admitted(holdings)
    holdings.engine_died(blame=True)
    assert held.crash("x" * 1000) == Crash(words="x" * 300)


def test_after_a_death_shards_leave_with_blame_only_where_rows_were_running() -> None:
    holdings = Holdings()
    ran = holdings.take(lease("ran"))
    admitted(holdings)
    waiting = holdings.take(lease("waiting"))
    complete = holdings.take(lease("complete", count=1, pending=[]))
    holdings.engine_died(blame=True)
    assert (ran.leaving, ran.crashed) == (True, True)
    assert (waiting.leaving, waiting.crashed) == (True, False)
    assert (complete.leaving, complete.crashed) == (False, False)
    assert admitted(holdings) == {}


def test_giving_back_blames_nobody() -> None:
    holdings = Holdings()
    held = holdings.take(lease())
    admitted(holdings)
    holdings.give_back_all()
    assert (held.leaving, held.crashed) == (True, False)
    holdings.let_go("s")
    assert len(holdings) == 0
    assert holdings.let_go("s") is None
