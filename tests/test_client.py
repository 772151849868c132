"""`run` from end to end, with a fake decoder, real processes, and every one of them killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import client_tools
import pytest
import redis
from client_tools import Remember, engine_pid, lines_of, options, rows_of, worker_pid
from queue_tools import expected, until

from dflash_batch.worker.client import BatchBusy, Interrupted, RunOptions, run_batch
from dflash_batch.worker.contract import ErrorCode, Key, ModelRef
from dflash_batch.worker.follow import QueueLost
from dflash_batch.worker.private import ModelUnavailable, WorkerFailed
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.reader import LineError
from dflash_batch.worker.results import OutputTaken, Totals
from dflash_batch.worker.server import EmbeddedServer

SLOW = ("--step-s", "0.05")
ROWS = 60
NO_JSON = LineError(line=61, code=ErrorCode.INVALID_JSON_LINE, message="no JSON")


@pytest.fixture(autouse=True)
def _no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLASH_BATCH_REDIS", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where a run has its files; no server of its home is left running."""
    yield tmp_path
    for home in tmp_path.glob("home*"):
        pid = EmbeddedServer(home).pid()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        assert pid is None, "a server was left running"


@pytest.fixture
def client(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts clients in processes of their own; none of them outlives the test."""
    clients: list[subprocess.Popen[str]] = []

    def start(rows: int, *engine: str) -> subprocess.Popen[str]:
        given = {"folder": str(folder), "rows": rows, "engine": engine}
        clients.append(
            subprocess.Popen(
                [sys.executable, client_tools.__file__, json.dumps(given)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return clients[-1]

    yield start
    for process in clients:
        if process.returncode is None:
            process.kill()
            process.communicate()


def run(chosen: RunOptions, rows: int = ROWS, watch: Remember | None = None) -> Totals:
    return run_batch(rows_of(rows), [], chosen, watch or Remember())


def written(folder: Path) -> int:
    """Whole lines in the output file at this moment."""
    path = folder / "in.out.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_right(folder: Path, totals: Totals | dict[str, Any], rows: int = ROWS) -> None:
    """Each row is in the output once, with the text its prompt calls for."""
    lines = lines_of(folder / "in.out.jsonl")
    assert Counter(line["custom_id"] for line in lines) == Counter(f"q-{n}" for n in range(rows))
    texts = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert texts == {spec.custom_id: expected(spec) for spec in rows_of(rows)}
    figures = totals if isinstance(totals, dict) else totals.as_dict()
    assert (figures["requests"], figures["ok"], figures["failed"]) == (rows, rows, 0)
    assert figures["completion_tokens"] == 8 * rows
    assert figures["prompt_tokens"] == sum(len(f"user: question {n}") for n in range(rows))


def assert_clean(home: Path) -> None:
    """No server runs, and the queue has forgotten the batch."""
    assert EmbeddedServer(home).pid() is None
    assert list((home / "runs").iterdir()) == []
    with EmbeddedServer(home) as server, connect(server.url) as connection:
        left = {key.decode() for key in connection.scan_iter()}
    assert not {key for key in left if "batch_" in key}


def test_a_batch_runs_from_start_to_end(folder: Path) -> None:
    watch = Remember()
    totals = run(options(folder), watch=watch)
    assert_right(folder, totals)
    assert_clean(folder / "home")
    assert totals.output == str(folder / "in.out.jsonl")
    assert totals.errors is None
    assert not (folder / "in.errors.jsonl").exists()
    names = (
        "batch requests ok failed prompt_tokens prefill_tokens cached_tokens completion_tokens "
        "cycles draft_tokens accepted_tokens tokens_per_cycle elapsed_s output errors"
    )
    assert list(totals.as_dict()) == names.split(" ")
    phases = [text for text, _ in watch.phases]
    assert phases.index("starting the queue") < phases.index("queueing")
    assert phases.index("queueing") < phases.index("loading the model")
    assert ("queueing", 1.0) in watch.phases


def test_failed_and_rejected_lines_are_written_once_and_a_second_run_only_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(3)
    rows[1] = rows[1].model_copy(update={"messages": [{"role": "user", "content": "x" * 5000}]})
    first = run_batch(rows, [NO_JSON], options(folder), Remember())
    assert (first.requests, first.ok, first.failed) == (4, 2, 2)
    assert first.errors == str(folder / "in.errors.jsonl")
    rejected, failed = lines_of(folder / "in.errors.jsonl")
    assert rejected["line"] == 61
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"

    before = (folder / "in.errors.jsonl").read_bytes()
    monkeypatch.setattr(
        EmbeddedServer, "__enter__", lambda self: pytest.fail("the server was started")
    )
    assert run_batch(rows, [NO_JSON], options(folder), Remember()) == first
    assert (folder / "in.errors.jsonl").read_bytes() == before


def test_nothing_to_run_needs_no_server(folder: Path) -> None:
    totals = run_batch([], [NO_JSON], options(folder), Remember())
    assert (totals.requests, totals.failed, totals.tokens_per_cycle) == (1, 1, 0.0)
    assert [line["line"] for line in lines_of(folder / "in.errors.jsonl")] == [61]
    assert not (folder / "home" / "redis").exists()


def test_a_killed_worker_is_started_again_without_waiting_for_its_leases(folder: Path) -> None:
    home = folder / "home"
    watch = Remember(10, lambda: os.kill(worker_pid(home), signal.SIGKILL))
    totals = run(options(folder, *SLOW), watch=watch)  # leases last 45 s
    assert_right(folder, totals)
    assert_clean(home)
    assert any("SIGKILL" in note for note in watch.notes)
    assert totals.elapsed_s < 30


def test_a_killed_engine_is_started_again(folder: Path) -> None:
    home = folder / "home"
    watch = Remember(10, lambda: os.kill(engine_pid(home), signal.SIGKILL))
    assert_right(folder, run(options(folder, *SLOW), watch=watch))
    assert any("engine died" in note for note in watch.notes)


def test_a_killed_server_is_started_again(folder: Path) -> None:
    home = folder / "home"
    watch = Remember(10, lambda: os.kill(EmbeddedServer(home).pid() or 0, signal.SIGKILL))
    assert_right(folder, run(options(folder, *SLOW), watch=watch))
    assert_clean(home)


def test_rows_that_the_queue_lost_are_queued_again(folder: Path) -> None:
    def flush() -> None:
        with EmbeddedServer(folder / "home") as server, connect(server.url) as connection:
            connection.flushall()

    watch = Remember(10, flush)
    assert_right(folder, run(options(folder, *SLOW), watch=watch))
    assert any("lost the batch" in note for note in watch.notes)


def test_a_killed_client_leaves_a_run_that_the_same_command_finishes(
    folder: Path, client: Callable[..., subprocess.Popen[str]]
) -> None:
    first = client(ROWS, *SLOW)
    until(lambda: written(folder) >= 10, "some rows are written")
    first.kill()
    first.communicate()
    before = written(folder)
    assert before < ROWS
    with (folder / "in.out.jsonl").open("ab") as output:
        output.write(b'{"id":"batch_req_12')  # as if it had died in mid-write

    watch = Remember()
    totals = run(options(folder), watch=watch)
    assert_right(folder, totals)
    assert_clean(folder / "home")
    assert any("half-written" in note for note in watch.notes)


def test_everything_killed_at_once_is_survived(
    folder: Path, client: Callable[..., subprocess.Popen[str]]
) -> None:
    home = folder / "home"
    first = client(ROWS, *SLOW)
    until(lambda: written(folder) >= 10, "some rows are written")
    for pid in (worker_pid(home), EmbeddedServer(home).pid() or 0, first.pid):
        os.kill(pid, signal.SIGKILL)
    first.communicate()
    totals = run(options(folder))
    assert_right(folder, totals)
    assert_clean(home)
    assert totals.elapsed_s < 30


class Killed(BaseException):
    """Raised in place of a kill, at a point that a kill would hit too."""


@pytest.mark.parametrize("step", ["seal", "forget"])
def test_a_client_killed_while_it_uploads_or_cleans_up_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def stop(self: Queue, *args: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Queue, step, stop)
        with pytest.raises(Killed):
            run(options(folder))
    assert written(folder) == (ROWS if step == "forget" else 0)
    assert_right(folder, run(options(folder)))
    assert_clean(folder / "home")


def test_an_interrupted_run_keeps_what_it_has_and_goes_on_later(
    folder: Path, client: Callable[..., subprocess.Popen[str]]
) -> None:
    first = client(ROWS, "--step-s", "0.2")
    until(lambda: written(folder) >= 10, "some rows are written")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=20)
    assert first.returncode == 130
    assert EmbeddedServer(folder / "home").pid() is None
    before = lines_of(folder / "in.out.jsonl")
    assert 10 <= len(before) < ROWS

    totals = run(options(folder))
    assert_right(folder, totals)
    assert lines_of(folder / "in.out.jsonl")[: len(before)] == before
    assert_clean(folder / "home")


def test_new_starts_over_and_the_queue_forgets_the_run_that_is_replaced(folder: Path) -> None:
    watch = Remember(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted) as caught:
        run(options(folder, "--step-s", "0.3"), watch=watch)
    assert 5 <= caught.value.done < caught.value.total == ROWS
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    second = run(options(folder, new=True))
    assert second.batch != caught.value.batch
    assert_right(folder, second)
    assert run(options(folder)) == second
    with EmbeddedServer(folder / "home") as server, connect(server.url) as connection:
        assert Queue(connection).batches() == []


def test_only_rows_that_are_not_in_the_file_are_run_when_the_queue_is_new(folder: Path) -> None:
    run(options(folder))
    output = folder / "in.out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:50]))
    shutil.rmtree(folder / "home")

    seen = folder / "prompts"
    totals = run(options(folder, "--journal", str(seen)))
    assert_right(folder, totals)
    again = {json.loads(line)["custom_id"].replace("q-", "question ") for line in lines[50:]}
    assert {text.removeprefix("user: ") for text in seen.read_text().splitlines()} == again


def test_another_input_or_model_does_not_touch_the_files(folder: Path) -> None:
    run_batch([], [NO_JSON], options(folder), Remember())
    before = (folder / "in.errors.jsonl").read_bytes()
    other = ModelRef(target="fake", draft="auto")
    for chosen in (options(folder, digest="e" * 64), options(folder, model=other)):
        with pytest.raises(OutputTaken, match="--new"):
            run_batch([], [NO_JSON], chosen, Remember())
    assert (folder / "in.errors.jsonl").read_bytes() == before
    assert run_batch([], [NO_JSON], options(folder), Remember()).failed == 1


def test_two_files_run_at_once_on_one_home(folder: Path) -> None:
    found: dict[str, Totals] = {}

    def one(name: str) -> None:
        (folder / name).mkdir()
        files = {"output": folder / name / "in.out.jsonl", "errors": folder / name / "e.jsonl"}
        found[name] = run(options(folder, *SLOW, digest=name, **files))

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        assert_right(folder / name, found[name])
    assert_clean(folder / "home")


def test_one_batch_is_not_run_by_two_commands(folder: Path) -> None:
    other = options(folder, output=folder / "other.jsonl", errors=folder / "other.errors.jsonl")
    refused: list[str] = []

    def again() -> None:
        for chosen in (other, options(folder)):
            with pytest.raises((BatchBusy, OutputTaken)) as caught:
                run(chosen)
            refused.append(str(caught.value))

    assert_right(folder, run(options(folder, *SLOW), watch=Remember(5, again)))
    assert len(refused) == 2


def test_a_model_that_cannot_be_loaded_is_said_so_at_once(folder: Path) -> None:
    with pytest.raises(ModelUnavailable, match="there is no model fake"):
        run_batch(rows_of(ROWS), [NO_JSON], options(folder, "--no-model"), Remember())
    other = options(folder, "--no-model", model=ModelRef(target="absent"))
    with pytest.raises(ModelUnavailable, match="there is no model absent"):
        run_batch(rows_of(ROWS), [NO_JSON], other, Remember())


def test_a_worker_that_always_dies_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; print('out of luck', file=sys.stderr); sys.exit(9)"
    monkeypatch.setattr("dflash_batch.worker.private.COMMAND", (sys.executable, "-c", script))
    monkeypatch.setattr("dflash_batch.worker.private.LONGEST_PAUSE_S", 0.01)
    watch = Remember()
    with pytest.raises(WorkerFailed, match=r"exit code 9(.|\n)*out of luck"):
        run(options(folder), watch=watch)
    assert len(watch.notes) == 5


def test_a_given_server_is_used_and_not_stopped(
    folder: Path, valkey_url: str, redis_client: redis.Redis
) -> None:
    assert_right(folder, run(options(folder, redis=valkey_url)))
    assert not (folder / "home" / "redis").exists()
    assert not redis_client.exists(Key.BATCHES)


def test_another_reader_that_takes_results_away_is_found_out(
    folder: Path, valkey_url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queue, "results", lambda self, *args, **more: [])
    monkeypatch.setattr("dflash_batch.worker.client.FRUITLESS", 1)
    with pytest.raises(QueueLost, match="none came back"):
        run(options(folder, redis=valkey_url), rows=4)
