"""Results on disk: whole lines, each row once, totals that do not depend on interruptions."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from client_tools import lines_of
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_tools import MODEL, row

from dflash_batch.worker.contract import ErrorCode, RowResult, RowStatus
from dflash_batch.worker.queue import Queue
from dflash_batch.worker.reader import LineError
from dflash_batch.worker.results import (
    OutputFailed,
    OutputTaken,
    ResultFiles,
    Tail,
    Totals,
)
from dflash_batch.worker.submit import submit

BATCH = "batch_a"
REJECTED = [
    LineError(line=3, code=ErrorCode.INVALID_JSON_LINE, message="ends inside a string"),
    LineError(
        line=9, code=ErrorCode.DUPLICATE_CUSTOM_ID, message="first on line 1", custom_id="q-0"
    ),
]


def answer(index: int, tokens: int = 5) -> RowResult:
    """A row that was answered, with a text that has line ends in it."""
    return RowResult(
        index=index,
        custom_id=f"q-{index}",
        status=RowStatus.OK,
        response={
            "status_code": 200,
            "request_id": "req_1",
            "body": {
                "choices": [{"index": 0, "message": {"content": f"one\ntwo\u2028{index}"}}],
                "usage": {"prompt_tokens": 10, "completion_tokens": tokens},
                "dflash": {
                    "cycles": 2,
                    "prefill_tokens": 4,
                    "cached_tokens": 6,
                    "draft_tokens": 30,
                    "accepted_tokens": 3,
                },
            },
        },
    )


def failure(index: int) -> RowResult:
    return RowResult(
        index=index,
        custom_id=f"q-{index}",
        status=RowStatus.ERROR,
        response={
            "status_code": 400,
            "request_id": "req_1",
            "body": {"error": {"code": "context_length_exceeded", "message": "too long"}},
        },
    )


def result(index: int) -> RowResult:
    return failure(index) if index % 4 == 3 else answer(index)


def open_files(
    folder: Path, rows: int = 12, rejected: Sequence[LineError] = REJECTED, **more: Any
) -> ResultFiles:
    return ResultFiles(
        folder / "out.jsonl",
        folder / "errors.jsonl",
        batch_id=BATCH,
        rows={f"q-{index}": index for index in range(rows)},
        rejected=rejected,
        **more,
    )


def assert_complete(folder: Path, totals: Totals, rows: int = 12) -> None:
    """Every row and every rejected line is in the files once, and the totals say so."""
    output, errors = lines_of(folder / "out.jsonl"), lines_of(folder / "errors.jsonl")
    ids = Counter(line["custom_id"] for line in output + errors if "line" not in line)
    assert ids == Counter(f"q-{index}" for index in range(rows))
    assert sorted(line["line"] for line in errors if "line" in line) == [3, 9]
    assert all(line["response"]["status_code"] == 200 for line in output)
    failed = rows // 4
    ok = rows - failed
    assert (totals.requests, totals.ok, totals.failed) == (rows + 2, ok, failed + 2)
    assert (totals.prompt_tokens, totals.completion_tokens) == (10 * ok, 5 * ok)
    assert (totals.prefill_tokens, totals.cached_tokens) == (4 * ok, 6 * ok)
    assert (totals.cycles, totals.draft_tokens, totals.accepted_tokens) == (2 * ok, 30 * ok, 3 * ok)
    assert totals.tokens_per_cycle == (5 - 1) / 2


def test_results_go_to_two_files_and_are_counted(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        assert files.write([result(index) for index in range(12)]) == 12
        files.sync()
    assert_complete(tmp_path, files.totals)
    assert files.totals.errors == str(tmp_path / "errors.jsonl")


def test_a_second_opening_finds_the_same_totals_and_changes_nothing(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.write([result(index) for index in range(12)])
    before = [(tmp_path / name).read_bytes() for name in ("out.jsonl", "errors.jsonl")]
    with open_files(tmp_path) as again:
        assert again.totals == files.totals
        assert again.write([result(index) for index in range(12)]) == 0
    assert [(tmp_path / name).read_bytes() for name in ("out.jsonl", "errors.jsonl")] == before


def test_records_delivered_twice_give_one_line_the_first(tmp_path: Path) -> None:
    with open_files(tmp_path, rejected=()) as files:
        assert files.write([answer(0, tokens=5), answer(1), answer(0, tokens=7)]) == 2
        assert files.write([answer(1), answer(2)]) == 1
    usage = [line["response"]["body"]["usage"] for line in lines_of(tmp_path / "out.jsonl")]
    assert [found["completion_tokens"] for found in usage] == [5, 5, 5]


def test_rows_of_another_batch_are_not_written(tmp_path: Path) -> None:
    with open_files(tmp_path, rows=2, rejected=()) as files:
        assert files.write([answer(0), answer(7)]) == 1


def test_no_error_file_is_made_while_nothing_fails(tmp_path: Path) -> None:
    with open_files(tmp_path, rejected=()) as files:
        files.write([answer(0)])
        files.sync()
    assert files.totals.errors is None
    assert not (tmp_path / "errors.jsonl").exists()


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["out.jsonl", "errors.jsonl"]), st.data())
def test_a_file_cut_anywhere_is_repaired(name: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        with open_files(folder) as files:
            files.write([result(index) for index in range(12)])
        whole = (folder / name).read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        zeros = data.draw(st.integers(0, 3))
        (folder / name).write_bytes(whole[:cut] + b"\0" * zeros)

        with open_files(folder) as again:
            kept = whole[:cut].rfind(b"\n") + 1
            assert (folder / name).read_bytes()[:kept] == whole[:kept]
            again.write([result(index) for index in range(12)])
            again.sync()
        assert_complete(folder, again.totals)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_hole_that_a_power_failure_left_is_taken_out(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        with open_files(folder) as files:
            files.write([result(index) for index in range(12)])
        whole = (folder / "out.jsonl").read_bytes()
        begin = data.draw(st.integers(0, len(whole) - 1))
        end = data.draw(st.integers(begin, len(whole)))
        (folder / "out.jsonl").write_bytes(whole[:begin] + b"\0" * (end - begin) + whole[end:])

        with open_files(folder) as again:
            again.write([result(index) for index in range(12)])
            again.sync()
        assert_complete(folder, again.totals)
        assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n",
        b'{"custom_id": "q-0"}\n',
        b'{"id":"batch_req_000000000000000000000000","custom_id":"q-0","response":null}\nx\n',
        b"a",
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("name", ["out.jsonl", "errors.jsonl"])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OutputTaken, match="--new"):
        open_files(tmp_path)
    assert (tmp_path / name).read_bytes() == content


def test_a_file_of_another_batch_is_left_alone(tmp_path: Path) -> None:
    with open_files(tmp_path) as files:
        files.write([answer(0)])
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(OutputTaken, match="batch_b"):
        ResultFiles(
            tmp_path / "out.jsonl", tmp_path / "errors.jsonl", batch_id="batch_b", rows={"q-0": 0}
        )
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_fresh_throws_away_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("my notes\n")
    (tmp_path / "errors.jsonl").write_text("more notes\n")
    with open_files(tmp_path, fresh=True) as files:
        files.write([result(index) for index in range(12)])
    assert_complete(tmp_path, files.totals)


def test_empty_files_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").touch()
    with open_files(tmp_path) as files:
        files.write([result(index) for index in range(6)])
    with (tmp_path / "out.jsonl").open("ab") as file:
        file.write(b"\n")
    with open_files(tmp_path) as files:
        assert len(files.written) == 6


def test_two_commands_cannot_write_one_file(tmp_path: Path) -> None:
    with open_files(tmp_path), pytest.raises(OutputTaken, match="another command"):
        open_files(tmp_path)
    open_files(tmp_path).close()


def test_places_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for output, errors, trouble in [
        ("out.jsonl", "out.jsonl", OutputTaken),
        ("folder", "errors.jsonl", OutputTaken),
        ("out.jsonl", "folder", OutputTaken),
        ("absent/out.jsonl", "errors.jsonl", OutputFailed),
    ]:
        with pytest.raises(trouble):
            ResultFiles(tmp_path / output, tmp_path / errors, batch_id=BATCH, rows={})
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


class FullDisk:
    """Takes `room` bytes, then refuses as a full disk does."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.write_there = os.write

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.write_there(descriptor, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("room", [0, 1, 400, 700, 2000])
def test_a_full_disk_keeps_whole_lines_and_acknowledges_nothing_else(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    fill(queue, 12)
    with open_files(tmp_path) as files:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", FullDisk(room).write)
            tail = Tail(queue, BATCH, files, "0-0")
            with pytest.raises(OutputFailed, match="No space left"):
                tail.pull(0)
        lines_of(tmp_path / "out.jsonl")
        status = queue.status(BATCH)
        assert status is not None
        assert status.exported == "0-0"
        assert len(queue.results(BATCH, "0-0", block_ms=0)) == 12
    with open_files(tmp_path) as again:
        tail = Tail(queue, BATCH, again, "0-0")
        tail.pull(0)
        tail.settle()
    assert_complete(tmp_path, again.totals)


def test_a_disk_that_cannot_sync_acknowledges_nothing(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    fill(queue, 12)
    with open_files(tmp_path) as files:
        tail = Tail(queue, BATCH, files, "0-0")
        tail.pull(0)
        monkeypatch.setattr("dflash_batch.worker.appender._to_disk", fails)
        with pytest.raises(OutputFailed):
            tail.settle()
    assert len(queue.results(BATCH, "0-0", block_ms=0)) == 12


def test_the_stream_is_acknowledged_once_it_is_on_disk(queue: Queue, tmp_path: Path) -> None:
    fill(queue, 12)
    with open_files(tmp_path) as files:
        tail = Tail(queue, BATCH, files, "0-0")
        assert tail.pull(0) == 12
        tail.settle()
        assert queue.results(BATCH, "0-0", block_ms=0) == []
        status = queue.status(BATCH)
        assert status is not None
        tail = Tail(queue, BATCH, files, status.exported)
        assert tail.pull(0) == 0


def test_many_rows_are_synced_on_the_way(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_batch.worker.results.SYNC_ROWS", 4)
    fill(queue, 12)
    with open_files(tmp_path) as files:
        assert Tail(queue, BATCH, files, "0-0").pull(0) == 12
    assert queue.results(BATCH, "0-0", block_ms=0) == []


def fill(queue: Queue, rows: int) -> None:
    """A batch whose rows are all recorded."""
    submit(queue, [row(index) for index in range(rows)], MODEL, batch_id=BATCH, name="in.jsonl")
    for lease in queue.lease("w", MODEL.key, 10_000, 100):
        queue.commit(lease, [result(spec.index) for spec in lease.shard.rows])
