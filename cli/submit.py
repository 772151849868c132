"""`dflash-batch submit`: a batch file into the queue."""

from __future__ import annotations

import json
import uuid

import click

from dflash_batch.cli.common import Common, common_options, pass_common, talk
from dflash_batch.cli.intake import label, plural, read_input
from dflash_batch.cli.models import draft_options, model_option, model_ref, named_model
from dflash_batch.cli.queueing import open_queue
from dflash_batch.cli.run import check_intake
from dflash_batch.cli.screen import open_screen
from dflash_batch.worker.contract import TOP_PRIORITY
from dflash_batch.worker.server import given_url
from dflash_batch.worker.spool import Spool
from dflash_batch.worker.submit import batch_id_for, submit


@click.command("submit")
@click.argument("file")
@model_option
@draft_options
@click.option(
    "--on-invalid",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do about bad lines: queue nothing, or leave them out.",
)
@click.option(
    "--priority",
    type=click.IntRange(-TOP_PRIORITY, TOP_PRIORITY),
    default=0,
    show_default=True,
    metavar="N",
    help="-10 to 10; a higher one goes first.",
)
@click.option(
    "--new", is_flag=True, help="Queue it again, though the same batch was queued before."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the id.")
@common_options
@pass_common
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    file: str,
    model: str | None,
    draft: str,
    draft_quant: str,
    block: int | None,
    dtype: str,
    on_invalid: str,
    priority: int,
    new: bool,
    as_json: bool,
) -> None:
    """Put FILE (or - for stdin) into the queue and print the batch's id, and nothing else.

    Submitting the same file for the same model again is harmless: it is the same batch.

    \b
    Example: dflash-batch submit batch.jsonl -m Qwen/Qwen3-4B
    """
    ref = model_ref(model, draft, block, dtype, draft_quant) if model else None
    with Spool() as spool:
        with open_screen(common, label(file)) as screen:
            intake = read_input(file, model, screen, spool)
        check_intake(ctx, common, intake, skip=on_invalid == "skip")
        ref = ref or model_ref(named_model(model, intake.reading), draft, block, dtype, draft_quant)
        salt = uuid.uuid4().hex if new else ""
        batch_id = batch_id_for(intake.reading.digest, ref, salt)
        with open_screen(common, intake.name) as screen, open_queue(common) as queue:
            screen.on_phase("planning", 0.0)
            planned = spool.plan()
            status = submit(
                queue,
                spool,
                ref,
                batch_id=batch_id,
                name=intake.name,
                progress=lambda done, total: screen.on_phase("queueing", done / total),
                planned=planned,
                priority=priority,
            )
            workers = queue.workers()
    if not common.quiet:
        state = "are done already; --new runs them again" if status.done else "queued"
        shared = f"shared prefix {planned.shared_share:.0%}"
        talk(f"{batch_id}   {plural(status.total, 'request')} {state} · {shared}")
        if not workers and not status.done:
            talk("  no worker is running; the batch waits for one: dflash-batch worker")
        if given_url(common.redis) is None:
            talk("  our own server stops with its last user and keeps the batch on disk meanwhile")
    if as_json:
        report = {
            "batch": batch_id,
            "requests": status.total,
            "skipped": len(intake.reading.errors),
            "shared_prefix_share": round(planned.shared_share, 4),
            "workers": len(workers),
        }
        click.echo(json.dumps(report))
    else:
        click.echo(batch_id)
