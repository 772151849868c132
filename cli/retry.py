"""`dflash-batch retry`: the failed rows of a batch once more."""

from __future__ import annotations

import json
import uuid

import click

from dflash_batch.cli.common import Common, common_options, pass_common, talk
from dflash_batch.cli.intake import plural
from dflash_batch.cli.queueing import find_batch, open_queue
from dflash_batch.cli.rm import BatchUnfinished
from dflash_batch.worker.contract import ErrorCode
from dflash_batch.worker.submit import retry


@click.command("retry")
@click.argument("batch", metavar="ID")
@click.option(
    "--only",
    "codes",
    type=click.Choice([code.value for code in ErrorCode]),
    multiple=True,
    metavar="CODE",
    help="Only rows that failed with this code; may be repeated.",
)
@click.option("--new", is_flag=True, help="Once more, though they were tried again before.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the id.")
@common_options
@pass_common
def command(common: Common, batch: str, codes: tuple[str, ...], new: bool, as_json: bool) -> None:
    """Queue the rows of a batch that failed as a new batch, and print its id.

    The records of the old batch stay. Doing it twice is harmless: it is the same new batch. Rows
    that were cancelled did not fail; submit --new queues them.

    \b
    Example: dflash-batch retry @last --only out_of_memory
    """
    with open_queue(common) as queue:
        status = find_batch(queue, batch)
        if not status.done:
            raise BatchUnfinished(f"{status.batch.id} is {status.state.value}; wait for its end")
        again = retry(queue, status, codes, salt=uuid.uuid4().hex if new else "")
    if again is None:
        if not common.quiet:
            talk(f"{status.batch.id}   no such failed row: nothing to retry")
    elif not common.quiet:
        talk(f"{again.batch.id}   {plural(again.total, 'request')} queued again")
    if as_json:
        report = {
            "batch": again.batch.id if again else None,
            "requests": again.total if again else 0,
            "retries": status.batch.id,
        }
        click.echo(json.dumps(report))
    elif again is not None:
        click.echo(again.batch.id)
