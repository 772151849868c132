"""Progress: whole plain lines in a log, a picture on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import os
import pty
import re
import sys

import pytest

from dflash_batch.cli.common import Common
from dflash_batch.cli.screen import (
    LiveScreen,
    PlainScreen,
    Screen,
    SilentScreen,
    open_screen,
    progress_line,
)
from dflash_batch.worker.progress import Progress


def at(done: int, total: int = 1319, eta_s: float | None = 5000.0) -> Progress:
    return Progress(
        total=total,
        done=done,
        ok=done - 1 if done else 0,
        failed=min(done, 1),
        running=24,
        completion_tokens=done * 10,
        tokens_per_s=1912.4,
        tokens_per_cycle=5.2,
        cached_share=0.93,
        elapsed_s=60.0,
        eta_s=eta_s,
    )


def test_a_plain_line_says_where_the_run_stands() -> None:
    text = progress_line(at(648))
    assert re.fullmatch(r"648/1319 49% ok=647 failed=1 1912tok/s eta=\d\d:\d\d", text)


@pytest.mark.parametrize(
    ("done", "eta_s", "shape"),
    [
        (3, 100.0, "measuring"),
        (648, None, "measuring"),
        (648, 100.0, r"\d\d:\d\d:\d\d"),
        (648, 200_000.0, r"\d\d \w+ \d\d:\d\d"),
    ],
)
def test_the_time_left_is_shown_when_it_is_known(
    done: int, eta_s: float | None, shape: str
) -> None:
    assert re.search(rf"eta={shape}$", progress_line(at(done, eta_s=eta_s)))


def test_plain_lines_come_at_each_twentieth(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen("gsm8k.jsonl")
    screen.on_phase("loading the model", None)
    screen.on_phase("loading the model", None)
    screen.on_phase("queueing", 0.1)  # short: not worth a line
    for done in range(1001):
        screen.on_progress(at(done, total=1000))
    screen.on_note("a worker\rdied")
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert "\r" not in shown.err
    assert len(lines) == 1 + 21 + 1
    assert all(re.match(r"\d\d:\d\d:\d\d gsm8k\.jsonl ", text) for text in lines)
    assert lines[0].endswith("loading the model")
    assert " 0/1000 0% " in lines[1]
    assert " 1000/1000 100% " in lines[-2]
    assert screen.rows_ran


def test_plain_lines_come_at_least_once_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr("dflash_batch.cli.screen.time.monotonic", lambda: clock)
    screen = PlainScreen("x")
    for _ in range(5):
        screen.on_progress(at(1))
        clock += 30.0
    screen.on_phase("queueing", 0.1)
    clock += 2.0
    screen.on_phase("queueing", 0.2)
    screen.on_phase("queueing", 0.3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[-1].endswith("x queueing")


def test_the_screen_fits_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_screen(Common(quiet=True), "x") as silent:
        assert isinstance(silent, SilentScreen)
        silent.on_progress(at(1))
    with open_screen(Common(), "x") as plain:
        assert isinstance(plain, PlainScreen)
    assert "\n" in progress_on_a_terminal(monkeypatch)


def progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a terminal gets from a short run."""
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = pty.openpty()
    try:
        with (
            io.TextIOWrapper(os.fdopen(follower, "wb", 0), write_through=True) as terminal,
            monkeypatch.context() as patch,
        ):
            patch.setattr(sys, "stderr", terminal)
            with open_screen(Common(no_color=True), "x") as screen:
                assert isinstance(screen, LiveScreen)
                show(screen)
        return os.read(leader, 1 << 16).decode()
    finally:
        os.close(leader)


def show(screen: Screen) -> None:
    screen.on_phase("loading", 0.5)
    screen.on_note("a \x1b[31mnote")
    screen.on_progress(at(648))
    assert screen.rows_ran


def test_a_terminal_gets_bar_counts_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    text = progress_on_a_terminal(monkeypatch)
    assert "648/1,319" in text
    assert "1,912 tok/s  prefix hit 93%  5.2 tokens/cycle  ETA" in text
    assert "a \\u001b[31mnote" in text
