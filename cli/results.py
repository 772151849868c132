"""`dflash-batch results`: the results of a queued batch, written out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, pass_common, talk
from dflash_batch.cli.queueing import find_batch, open_queue
from dflash_batch.worker.contract import BatchState, RowResult
from dflash_batch.worker.lines import is_error, output_line
from dflash_batch.worker.queue import Queue


@click.command("results")
@click.argument("batch", metavar="ID")
@click.option(
    "-o", "--output", default="-", metavar="FILE|-", help="Where to. [default: -, stdout]"
)
@click.option("--errors", metavar="FILE", help="Failed rows go there. [default: with the others]")
@click.option("--follow", is_flag=True, help="Wait for what is not done yet.")
@common_options
@pass_common
@click.pass_context
def command(
    ctx: click.Context, common: Common, batch: str, output: str, errors: str | None, follow: bool
) -> None:
    """Write the results of a batch, in the order in which rows were finished.

    ID may be shortened; @last is the newest batch. The queue keeps the results. Batches of `run`
    are not read here: their results are in its output file.

    \b
    Example: dflash-batch results @last -o results.jsonl --follow
    """
    with ExitStack() as stack:
        queue = stack.enter_context(open_queue(common))
        found = find_batch(queue, batch)
        target = _target(stack, output)
        failures = _target(stack, errors) if errors is not None else target
        written = _write(queue, found.batch.id, target, failures, follow=follow)
        status = queue.status(found.batch.id) or found
    missing = status.total - written.ok - written.failed
    if not common.quiet:
        talk(f"{status.batch.id}   {written.ok:,} ok   {written.failed:,} failed")
        if missing and not status.done:
            talk(f"  {missing:,} rows are not done yet; --follow waits for them")
        elif missing:
            talk(f"  {missing:,} rows are not in the queue any more: another command took them")
    if status.state is BatchState.CANCELLED:
        ctx.exit(exits.CANCELLED)
    ctx.exit(exits.SOME_FAILED if written.failed else exits.OK)


@dataclass
class Written:
    """Lines written so far."""

    ok: int = 0
    failed: int = 0


def _write(
    queue: Queue, batch_id: str, target: BinaryIO, failures: BinaryIO, *, follow: bool
) -> Written:
    written = Written()
    for result in _results(queue, batch_id, follow=follow):
        place = failures if is_error(result) else target
        place.write(output_line(result, batch_id).encode())
        if follow:
            place.flush()
        if result.ok:
            written.ok += 1
        else:
            written.failed += 1
    return written


def _results(queue: Queue, batch_id: str, *, follow: bool) -> Iterator[RowResult]:
    """Each row's record once; with `follow` until the batch is over. Acknowledges nothing."""
    seen: set[int] = set()
    after = "0-0"
    while True:
        # looked at before the results, so that none can come in between and be missed
        status = queue.status(batch_id)
        entries = queue.results(batch_id, after, block_ms=1000 if follow else 1)
        for stream_id, result in entries:
            after = stream_id
            if result.index not in seen:
                seen.add(result.index)
                yield result
        if not entries and (not follow or status is None or status.done):
            return


def _target(stack: ExitStack, name: str) -> BinaryIO:
    """The stream for a file that does not exist yet, or stdout. Raises click.UsageError."""
    if name == "-":
        return sys.stdout.buffer
    try:
        return stack.enter_context(Path(name).open("xb"))
    except FileExistsError:
        raise click.UsageError(f"{name} exists; name another file, or remove it") from None
    except OSError as error:
        raise click.UsageError(f"cannot write {name}: {error.strerror or error}") from error
