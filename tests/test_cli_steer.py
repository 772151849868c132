"""`pause`, `resume`, `cancel`, `retry`, `priority`, `drain`, `ls`, `rm`, `worker ls`; `rq info`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_tools import invoke, line, write_lines
from click.testing import Result

from dflash_batch.cli import exits
from dflash_batch.worker.contract import (
    JobSpec,
    Key,
    ModelRef,
    RowResult,
    RowStatus,
    WorkerInfo,
)
from dflash_batch.worker.queue import Queue
from dflash_batch.worker.rows import failure

Cli = Callable[..., Result]

DEMO = ModelRef(target="demo")
RQ = Path(sys.executable).with_name("rq")


@pytest.fixture
def cli(valkey_url: str, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command against the test server, which is empty at first."""
    monkeypatch.setenv("DFLASH_BATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DFLASH_BATCH_REDIS", valkey_url)
    return invoke


@pytest.fixture
def batch(cli: Cli, tmp_path: Path) -> str:
    """A batch of three rows."""
    path = write_lines(tmp_path / "in.jsonl", [line(name) for name in ("a", "b", "c")])
    return cli("submit", path, "-m", "demo", "-q").stdout.strip()


def work(queue: Queue, **codes: str) -> int:
    """Do what is ready; rows named in `codes` fail. Returns how many rows."""
    count = 0
    for lease in queue.lease("w", DEMO.key, 60_000, 10):
        rows = lease.shard.rows
        queue.commit(lease, [answer(row, codes.get(row.custom_id)) for row in rows])
        count += len(rows)
    return count


def answer(row: JobSpec, code: str | None) -> RowResult:
    if code is not None:
        return failure(row, 500, code, "m")
    return RowResult(
        index=row.index,
        custom_id=row.custom_id,
        status=RowStatus.OK,
        response={"status_code": 200, "body": {}},
    )


def reports(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == exits.OK, result.output
    return [json.loads(text) for text in result.stdout.splitlines()]


def test_pause_and_resume_a_batch(cli: Cli, queue: Queue, batch: str) -> None:
    result = cli("pause", "@last")
    assert (result.exit_code, result.stdout) == (exits.OK, "")
    assert f"{batch}   paused   in.jsonl" in result.stderr
    assert work(queue) == 0
    (report,) = reports(cli("pause", batch, "--json"))
    assert (report["batch"], report["state"]) == (batch, "paused"), "twice is harmless"
    assert "paused" in cli("status").stdout
    assert cli("resume", batch[:14], "-q").output == ""
    assert work(queue) == 3


def test_pause_and_resume_the_queue(cli: Cli, queue: Queue, batch: str) -> None:
    assert reports(cli("pause", "--queue", "--json")) == [{"queue_paused": True}]
    assert "queue    paused" in cli("status").stdout
    assert json.loads(cli("status", "--json").stdout)["queue_paused"] is True
    assert work(queue) == 0
    assert "goes on" in cli("resume", "--queue").stderr
    assert work(queue) == 3
    for verb in ("pause", "resume"):
        assert cli(verb).exit_code == exits.USAGE
        assert cli(verb, batch, "--queue").exit_code == exits.USAGE


def test_cancel_keeps_what_is_done_and_is_harmless_twice(
    cli: Cli, queue: Queue, batch: str
) -> None:
    (report,) = reports(cli("cancel", batch, "--json"))
    assert (report["state"], report["failed"], report["left"]) == ("cancelled", 3, 0)
    assert cli("cancel", batch).exit_code == exits.OK
    result = cli("pause", batch)
    assert result.exit_code == exits.USAGE
    assert "is cancelled and cannot be paused" in result.stderr
    assert cli("retry", batch).stdout == "", "cancelled is not failed"


def test_a_batch_that_is_done_cannot_be_steered(cli: Cli, queue: Queue, batch: str) -> None:
    work(queue)
    for arguments in (("cancel", batch), ("resume", batch), ("priority", batch, 1)):
        result = cli(*arguments)
        assert result.exit_code == exits.USAGE
        assert "is done" in result.stderr


def test_unknown_names_are_named_and_nothing_is_done_to_the_others(
    cli: Cli, queue: Queue, batch: str
) -> None:
    for arguments in (
        ("pause", batch, "nix"),
        ("cancel", batch, "nix"),
        ("rm", "--force", batch, "nix"),
        ("retry", "nix"),
        ("priority", "nix", 1),
        ("drain", "nix"),
    ):
        result = cli(*arguments)
        assert result.exit_code == exits.NOT_FOUND
        assert "nix" in result.stderr
    status = queue.status(batch)
    assert status is not None
    assert status.state.value == "running"


def test_retry_queues_the_failed_rows_as_a_batch_of_their_own(
    cli: Cli, queue: Queue, batch: str
) -> None:
    assert cli("retry", batch).exit_code == exits.USAGE, "it is not over"
    work(queue, a="internal_error", c="out_of_memory")
    first = cli("retry", batch, "--only", "out_of_memory")
    again = cli("retry", batch, "--only", "out_of_memory", "--json")
    (report,) = reports(again)
    assert report == {"batch": first.stdout.strip(), "requests": 1, "retries": batch}
    both = cli("retry", batch, "-q").stdout.strip()
    assert len({batch, both, first.stdout.strip()}) == 3
    assert work(queue) == 3
    names = [result.custom_id for _, result in queue.results(both, block_ms=0)]
    assert names == ["a", "c"]
    assert cli("retry", both, "--json").exit_code == exits.OK
    assert reports(cli("retry", both, "--json"))[0]["batch"] is None
    assert reports(cli("retry", batch, "--new", "--json"))[0]["batch"] not in (both, batch)
    old = queue.status(batch)
    assert old is not None
    assert (old.ok, old.failed) == (1, 2), "records stay"


def test_priority_is_set_at_submit_and_later(cli: Cli, queue: Queue, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [line("a")])
    cli("submit", path, "-m", "demo", "--priority", "-3")
    assert reports(cli("ls", "--json"))[0]["priority"] == -3
    (report,) = reports(cli("priority", "@last", "7", "--weight", "2.5", "--json"))
    assert (report["priority"], report["weight"]) == (7, 2.5)
    assert cli("priority", "@last", "-10").exit_code == exits.OK
    assert "priority -10" in cli("ls").stdout
    assert "priority -10 · weight 2.5" in cli("status", "@last").stdout
    assert cli("priority", "@last", "11").exit_code == exits.USAGE


def test_ls_lists_batches_by_state(cli: Cli, queue: Queue, batch: str, tmp_path: Path) -> None:
    work(queue)
    path = write_lines(tmp_path / "other.jsonl", [line("x")])
    other = cli("submit", path, "-m", "demo", "-q").stdout.strip()
    assert [report["batch"] for report in reports(cli("ls", "--json"))] == [other, batch]
    assert cli("ls", "--state", "done").stdout.split()[0] == batch
    assert cli("ls", "--state", "paused").stdout == ""


def test_rm_forgets_what_is_over_and_the_rest_only_by_force(
    cli: Cli, queue: Queue, batch: str
) -> None:
    result = cli("rm", batch)
    assert result.exit_code == exits.USAGE
    assert "3 rows are not done" in result.stderr
    (report,) = reports(cli("rm", batch, "--force", "--json"))
    assert report["batch"] == batch
    assert report["bytes"] > 100
    assert queue.batches() == []
    assert not [key for key in queue.client.scan_iter() if batch.encode() in key]


def test_workers_are_listed_and_drained(cli: Cli, queue: Queue) -> None:
    assert "no worker is up" in cli("worker", "ls").stderr
    for name in ("mac-aaa1", "mac-aab2", "pro-1"):
        queue.announce(WorkerInfo(name=name, host="mac", pid=1, model=DEMO, hot=["g"]), 60)
    shown = reports(cli("worker", "ls", "--json"))
    assert [(info["name"], info["hot"]) for info in shown] == [
        ("mac-aaa1", ["g"]),
        ("mac-aab2", ["g"]),
        ("pro-1", ["g"]),
    ]
    assert "demo" in cli("worker", "ls").stdout
    result = cli("drain", "mac-aa")
    assert result.exit_code == exits.NOT_FOUND
    assert "fits several workers" in result.stderr
    assert reports(cli("drain", "mac-aaa", "--grace", "5", "--json")) == [
        {"worker": "mac-aaa1", "grace_s": 5.0}
    ]
    assert cli("drain", "--all").exit_code == exits.OK
    assert queue.client.get(Key.drain("mac-aaa1")) == b"inf"
    assert cli("drain").exit_code == exits.USAGE


@pytest.mark.skipif(not RQ.exists(), reason="the command rq is not installed")
def test_rq_info_shows_the_truth_and_changes_nothing(
    cli: Cli, queue: Queue, batch: str, valkey_url: str
) -> None:
    def rq_info() -> str:
        command = [str(RQ), "info", "--raw", "-S", "json", "-u", valkey_url]
        environment = os.environ | {"RQ_KEY_PREFIX": Key.RQ_PREFIX}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def everything() -> dict[bytes, bytes]:
        return {key: queue.client.dump(key) for key in queue.client.scan_iter("*")}

    before = everything()
    assert f"queue {Key.QUEUE} 1" in rq_info()
    assert everything() == before
    assert work(queue) == 3
    assert f"queue {Key.QUEUE} 0" in rq_info()
