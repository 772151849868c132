"""Reading the input of a verb, and showing what is wrong with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from dflash_batch.cli.common import printable, talk
from dflash_batch.cli.screen import Screen
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.reader import LineError, Reading, read_lines
from dflash_batch.worker.spool import Spool

SHOWN = 50
"""Most problems printed; --json of `check` has them all."""

SKIP_HINT = "nothing was queued. skip them: --on-invalid skip"

STDIN = "-"


class InputNotFound(UserError):
    """Raised when the input file cannot be opened or read."""

    code = "file_not_found"


@dataclass(frozen=True)
class Intake:
    """An input that was read."""

    name: str  # for people
    path: Path | None  # None: stdin
    reading: Reading


def read_input(file: str, model: str | None, screen: Screen, spool: Spool | None = None) -> Intake:
    """Read `file` ("-": stdin) with progress, into memory or a spool.

    Raises InputNotFound, InputError and SpoolFailed.
    """
    name = label(file)
    with _opened(file) as stream:
        size = None if file == STDIN else os.fstat(stream.fileno()).st_size

        def progress(done: int) -> None:
            screen.on_phase("reading", None if size is None else done / max(1, size))

        try:
            reading = read_lines(stream, default_model=model, spool=spool, progress=progress)
        except OSError as error:
            raise InputNotFound(f"cannot read {file}: {error.strerror or error}") from error
    return Intake(name, None if file == STDIN else Path(file), reading)


def label(file: str) -> str:
    """An input's name for people."""
    return "stdin" if file == STDIN else os.path.basename(file)


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == STDIN:
        yield sys.stdin.buffer
        return
    try:
        stream = open(file, "rb")  # noqa: SIM115  closed below
    except OSError as error:
        raise InputNotFound(f"cannot open {file}: {error.strerror or error}") from error
    with stream:
        yield stream


def problem_lines(name: str, errors: Sequence[LineError], requests: int) -> Iterator[str]:
    """The screen for bad lines: a headline, then one line each, aligned."""
    yield f"{printable(name)}: {plural(len(errors), 'problem')} in {plural(requests, 'line')}"
    shown = errors[:SHOWN]
    numbers = max((len(str(error.line)) for error in shown), default=0) + 2
    codes = max((len(error.code.value) for error in shown), default=0) + 3
    for error in shown:
        text = printable(error.message)
        text = text if len(text) <= 300 else text[:299] + "…"
        yield f"  line {error.line:<{numbers}}{error.code.value:<{codes}}{text}"
    if len(errors) > SHOWN:
        yield f"  and {len(errors) - SHOWN:,} more: check --json lists all"


def show_problems(intake: Intake) -> None:
    """Bad lines, on stderr."""
    for line in problem_lines(intake.name, intake.reading.errors, intake.reading.requests):
        talk(line)


def show_warnings(warnings: Iterable[str]) -> None:
    """One line a warning, on stderr."""
    for warning in warnings:
        talk(f"  {click.style('warning', fg='yellow')}  {printable(warning)}")


def plural(count: int, noun: str) -> str:
    """1 line, 1,319 lines."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def size_text(size: int) -> str:
    """Bytes for people: 812 B, 6.1 MB."""
    amount, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{size:,} B" if unit == "B" else f"{amount:.1f} {unit}"
