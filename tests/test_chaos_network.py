"""Faults of the link between a worker and the server: lost answers, black holes, resets, delays."""

from __future__ import annotations

from chaos_tools import Scene, fault
from queue_tools import until


@fault(3, "a commit arrives and its answer does not")
def test_a_commit_whose_answer_was_lost_is_recorded_once(scene: Scene) -> None:
    rows = scene.submit(24, shard_rows=8)
    proxy = scene.proxy()
    worker = scene.worker("--step-s", "0.05", url=proxy.url)
    scene.answered(2)
    proxy.cut_answer(b"commit")
    until(lambda: proxy.answer_was_cut, "an answer is lost")
    scene.done()
    until(lambda: "twice=" in worker.says, "the second commit finds the work done")
    scene.check(rows)


@fault(13, "black hole round one worker for longer than its lease", slow=True)
def test_a_worker_behind_a_black_hole_is_replaced_and_beats_first(scene: Scene) -> None:
    rows = scene.submit(60, shard_rows=60)
    proxy = scene.proxy()
    cut_off = scene.worker("--step-s", "0.1", url=proxy.url)
    scene.answered(4)
    proxy.hold("requests", "replies")
    other = scene.worker("--step-s", "0.05")
    until(lambda: "leased" in other.says, "another has taken over")
    until(lambda: "queue_away" in cut_off.says, "the worker has noticed")
    before = len(scene.answers)
    proxy.heal()
    until(lambda: "lost shard" in cut_off.says, "it learns that its shard is gone")
    scene.done()
    late = [r for r in scene.answers[before:] if r.metrics.worker == cut_off.settings.name]
    assert not late, "what it had was not recorded"
    scene.check(rows)
    assert cut_off.is_running


@fault(14, "replies of the server are dropped, requests arrive", slow=True)
def test_requests_that_are_never_answered_count_once(scene: Scene) -> None:
    rows = scene.submit(40, shard_rows=8)
    proxy = scene.proxy()
    worker = scene.worker("--step-s", "0.05", url=proxy.url, lease_ttl_s=2.0)
    scene.answered(4)
    proxy.hold("replies")
    until(lambda: "queue_away" in worker.says, "the worker has noticed")
    proxy.cut()
    proxy.heal()
    scene.done()
    scene.check(rows)
    assert worker.is_running


@fault(15, "250 ms each way and 5 % of replies reset, all the time", slow=True)
def test_a_bad_link_is_slow_and_nothing_else(scene: Scene) -> None:
    rows = scene.submit(64, shard_rows=8)
    proxy = scene.proxy(seed=3)
    scene.worker("--step-s", "0.01", url=proxy.url, lease_ttl_s=10.0, max_batch=16)
    scene.answered(1)
    proxy.latency_s, proxy.reset_share = 0.25, 0.05
    scene.done(120)
    proxy.latency_s, proxy.reset_share = 0.0, 0.0
    assert proxy.resets > 0
    leases = sum(int(scene.epoch(f"batch_a-{n}")) for n in range(8))
    assert leases <= 1.1 * 8 + 1, f"{leases} leases of 8 shards"
    scene.check(rows)
