"""`dflash-batch pause`, `resume`, `cancel`, `priority`, `drain`: what happens next, and to whom."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import click

from dflash_batch.cli.common import Common, common_options, pass_common, printable, talk
from dflash_batch.cli.queueing import find_batch, find_worker, open_queue
from dflash_batch.cli.status import batch_report
from dflash_batch.worker.contract import TOP_PRIORITY, BatchState, BatchStatus
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.queue import Queue

ids_argument = click.argument("batches", metavar="ID...", nargs=-1, required=True)
maybe_ids_argument = click.argument("batches", metavar="[ID...]", nargs=-1)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object for each.")
queue_option = click.option(
    "--queue", "whole", is_flag=True, help="The whole queue: no worker is given anything."
)


class BatchOver(UserError):
    """Raised when a batch is over, or on its way there, and what is asked of it has no meaning."""

    code = "batch_over"


@click.command("pause")
@maybe_ids_argument
@queue_option
@json_option
@common_options
@pass_common
def pause(common: Common, batches: tuple[str, ...], whole: bool, as_json: bool) -> None:
    """Give out no more rows of batches; those in workers' hands are finished.

    \b
    Example: dflash-batch pause @last
    """
    _switch(common, batches, whole, as_json, paused=True)


@click.command("resume")
@maybe_ids_argument
@queue_option
@json_option
@common_options
@pass_common
def resume(common: Common, batches: tuple[str, ...], whole: bool, as_json: bool) -> None:
    """Go on with paused batches.

    \b
    Example: dflash-batch resume @last
    """
    _switch(common, batches, whole, as_json, paused=False)


@click.command("cancel")
@ids_argument
@json_option
@common_options
@pass_common
def cancel(common: Common, batches: tuple[str, ...], as_json: bool) -> None:
    """End batches now; what is done stays and can be fetched with results.

    Rows that are not done get an error line with the code batch_cancelled.

    \b
    Example: dflash-batch cancel @last
    """
    with open_queue(common) as queue:
        for status in _found(queue, batches):
            if not queue.cancel(status.batch.id):
                _expect(queue, status, BatchState.CANCELLED)
            _tell(common, queue, status, "cancelled", as_json)


@click.command("priority", context_settings={"ignore_unknown_options": True})
@click.argument("batch", metavar="ID")
@click.argument("priority", type=click.IntRange(-TOP_PRIORITY, TOP_PRIORITY), metavar="N")
@click.option(
    "--weight",
    type=click.FloatRange(min=0, min_open=True),
    metavar="W",
    help="Its share of the rows among batches of the same priority.",
)
@json_option
@common_options
@pass_common
def priority(
    common: Common, batch: str, priority: int, weight: float | None, as_json: bool
) -> None:
    """Set the priority of a batch, -10 to 10. A higher one goes first; 0 is usual.

    A batch that gets no row for half an hour rises by one until it does.

    \b
    Example: dflash-batch priority @last 5
    """
    with open_queue(common) as queue:
        (status,) = _found(queue, (batch,))
        if not queue.set_priority(status.batch.id, priority, weight):
            raise BatchOver(f"{status.batch.id} is {status.state.value}: nothing is left to do")
        _tell(common, queue, status, f"priority {priority}", as_json)


@click.command("drain")
@click.argument("workers", metavar="[WORKER...]", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All workers of the queue.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Give back what is not finished by then. [default: finish everything]",
)
@json_option
@common_options
@pass_common
def drain(
    common: Common, workers: tuple[str, ...], every: bool, grace: float | None, as_json: bool
) -> None:
    """Have workers finish what they hold, take nothing new, and end.

    WORKER is a name that worker ls shows; it may be shortened.

    \b
    Example: dflash-batch drain studio-0123ab
    """
    _one_or_other(workers, every, "a worker", "--all")
    with open_queue(common) as queue:
        known = queue.workers()
        names = known if every else [find_worker(known, name) for name in workers]
        for info in names:
            queue.drain(info.name, math.inf if grace is None else grace)
            if as_json:
                click.echo(json.dumps({"worker": info.name, "grace_s": grace}))
            elif not common.quiet:
                talk(printable(f"{info.name}   finishes what it holds and ends"))


def _found(queue: Queue, names: tuple[str, ...]) -> Iterator[BatchStatus]:
    """The batches of these names: all must be known before anything is done to the first."""
    yield from [find_batch(queue, name) for name in names]


def _expect(queue: Queue, before: BatchStatus, state: BatchState) -> None:
    """It is in the state already, or cannot get there."""
    status = queue.status(before.batch.id)
    if status is None or status.state is not state:
        word = "gone" if status is None else status.state.value
        raise BatchOver(f"{before.batch.id} is {word} and cannot be {state.value}")


def _tell(common: Common, queue: Queue, before: BatchStatus, word: str, as_json: bool) -> None:
    if as_json:
        now = queue.status(before.batch.id) or before
        click.echo(json.dumps(batch_report(now), ensure_ascii=False))
    elif not common.quiet:
        talk(printable(f"{before.batch.id}   {word}   {before.batch.name}"))


def _tell_queue(common: Common, as_json: bool, *, paused: bool) -> None:
    if as_json:
        click.echo(json.dumps({"queue_paused": paused}))
    elif not common.quiet:
        talk("the queue is paused" if paused else "the queue goes on")


def _switch(
    common: Common, batches: tuple[str, ...], whole: bool, as_json: bool, *, paused: bool
) -> None:
    """Pause or resume the whole queue, or batches."""
    _one_or_other(batches, whole)
    state = BatchState.PAUSED if paused else BatchState.RUNNING
    with open_queue(common) as queue:
        if whole:
            queue.pause_all() if paused else queue.resume_all()
            _tell_queue(common, as_json, paused=paused)
        for status in _found(queue, batches):
            batch = status.batch.id
            if not (queue.pause(batch) if paused else queue.resume(batch)):
                _expect(queue, status, state)
            _tell(common, queue, status, state.value, as_json)


def _one_or_other(
    names: tuple[str, ...], flag: bool, noun: str = "a batch", option: str = "--queue"
) -> None:
    if bool(names) == flag:
        raise click.UsageError(f"name {noun}, or give {option}")
