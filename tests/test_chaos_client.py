"""Faults of the client: killed while it submits or exports, disk full, two at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import client_tools
import pytest
from chaos_tools import Report, Scene, check_lines, fault
from client_tools import options, rows_of, verbose_rows
from queue_tools import until

from dflash_batch.worker.server import EmbeddedServer

SLOW = ("--step-s", "0.05")


def client(folder: Path, rows: int, *engine: str, **given: Any) -> subprocess.Popen[str]:
    facts = {"folder": str(folder), "rows": rows, "engine": engine, **given}
    return subprocess.Popen(
        [sys.executable, client_tools.__file__, json.dumps(facts)],
        stdout=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def check(report: Report, folder: Path, count: int) -> None:
    """The common check, as far as it goes for `run`: the queue has forgotten the batch."""
    chosen = options(folder)
    check_lines(report, rows_of(count), chosen.output, chosen.errors)
    assert EmbeddedServer(folder / "home").pid() is None


@fault(24, "kill -9 of a client that has sent a third", slow=True)
def test_a_submission_that_was_cut_short_is_continued_and_not_begun(
    scene: Scene, tmp_path: Path
) -> None:
    rows, url = 120, scene.server.url
    worker = scene.worker(model=None)  # would take what it can get
    until(lambda: "worker_started" in worker.says, "a worker looks for work")
    first = client(tmp_path, rows, die="add", times=2, options={"redis": url})
    assert outcome(first)[0] == -signal.SIGKILL
    scene.report.kills += 1
    [half] = scene.queue.batches()
    assert half.state == "uploading"
    assert 0 < half.shards < 120 // 32 + 1
    assert "leased" not in worker.says
    assert outcome(client(tmp_path, rows, options={"redis": url}))[0] == 0
    check_lines(
        scene.report, rows_of(rows), tmp_path / "in.out.jsonl", tmp_path / "in.errors.jsonl"
    )
    assert scene.queue.batches() == []


@fault(25, "kill -9 of a client that exports, at each step")
@pytest.mark.parametrize(
    "point",
    [
        "write",
        pytest.param("sync", marks=pytest.mark.chaos),
        pytest.param("acknowledge", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_an_export_that_was_cut_short_goes_on_without_gap_or_double(
    tmp_path: Path, report: Report, point: str
) -> None:
    first = client(tmp_path, 60, *SLOW, die=point, times=2)
    assert outcome(first)[0] == -signal.SIGKILL
    report.kills += 1
    assert outcome(client(tmp_path, 60))[0] == 0
    check(report, tmp_path, 60)


@fault(34, "the disk is full under the output file", slow=True)
def test_a_full_disk_stops_a_run_with_a_message_and_costs_nothing(
    scene: Scene, tmp_path: Path
) -> None:
    limit = 600_000  # bytes a file may have
    given = {"verbose": True, "options": {"redis": scene.server.url}}
    status, said = outcome(client(tmp_path, 300, file_bytes=limit, **given))
    assert status == 9, said
    assert "cannot write" in said
    assert "same command" in said
    lines = (tmp_path / "in.out.jsonl").read_bytes()
    assert 0 < len(lines) <= limit
    assert lines.endswith(b"\n")
    [status_now] = scene.queue.batches()
    kept = len(scene.queue.results(status_now.batch.id, "0-0", count=1000, block_ms=0))
    recorded = status_now.total - status_now.left
    assert lines.count(b"\n") >= recorded - kept, "nothing is forgotten that is not on disk"
    assert outcome(client(tmp_path, 300, **given))[0] == 0
    check_lines(scene.report, verbose_rows(300), tmp_path / "in.out.jsonl", tmp_path / "none")


@fault(35, "two runs start at once on a fresh machine", slow=True)
@pytest.mark.usefixtures("nothing_left")
def test_two_first_runs_share_one_server(tmp_path: Path, report: Report) -> None:
    home = tmp_path / "home"
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runs.append(client(tmp_path / name, 40, *SLOW, options={"digest": name, "home": str(home)}))
    pids: set[int] = set()

    def both_over() -> bool:
        if (home / "redis").exists() and (pid := EmbeddedServer(home).pid()) is not None:
            pids.add(pid)
        return all(run.poll() is not None for run in runs)

    until(both_over, "both are done", 60)
    assert [outcome(run)[0] for run in runs] == [0, 0]
    assert len(pids) == 1
    for name in ("a", "b"):
        chosen = options(tmp_path / name)
        check_lines(report, rows_of(40), chosen.output, chosen.errors)
    assert EmbeddedServer(home).pid() is None
