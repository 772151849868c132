"""`submit`, `status`, `results` and `worker`, on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_tools import invoke, line, write_lines
from click.testing import Result

from dflash_batch.cli import exits
from dflash_batch.worker import main as worker_main
from dflash_batch.worker.contract import JobSpec, ModelRef, RowResult, RowStatus, WorkerInfo
from dflash_batch.worker.queue import Queue
from dflash_batch.worker.settings import WorkerSettings

Cli = Callable[..., Result]

DEMO = ModelRef(target="demo")


@pytest.fixture
def cli(valkey_url: str, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command against the test server, which is empty at first."""
    monkeypatch.setenv("DFLASH_BATCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DFLASH_BATCH_REDIS", valkey_url)
    return invoke


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [line(name) for name in ("a", "b", "c")])


def answer(row: JobSpec, *, ok: bool = True) -> RowResult:
    error = {"message": "m", "type": "t", "param": None, "code": "internal_error"}
    return RowResult(
        index=row.index,
        custom_id=row.custom_id,
        status=RowStatus.OK if ok else RowStatus.ERROR,
        response={"status_code": 200 if ok else 500, "body": {} if ok else {"error": error}},
    )


def work(queue: Queue, failing: str = "", leave: str = "") -> None:
    """Do all rows of the queue but `leave`, as a worker would."""
    for lease in queue.lease("w", DEMO.key, 60_000, 10):
        rows = [row for row in lease.shard.rows if row.custom_id != leave]
        queue.commit(lease, [answer(row, ok=row.custom_id != failing) for row in rows])


def test_submit_prints_the_id_and_nothing_else_on_stdout(
    cli: Cli, queue: Queue, source: Path
) -> None:
    result = cli("submit", source, "-m", "demo")
    assert result.exit_code == exits.OK
    (status,) = queue.batches()
    assert result.stdout == f"{status.batch.id}\n"
    assert (status.total, status.state.value, status.batch.name) == (3, "running", "in.jsonl")
    assert "3 requests queued" in result.stderr
    assert "no worker is running" in result.stderr
    assert "our own server" not in result.stderr


def test_submitting_again_is_the_same_batch_and_new_is_another(
    cli: Cli, queue: Queue, source: Path
) -> None:
    first = cli("submit", source, "-m", "demo", "-q")
    again = cli("submit", "-", "-m", "demo", "-q", stdin=source.read_bytes())
    assert (again.stdout, again.stderr) == (first.stdout, "")
    other = cli("submit", source, "-m", "demo", "--new", "--json")
    report = json.loads(other.stdout)
    assert report["batch"] not in first.stdout
    assert (report["requests"], report["skipped"], report["workers"]) == (3, 0, 0)
    assert len(queue.batches()) == 2


def test_a_file_with_bad_lines_is_not_queued_unless_they_are_skipped(
    cli: Cli, queue: Queue, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "in.jsonl", [line("a"), "{"])
    result = cli("submit", path, "-m", "demo")
    assert (result.exit_code, result.stdout) == (exits.INVALID_INPUT, "")
    assert queue.batches() == []
    assert cli("submit", path, "-m", "demo", "--on-invalid", "skip").exit_code == exits.OK
    assert queue.batches()[0].total == 1


def test_status_shows_workers_and_batches(cli: Cli, queue: Queue, source: Path) -> None:
    assert cli("status").stdout == "workers  none\nbatches  none\n"
    batch = cli("submit", source, "-m", "demo").stdout.strip()
    work(queue, failing="b")
    worker = WorkerInfo(
        name="mac-0123456789", host="mac", pid=1, model=DEMO, state="busy", rows_done=3, note="hot"
    )
    queue.announce(worker, 60)
    text = cli("status").stdout
    assert "workers  1 up" in text
    assert "  mac-012345               busy      demo   rows 3   active 0   0 tok/s   hot" in text
    assert f"  {batch}   done      3/3 100%   ok 2   failed 1   in.jsonl" in text
    report = json.loads(cli("status", "--json").stdout)
    assert [info["name"] for info in report["workers"]] == ["mac-0123456789"]
    assert report["batches"][0]["batch"] == batch


def test_a_batch_is_found_by_part_of_its_id_or_as_the_last(
    cli: Cli, queue: Queue, source: Path
) -> None:
    batch = cli("submit", source, "-m", "demo").stdout.strip()
    for name in (batch, batch[:12], batch.removeprefix("batch_")[:6], "@last"):
        report = json.loads(cli("status", name, "--json").stdout)
        assert (report["batch"], report["state"], report["done"]) == (batch, "running", 0)
    assert "3 requests" not in cli("status", "@last").stdout
    assert "rows     0/3 0%   ok 0   failed 0" in cli("status", "@last").stdout
    cli("submit", source, "-m", "demo", "--new")
    result = cli("status", "batch_")
    assert result.exit_code == exits.NOT_FOUND
    assert "fits several batches" in result.stderr


@pytest.mark.parametrize("verb", ["status", "results"])
@pytest.mark.parametrize("name", ["@last", "zzz"])
def test_a_batch_that_is_not_there(cli: Cli, verb: str, name: str) -> None:
    assert cli(verb, name).exit_code == exits.NOT_FOUND


def test_results_go_to_stdout_and_can_be_read_again(cli: Cli, queue: Queue, source: Path) -> None:
    cli("submit", source, "-m", "demo")
    work(queue)
    for _ in range(2):
        result = cli("results", "@last")
        assert result.exit_code == exits.OK
        ids = [json.loads(text)["custom_id"] for text in result.stdout.splitlines()]
        assert sorted(ids) == ["a", "b", "c"]
    assert "3 ok   0 failed" in result.stderr


def test_results_go_to_files_that_are_not_overwritten(
    cli: Cli, queue: Queue, source: Path, tmp_path: Path
) -> None:
    cli("submit", source, "-m", "demo")
    work(queue, failing="b")
    out, bad = tmp_path / "out.jsonl", tmp_path / "bad.jsonl"
    result = cli("results", "@last", "-o", out, "--errors", bad)
    assert result.exit_code == exits.SOME_FAILED
    assert [len(path.read_text().splitlines()) for path in (out, bad)] == [2, 1]
    assert cli("results", "@last", "-o", out).exit_code == exits.USAGE
    assert len(out.read_text().splitlines()) == 2
    assert cli("results", "@last", "-o", tmp_path / "no" / "x").exit_code == exits.USAGE


def test_what_is_not_done_yet_is_counted_or_waited_for(
    cli: Cli, queue: Queue, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("submit", source, "-m", "demo")
    (lease,) = queue.lease("w", DEMO.key, 60_000, 10)
    rows = {row.custom_id: row for row in lease.shard.rows}
    queue.commit(lease, [answer(rows["a"])])
    result = cli("results", "@last")
    assert result.exit_code == exits.OK
    assert "2 rows are not done yet; --follow waits for them" in result.stderr

    look = Queue.results

    def look_and_work(self: Queue, batch_id: str, after: str, **options: int) -> object:
        """The worker goes on once the first results are out."""
        if after != "0-0":
            queue.commit(lease, [answer(rows["b"]), answer(rows["c"])])
        return look(self, batch_id, after, **options)

    monkeypatch.setattr(Queue, "results", look_and_work)
    followed = cli("results", "@last", "--follow")
    ids = [json.loads(text)["custom_id"] for text in followed.stdout.splitlines()]
    assert ids == ["a", "b", "c"]


def test_a_cancelled_batch_has_an_exit_code_of_its_own(
    cli: Cli, queue: Queue, source: Path
) -> None:
    batch = cli("submit", source, "-m", "demo").stdout.strip()
    queue.cancel(batch)
    result = cli("results", "@last")
    assert result.exit_code == exits.CANCELLED
    assert {json.loads(text)["error"]["code"] for text in result.stdout.splitlines()} == {
        "batch_cancelled"
    }


def test_a_queue_that_is_not_there(cli: Cli, source: Path) -> None:
    result = cli("--redis", "redis://127.0.0.1:1", "submit", source, "-m", "demo")
    assert (result.exit_code, result.stdout) == (exits.QUEUE_UNREACHABLE, "")
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_worker_hands_its_options_on(
    cli: Cli, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[WorkerSettings] = []

    def run_worker(settings: WorkerSettings) -> int:
        seen.append(settings)
        return exits.NOT_FOUND if settings.model else exits.OK

    monkeypatch.setattr(worker_main, "run_worker", run_worker)
    assert cli("worker").exit_code == exits.OK
    options: tuple[object, ...] = ("-m", "demo", "--draft", "none", "--lease-ttl", 9, "--burst")
    options += ("--max-batch", 2, "-q", "--cache-dir", "none")
    options += ("--only-when", "plugged,22:00-07:00")
    assert cli("worker", *options, "--spec", "off").exit_code == exits.NOT_FOUND
    cli("worker", "--cache-dir", tmp_path / "ssd", "--cache-size", "1.5G")
    first, second, third = seen
    assert third.cache_dir == str(tmp_path / "ssd")
    assert third.cache_bytes == 3 << 29
    costs, prefixes, pending = (
        str(tmp_path / "home" / name) for name in ("costs", "prefixes", "pending")
    )
    assert first == WorkerSettings(
        redis_url=valkey_url,
        cost_dir=costs,
        pending_dir=pending,
        only_when="cool,charged",
        cache_dir=prefixes,
    )
    assert second == WorkerSettings(
        redis_url=valkey_url,
        model=ModelRef(target="demo", draft="none"),
        lease_ttl_s=9.0,
        burst=True,
        max_batch=2,
        spec="off",
        cost_dir=costs,
        only_when="cool,charged,plugged,22:00-07:00",
        pending_dir=pending,
        log_level="WARNING",
    )
    assert cli("worker", "-m", "./nope").exit_code == exits.NOT_FOUND


def test_our_own_server_keeps_a_batch_between_commands(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_BATCH_REDIS", raising=False)
    home = ("--home", tmp_path / "home")
    result = invoke(*home, "submit", source, "-m", "demo")
    assert result.exit_code == exits.OK
    assert "keeps the batch on disk" in result.stderr
    report = json.loads(invoke("status", *home, "@last", "--json").stdout)
    assert (report["batch"], report["left"]) == (result.stdout.strip(), 3)
