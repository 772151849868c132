"""Faults of workers and engines: killed, stopped, slept, hung, poisoned, old."""

from __future__ import annotations

import os
import signal
import time
from random import Random

import pytest
from chaos_tools import Scene, fault
from queue_tools import until

from dflash_batch.worker.contract import Key, RowResult, RowStatus


@fault(1, "kill -9 of a worker in mid-decode")
def test_the_rows_of_a_killed_worker_go_to_another(scene: Scene) -> None:
    rows = scene.submit(48, shard_rows=8)
    victim = scene.worker("--step-s", "2")
    until(lambda: len(scene.held_by(victim)) > 0, "the victim holds shards")
    other = scene.worker("--step-s", "0.05")
    until(lambda: "leased" in other.says, "another works beside it")
    assert scene.held_by(victim)
    scene.kill(victim)
    scene.recovered()
    scene.done()
    scene.check(rows)
    assert scene.report.worst_s < 5


@fault(2, "kill -9 between the lease and the first row", slow=True)
def test_a_worker_killed_before_its_first_row_loses_nothing(scene: Scene) -> None:
    rows = scene.submit(16, shard_rows=8)
    victim = scene.worker("--step-s", "30")
    until(lambda: len(scene.held_by(victim)) > 0, "the victim holds shards")
    scene.kill(victim)
    scene.worker()
    scene.recovered()
    scene.done()
    scene.check(rows)


@fault(4, "kill -9 of all workers, new ones come", slow=True)
def test_new_workers_finish_what_all_killed_ones_left(scene: Scene) -> None:
    rows = scene.submit(80, shard_rows=8)
    victims = [scene.worker("--step-s", "0.05") for _ in range(3)]
    scene.answered(8)
    scene.kill(*victims)
    for _ in range(2):
        scene.worker("--step-s", "0.01")
    scene.recovered()
    scene.done()
    scene.check(rows)


@fault(5, "SIGSTOP for longer than the lease, then SIGCONT")
def test_a_sleeper_whose_shards_were_taken_records_nothing(scene: Scene) -> None:
    rows = scene.submit(40, shard_rows=40)
    sleeper = scene.worker("--step-s", "0.05", lease_ttl_s=0.6)
    scene.answered(2)
    sleeper.signal(signal.SIGSTOP)
    other = scene.worker("--step-s", "0.05")
    until(lambda: "leased" in other.says, "another has taken over")
    sleeper.signal(signal.SIGCONT)
    until(lambda: "lost shard" in sleeper.says, "the sleeper has noticed")
    scene.done()
    scene.check(rows)
    assert sleeper.is_running


@fault(6, "SIGSTOP for less than the lease", slow=True)
def test_a_nap_changes_nothing(scene: Scene) -> None:
    sleeper, other = (scene.worker("--step-s", "0.2", lease_ttl_s=10.0) for _ in range(2))
    for worker in (sleeper, other):
        until(lambda w=worker: "engine_ready" in w.says, "both are ready")  # type: ignore[misc]
    rows = scene.submit(40, shard_rows=8)
    until(lambda: all(map(scene.held_by, (sleeper, other))), "both hold shards")
    sleeper.signal(signal.SIGSTOP)
    before = scene.held_by(sleeper)
    count = len(scene.answers)
    until(lambda: len(scene.answers) > count or scene.is_done, "the other goes on")
    sleeper.signal(signal.SIGCONT)
    scene.done()
    epochs = {scene.epoch(shard_id) for shard_id in before}
    assert epochs == {b"1"}, "each shard was leased once"
    scene.check(rows)


def by_index(scene: Scene) -> dict[int, RowResult]:
    return {result.index: result for result in scene.answers}


def message(result: RowResult) -> str:
    assert result.response is not None
    text: str = result.response["body"]["error"]["message"]
    return text


@fault(16, "a row that kills its engine, in a full batch")
def test_a_poison_row_is_condemned_with_the_engines_last_words(scene: Scene) -> None:
    rows = scene.submit(24, poison={6}, shard_rows=8)
    worker = scene.worker("--crash", "poison")
    scene.done()
    assert worker.says.count("engine_started") <= 4, "one at the start and three after deaths"
    poison = by_index(scene)[6]
    assert poison.status is RowStatus.POISON
    assert "killed by SIGKILL" in message(poison)
    scene.check(rows, poison={6})


@fault(17, "an engine that dies while it loads", slow=True)
def test_a_worker_that_cannot_load_parks_and_blames_no_row(scene: Scene) -> None:
    rows = scene.submit(8)
    broken = scene.worker("--no-model")
    until(lambda: "parked" in broken.says, "it parks")
    assert broken.is_running
    assert scene.held_by(broken) == {}
    scene.worker()
    scene.done()
    scene.check(rows)


@fault(18, "two poison rows in one shard", slow=True)
def test_two_poison_rows_of_a_shard_are_both_found(scene: Scene) -> None:
    rows = scene.submit(8, poison={2, 5}, shard_rows=8)
    worker = scene.worker("--crash", "poison")
    scene.done(90)
    assert worker.says.count("engine_started") <= 7
    scene.check(rows, poison={2, 5})


@fault(20, "SIGTERM in mid-decode, without and with grace", slow=True)
@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_a_worker_that_is_told_to_stop_gives_back_what_it_cannot_finish(
    scene: Scene, grace_s: float
) -> None:
    rows = scene.submit(32, shard_rows=8)
    slow = scene.worker("--step-s", "0.1", grace_s=grace_s)
    scene.answered(1)
    before = time.monotonic()
    slow.signal(signal.SIGTERM)
    assert slow.wait() == 0
    assert time.monotonic() - before < grace_s + 5  # generous: two loaded cores
    assert ("released" in slow.says) == (grace_s == 0.0)
    assert not scene.held_by(slow)
    scene.worker()
    scene.done()
    suspicions = {scene.queue.client.hget(Key.shard(f"batch_a-{n}"), "deaths") for n in range(4)}
    assert suspicions <= {None, b"0"}, "no blame"
    scene.check(rows)


@fault(21, "a storm of SIGTERM and SIGINT", slow=True)
def test_a_storm_of_signals_fails_no_row(scene: Scene) -> None:
    rows = scene.submit(32, shard_rows=8)
    slow = scene.worker("--step-s", "0.1", grace_s=5.0)
    scene.answered(1)

    def storm() -> bool:
        slow.signal(signal.SIGINT)
        slow.signal(signal.SIGTERM)
        return "worker_ended" in slow.says

    until(storm, "it ends")
    slow.wait()
    scene.worker()
    scene.done()
    scene.check(rows)


@fault(27, "an engine hangs, with and without the interpreter locked", slow=True)
@pytest.mark.parametrize("trouble", ["--hang", "--seize"])
def test_an_engine_that_hangs_is_killed_and_its_rows_go_on(scene: Scene, trouble: str) -> None:
    rows = scene.submit(16, shard_rows=8)
    once = scene.folder / "hung"
    worker = scene.worker(trouble, "question 3", "--once", str(once), stall_timeout_s=1.5)
    scene.done()
    assert "engine_stalled" in worker.says
    scene.check(rows)


@fault(28, "the wall clock of a worker is an hour off, or jumps", slow=True)
@pytest.mark.parametrize("clock", ["-3600", "3600", "3600 * (int(real()) % 2)"])
def test_a_wrong_clock_changes_nothing(scene: Scene, clock: str) -> None:
    rows = scene.submit(40, shard_rows=8)
    patch = f"import time; real = time.time; time.time = lambda: real() + {clock}"
    wrong = scene.worker("--step-s", "0.05", lease_ttl_s=3.0, preamble=patch)
    until(lambda: "committed" in wrong.says, "the wrong one works too")
    scene.worker("--step-s", "0.05", lease_ttl_s=3.0)
    scene.done()
    assert {scene.epoch(f"batch_a-{n}") for n in range(5)} == {b"1"}, "no lease ran out"
    scene.check(rows)


@fault(29, "a worker of another schema joins", slow=True)
def test_a_worker_of_another_schema_leases_nothing_and_is_quiet(scene: Scene) -> None:
    rows = scene.submit(24, shard_rows=8)
    older = "import dflash_batch.worker.contract as c; c.SCHEMA = 0"
    named = scene.worker(preamble=older)
    roaming = scene.worker(preamble=older, model=None)
    until(lambda: "engine_ready" in named.says, "it is ready to lease")
    until(lambda: "worker_started" in roaming.says, "the other looks round")
    scene.worker("--step-s", "0.05")
    scene.done()
    for worker in (named, roaming):
        assert worker.is_running
        assert "leased" not in worker.says
        assert len(worker.says.splitlines()) < 10
    assert "engine_started" not in roaming.says, "there is nothing for it to load"
    scene.check(rows)


@fault(37, "an engine runs out of memory: the batch is halved")
def test_want_of_memory_halves_the_width_and_blames_nobody(scene: Scene) -> None:
    rows = scene.submit(48, shard_rows=16)
    worker = scene.worker("--wide", "3", max_batch=8)
    scene.done()
    widths = [w for line in worker.says.splitlines() for w in line.split() if "width=" in w]
    assert widths == ["width=8", "width=4", "width=2"]
    scene.check(rows)


@fault(38, "an engine leaks memory: it is replaced between rows", slow=True)
def test_an_engine_over_its_limit_is_replaced_when_it_has_no_rows(scene: Scene) -> None:
    rows = scene.submit(60, shard_rows=8)
    megabytes = 1 << 20
    worker = scene.worker(
        *("--leak", str(16 * megabytes), "--step-s", "0.2"),
        memory_limit=300 * megabytes,
        max_batch=8,
    )
    scene.done()
    assert "memory_over_limit" in worker.says
    assert "engine_recycled" in worker.says
    assert "engine_died" not in worker.says
    assert "released" not in worker.says, "it finished what it had"
    scene.check(rows)


@fault(19, "kill -9 of one or the other at random, no row is to blame", slow=True)
def test_random_kills_condemn_no_row(scene: Scene) -> None:
    rows = scene.submit(2400, shard_rows=16)
    random = Random(7)
    alive = [scene.worker("--step-s", "0.04") for _ in range(3)]
    until_s = time.monotonic() + 45
    while time.monotonic() < until_s and not scene.is_done:
        pause = time.monotonic() + random.uniform(0.5, 3.0)
        while time.monotonic() < pause and not scene.is_done:
            scene.look()
            time.sleep(0.05)
        victim = alive.pop(random.randrange(len(alive)))
        if random.random() < 0.5 and "engine_ready" in victim.says:
            os.kill(victim.engine_pid(), signal.SIGKILL)
            scene.report.kills += 1
            alive.append(victim)
        else:
            scene.kill(victim)
            alive.append(scene.worker("--step-s", "0.04"))
    scene.recovered(60)
    scene.done(120)
    scene.check(rows)
