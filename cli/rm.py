"""`dflash-batch rm`: forget batches."""

from __future__ import annotations

import json

import click

from dflash_batch.cli.common import Common, common_options, pass_common, printable, talk
from dflash_batch.cli.intake import size_text
from dflash_batch.cli.queueing import find_batch, open_queue
from dflash_batch.worker.errors import UserError


class BatchUnfinished(UserError):
    """Raised when a batch is to be removed that is not over."""

    code = "batch_unfinished"


@click.command("rm")
@click.argument("batches", metavar="ID...", nargs=-1, required=True)
@click.option("--force", is_flag=True, help="Also batches that are not over; they are cancelled.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each batch.")
@common_options
@pass_common
def command(common: Common, batches: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove batches and their results from the queue.

    \b
    Example: dflash-batch rm @last
    """
    with open_queue(common) as queue:
        found = [find_batch(queue, name) for name in batches]
        for status in found:
            if not status.done and not force:
                raise BatchUnfinished(
                    f"{status.batch.id} is {status.state.value}, {status.left:,} rows are not "
                    "done; --force removes it all the same"
                )
        for status in found:
            size = queue.bytes_of(status.batch.id)
            queue.forget(status.batch.id)
            if as_json:
                click.echo(json.dumps({"batch": status.batch.id, "bytes": size}))
            elif not common.quiet:
                name = status.batch.name
                talk(printable(f"{status.batch.id}   removed, {size_text(size)}   {name}"))
