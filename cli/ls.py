"""`dflash-batch ls`: the batches of the queue."""

from __future__ import annotations

import json

import click

from dflash_batch.cli.common import Common, common_options, pass_common
from dflash_batch.cli.queueing import open_queue
from dflash_batch.cli.status import batch_line, batch_report
from dflash_batch.worker.contract import BatchState


@click.command("ls")
@click.option(
    "--state",
    "states",
    type=click.Choice([state.value for state in BatchState]),
    multiple=True,
    help="Only batches in this state; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each batch.")
@common_options
@pass_common
def command(common: Common, states: tuple[str, ...], as_json: bool) -> None:
    """List the batches of the queue, newest first.

    \b
    Example: dflash-batch ls --state running --state paused
    """
    with open_queue(common) as queue:
        batches = queue.batches()
    for status in batches:
        if not states or status.state.value in states:
            if as_json:
                click.echo(json.dumps(batch_report(status), ensure_ascii=False))
            else:
                click.echo(batch_line(status))
