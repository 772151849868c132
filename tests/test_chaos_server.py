"""Faults of the server: killed, away, emptied, its file cut short or damaged, its memory full."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from chaos_tools import Report, Scene, check_lines, fault
from client_tools import Remember, options, rows_of, verbose_rows
from queue_tools import submit, until

from dflash_batch.worker.binary import ServerStartError
from dflash_batch.worker.client import run_batch
from dflash_batch.worker.home import home_dir
from dflash_batch.worker.queue import connect
from dflash_batch.worker.server import EmbeddedServer


def runs(journal: Path) -> Counter[str]:
    """How often each prompt was given to a decoder."""
    return Counter(journal.read_text().splitlines() if journal.exists() else ())


@fault(7, "kill -9 of the server in mid-decode, restart on its file")
def test_a_killed_server_costs_no_row_a_second_run(scene: Scene) -> None:
    rows = scene.submit(48, shard_rows=8)
    journal = scene.folder / "journal"
    worker = scene.worker("--step-s", "0.05", "--journal", str(journal), lease_ttl_s=5.0)
    scene.answered(8)
    scene.kill_server()
    until(lambda: "queue_away" in worker.says, "the worker has noticed")
    scene.restart_server()
    scene.done()
    scene.check(rows)
    assert worker.is_running
    assert set(runs(journal).values()) == {1}


@fault(8, "server away exactly when a shard ends", slow=True)
def test_a_shard_that_ends_while_the_server_is_away_is_not_run_again(scene: Scene) -> None:
    rows = scene.submit(8, shard_rows=8)
    journal = scene.folder / "journal"
    worker = scene.worker("--step-s", "0.4", "--journal", str(journal), lease_ttl_s=8.0)
    until(lambda: journal.exists(), "the rows are in the engine")
    scene.kill_server()
    pause = time.monotonic() + 2.5  # three steps of 0.4 s, the last of which ends the shard
    until(lambda: time.monotonic() > pause, "the shard has ended")
    scene.restart_server()
    scene.done()
    scene.check(rows)
    assert worker.is_running
    assert set(runs(journal).values()) == {1}


@fault(9, "server away for longer than the lease", slow=True)
def test_decoding_pauses_when_the_leases_have_run_out_and_goes_on(scene: Scene) -> None:
    rows = scene.submit(200, shard_rows=8)
    journal = scene.folder / "journal"
    worker = scene.worker("--step-s", "0.2", "--journal", str(journal), max_batch=4)
    scene.answered(4)
    recorded = len(scene.answers)
    scene.kill_server()
    until(lambda: "decoding_paused" in worker.says, "decoding pauses")
    assert runs(journal).total() <= recorded + 4 * 8, "no more than was held, or just recorded"
    scene.restart_server()
    scene.done()
    scene.check(rows)
    assert "decoding_resumed" in worker.says
    assert worker.is_running


@fault(9, "… and the worker is killed meanwhile")
def test_rows_that_ended_in_an_outage_survive_their_worker(scene: Scene) -> None:
    rows = scene.submit(16, shard_rows=16)
    pending = str(scene.folder / "pending")
    first = scene.worker("--step-s", "0.3", lease_ttl_s=20.0, max_batch=4, pending_dir=pending)
    scene.answered(2)
    recorded = len(scene.answers)
    scene.kill_server()
    until(lambda: "queue_away" in first.says, "rows have ended that cannot be recorded")
    pause = time.monotonic() + 1.2
    until(lambda: time.monotonic() > pause, "some more have ended")
    first.kill()
    scene.report.kills += 1
    scene.restart_server()
    journal = scene.folder / "journal"
    second = scene.worker("--journal", str(journal), lease_ttl_s=20.0, pending_dir=pending)
    until(lambda: "delivered" in second.says, "they are delivered")
    scene.done()
    by_first = [r for r in scene.answers if r.metrics.worker == first.settings.name]
    assert len(by_first) > recorded
    assert not {f"user: question {r.index}" for r in by_first} & runs(journal).keys()
    scene.check(rows)


@fault(10, "server comes back empty, under `run`", slow=True)
def test_a_run_whose_server_came_back_empty_queues_what_is_missing(
    scene: Scene, tmp_path: Path
) -> None:
    watch = Remember(10, lambda: _restart_empty(scene))
    seen = scene.folder / "journal"
    chosen = options(tmp_path, "--step-s", "0.05", "--journal", str(seen), redis=scene.server.url)
    rows = rows_of(60)
    run_batch(rows, [], chosen, watch)
    check_lines(scene.report, rows, chosen.output, chosen.errors)
    assert any("lost the batch" in note for note in watch.notes)
    assert max(runs(seen).values()) <= 2
    assert runs(seen).total() < 2 * len(rows), "what was on disk was not run again"


@fault(10, "server comes back empty, under a shared worker", slow=True)
def test_a_shared_worker_stays_when_its_server_came_back_empty(scene: Scene) -> None:
    scene.submit(40, shard_rows=8)
    worker = scene.worker("--step-s", "0.1")
    scene.answered(4)
    _restart_empty(scene)
    until(lambda: "why=lost" in worker.says, "the worker has noticed")
    rows = scene.submit(8)
    scene.done()
    scene.check(rows)
    assert worker.is_running


@pytest.mark.parametrize("cut", [1, 900, 6000])
@fault(11, "the end of the server's file is cut off", slow=True)
def test_rows_of_the_last_second_that_a_power_cut_takes_are_run_again(
    scene: Scene, tmp_path: Path, cut: int
) -> None:
    def cut_power() -> None:
        scene.kill_server()
        [file] = (scene.folder / "appendonlydir").glob("*.incr.aof")
        os.truncate(file, max(0, file.stat().st_size - cut))
        scene.restart_server()

    watch = Remember(20, cut_power)
    chosen = options(tmp_path, "--step-s", "0.05", redis=scene.server.url, lease_ttl_s=1.0)
    rows = rows_of(80)
    run_batch(rows, [], chosen, watch)
    check_lines(scene.report, rows, chosen.output, chosen.errors)


@fault(12, "the middle of the server's file is damaged")
@pytest.mark.usefixtures("nothing_left")
def test_a_damaged_file_is_an_error_and_no_empty_start(tmp_path: Path, report: Report) -> None:
    home = home_dir(str(tmp_path / "h"))
    with EmbeddedServer(home) as server, connect(server.url) as client:
        for n in range(100):
            client.set(f"k{n}", "v" * 20)
    [file] = (home / "redis" / "appendonlydir").glob("*.incr.aof")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"x" * 40
    file.write_bytes(data)
    with pytest.raises(ServerStartError, match="file is damaged"):
        EmbeddedServer(home).__enter__()
    assert file.read_bytes() == data, "nothing is thrown away"


@fault(26, "results fill the server's memory")
def test_a_full_server_holds_the_workers_back_until_results_are_taken(scene: Scene) -> None:
    rows = verbose_rows(300)
    submit(scene.queue, rows, shard_rows=16)
    client = scene.queue.client
    slow = ("--step-s", "0.05")
    workers = [scene.worker(*slow, lease_ttl_s=2.0, max_batch=16) for _ in range(2)]
    scene.answered(20)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 200_000)
    until(lambda: all("maxmemory" in worker.says for worker in workers), "the workers say so", 60)
    recorded = len(scene.answers)
    assert recorded < len(rows)
    scene.export(rows, until_done=True)
    assert client.info("stats")["evicted_keys"] == 0
    client.config_set("maxmemory", 0)
    scene.check(rows, exported=True)
    assert all(worker.is_running for worker in workers)


@fault(30, "SCRIPT FLUSH in mid-run", slow=True)
def test_scripts_that_a_stranger_flushed_are_loaded_again(scene: Scene) -> None:
    rows = scene.submit(40, shard_rows=8)
    scene.worker("--step-s", "0.05")
    for count in (4, 12, 20):
        scene.answered(count)
        scene.queue.client.script_flush()
    scene.done()
    scene.check(rows)


@fault(36, "FLUSHALL by a stranger, under `run`", slow=True)
def test_a_run_whose_queue_a_stranger_emptied_queues_what_is_missing(
    scene: Scene, tmp_path: Path
) -> None:
    watch = Remember(10, scene.queue.client.flushall)
    chosen = options(tmp_path, "--step-s", "0.05", redis=scene.server.url)
    rows = rows_of(60)
    run_batch(rows, [], chosen, watch)
    check_lines(scene.report, rows, chosen.output, chosen.errors)
    assert any("lost the batch" in note for note in watch.notes)


@fault(39, "the server refuses: a permission is taken away")
def test_a_server_that_refuses_is_sat_out_like_one_that_is_away(scene: Scene) -> None:
    rows = scene.submit(40, shard_rows=8)
    worker = scene.worker("--step-s", "0.05", lease_ttl_s=5.0)
    scene.answered(4)
    operator = scene.queue.client
    operator.acl_setuser("default", commands=["-evalsha"])
    until(lambda: "queue_refuses" in worker.says, "the worker says so")
    assert worker.is_running
    operator.acl_setuser("default", commands=["+evalsha"])
    scene.done()
    scene.check(rows)
    assert worker.is_running


def _restart_empty(scene: Scene) -> None:
    scene.kill_server()
    for file in (scene.folder / "appendonlydir").iterdir():
        file.unlink()
    scene.restart_server()
