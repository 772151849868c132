"""The pipe between supervisor and engine, and the engine behind it."""

from __future__ import annotations

import argparse
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fake_engine import FakeDecoder
from queue_tools import MODEL, row, until

from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.types import LoadSpec, Progress
from dflash_batch.worker.engine import EXIT_FAILED, serve
from dflash_batch.worker.pipe import (
    Admit,
    Beat,
    Bye,
    Drop,
    EngineEnd,
    Failed,
    Hold,
    Load,
    Loading,
    Narrow,
    Ready,
    Report,
    RowDone,
    Stop,
    SupervisorEnd,
)

LOAD = Load(model=MODEL, worker="w", max_batch=4)


def fake(spec: LoadSpec, progress: Progress) -> FakeDecoder:
    progress("weights", None)
    options = argparse.Namespace(
        step_s=0.0,
        seed=0,
        crash="",
        hang="",
        seize="",
        fail="fail",
        once="",
        journal="",
        wide=0,
        leak=0,
    )
    return FakeDecoder(spec, options)


def no_model(spec: LoadSpec, progress: Progress) -> FakeDecoder:
    raise LoadError("not there", code="model_not_found")


class Served:
    """An engine in a thread, and what it has said."""

    def __init__(self, end: SupervisorEnd) -> None:
        self.end = end
        self.reports: list[Report] = []
        self.status: int | None = None

    def hear(self) -> list[Report]:
        select.select([self.end], [self.end] if self.end.has_unsent else [], [], 0.02)
        self.end.flush()
        self.reports += self.end.receive()
        return self.reports

    def until(self, kind: type[Report], count: int = 1) -> None:
        until(
            lambda: sum(isinstance(report, kind) for report in self.hear()) >= count,
            f"{count} {kind.__name__}",
        )


@contextmanager
def served(load=fake) -> Iterator[Served]:  # type: ignore[no-untyped-def]
    ours, theirs = socket.socketpair()
    ended = threading.Event()
    engine = Served(SupervisorEnd(ours))

    def run() -> None:
        engine.status = serve(EngineEnd(theirs, on_eof=ended.set), load)

    thread = threading.Thread(target=run)
    thread.start()
    yield engine
    engine.end.send(Stop())
    thread.join(10)
    assert not thread.is_alive()
    engine.end.close()
    assert ended.wait(10), "the engine sees the end of its supervisor"
    theirs.close()


def test_an_engine_loads_runs_rows_and_stops() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.until(Ready)
        engine.end.send(Admit(shard_id="s", epoch=3, rows=[row(i) for i in range(9)]))
        engine.until(RowDone, 9)
        engine.end.send(Stop())
        engine.until(Bye)
    kinds = [type(report) for report in engine.reports]
    assert kinds[:2] == [Loading, Ready]
    ended = [report for report in engine.reports if isinstance(report, RowDone)]
    assert {(report.shard_id, report.epoch) for report in ended} == {("s", 3)}
    assert sorted(report.result.index for report in ended) == list(range(9))
    assert engine.status == 0


def test_an_engine_beats_while_it_is_idle() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.until(Beat)
    (beat, *_) = [report for report in engine.reports if isinstance(report, Beat)]
    assert (beat.waiting, beat.active) == (0, 0)


def test_dropped_rows_are_not_reported() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.end.send(Admit(shard_id="a", epoch=1, rows=[row(i) for i in range(500)]))
        engine.end.send(Drop(shard_id="a"))
        engine.end.send(Admit(shard_id="b", epoch=1, rows=[row(0)]))
        until(
            lambda: any(
                isinstance(report, RowDone) and report.shard_id == "b" for report in engine.hear()
            ),
            "the row that was not dropped ends",
        )
    assert sum(isinstance(report, RowDone) for report in engine.reports) < 500


def test_an_engine_that_is_held_keeps_its_rows_and_beats_and_goes_on() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.end.send(Hold(on=True))
        engine.end.send(Admit(shard_id="s", epoch=1, rows=[row(i) for i in range(9)]))
        engine.until(Beat, 2)
        beat = [report for report in engine.reports if isinstance(report, Beat)][-1]
        assert (beat.steps, beat.waiting) == (0, 9)
        assert not [report for report in engine.reports if isinstance(report, RowDone)]
        engine.end.send(Hold(on=False))
        engine.until(RowDone, 9)


def test_an_engine_that_is_narrowed_takes_fewer_rows_in() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.end.send(Narrow(rows=1))
        engine.end.send(Admit(shard_id="s", epoch=1, rows=[row(i) for i in range(6)]))
        engine.until(RowDone, 6)
    widths = {r.result.metrics.batch_width for r in engine.reports if isinstance(r, RowDone)}
    assert widths == {1}


def test_a_model_that_cannot_be_loaded_is_reported_and_ends_the_engine() -> None:
    with served(no_model) as engine:
        engine.end.send(LOAD)
        engine.until(Failed)
    assert engine.reports == [Failed(code="model_not_found", message="not there")]
    assert engine.status == EXIT_FAILED


def test_a_fault_in_one_prompt_fails_its_row_alone() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.end.send(Admit(shard_id="s", epoch=1, rows=[row(0, "explode"), row(1)]))
        engine.until(RowDone, 2)
    ended = {r.result.index: r.result for r in engine.reports if isinstance(r, RowDone)}
    assert ended[0].code == "internal_error"
    assert ended[1].ok


def test_a_row_whose_numbers_fail_ends_once_and_alone() -> None:
    """Its other choices are taken out of the decoder with it."""
    with served() as engine:
        engine.end.send(LOAD)
        rows = [row(0, "overflow").model_copy(update={"n": 6}), row(1)]
        engine.end.send(Admit(shard_id="s", epoch=1, rows=rows))
        engine.until(RowDone, 2)
        engine.end.send(Admit(shard_id="t", epoch=1, rows=[row(2)]))
        engine.until(RowDone, 3)
    done = [report for report in engine.reports if isinstance(report, RowDone)]
    codes = sorted((report.shard_id, report.result.index, report.result.code) for report in done)
    assert codes == [("s", 0, "numerical_error"), ("s", 1, None), ("t", 2, None)]


def test_an_error_in_a_step_is_reported_and_ends_the_engine() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        engine.end.send(Admit(shard_id="s", epoch=1, rows=[row(0, "fail")]))
        engine.until(Failed)
    (failed,) = [report for report in engine.reports if isinstance(report, Failed)]
    assert failed.code == "internal_error"
    assert "RuntimeError" in failed.message
    assert engine.status == EXIT_FAILED


def test_the_supervisor_is_not_held_up_by_an_engine_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    end = SupervisorEnd(ours)
    admit = Admit(shard_id="s", epoch=1, rows=[row(0, "x" * 100_000)])
    began = time.monotonic()
    for _ in range(50):
        end.send(admit)
    assert time.monotonic() - began < 5
    assert end.has_unsent
    engine = EngineEnd(theirs, on_eof=lambda: None)
    received: list[object] = []

    def all_read() -> bool:
        end.flush()
        received.extend(engine.take(0.01))
        return len(received) == 50

    until(all_read, "everything has come over")
    assert received == [admit] * 50
    end.close()
    theirs.close()


def test_text_of_any_kind_comes_over_whole() -> None:
    with served() as engine:
        engine.end.send(LOAD)
        odd = 'a\nb\r\n\u2028\u0000"\\ \U0001f600'
        engine.end.send(Admit(shard_id="s", epoch=1, rows=[row(0, odd)]))
        engine.until(RowDone)


def test_the_end_of_the_engine_is_seen() -> None:
    ours, theirs = socket.socketpair()
    end = SupervisorEnd(ours)
    theirs.close()
    assert end.receive() == []
    assert end.closed
    end.send(Stop())
    end.close()
