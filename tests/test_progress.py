"""What a watcher is told: counts of the whole batch, speeds of the last seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from client_tools import Remember

from dflash_batch.worker.progress import RATE_S, Reporter
from dflash_batch.worker.results import ResultFiles, Totals


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("dflash_batch.worker.progress.time", clock)
    return clock


def reporter(watch: Remember, rows: int = 100) -> tuple[Reporter, Any]:
    files = SimpleNamespace(written=set(), totals=Totals("b", "o", requests=rows))
    return Reporter(watch, cast(ResultFiles, files), rows, lambda: 7.0), files


def write(files: Any, rows: int, tokens: int = 10) -> None:
    """So many rows more are written."""
    for _ in range(rows):
        files.written.add(len(files.written))
        files.totals.ok += 1
        files.totals.completion_tokens += tokens


def test_speed_and_remaining_time_come_from_the_last_seconds(clock: Clock) -> None:
    watch = Remember()
    report, files = reporter(watch)
    write(files, 40)  # by an earlier run: they say nothing of the speed now
    report.running(0, 0.0)
    assert watch.progress[-1].eta_s is None
    for _ in range(10):
        clock.now += 2
        write(files, 2)
        report.running(8, 0.0)
    last = watch.progress[-1]
    assert (last.total, last.done, last.ok, last.running, last.elapsed_s) == (100, 60, 60, 8, 7.0)
    assert last.tokens_per_s == pytest.approx(10)
    assert last.eta_s == pytest.approx(40)


def test_rows_that_take_longer_than_the_window_still_give_a_speed(clock: Clock) -> None:
    watch = Remember()
    report, files = reporter(watch)
    for _ in range(3):
        report.running(1, 0.0)
        clock.now += 3 * RATE_S
        write(files, 1)
        report.running(1, 0.0)
        clock.now += 1
    assert watch.progress[-1].eta_s == pytest.approx(97 * 3 * RATE_S, rel=0.1)


def test_reports_are_not_more_than_a_few_a_second(clock: Clock) -> None:
    watch = Remember()
    report, _ = reporter(watch)
    for _ in range(100):
        report.running(0, 3.0)
        report.loading(0.5)
        clock.now += 0.01
    assert len(watch.progress) + len(watch.phases) <= 6
    assert watch.progress[0].tokens_per_s == 3.0
