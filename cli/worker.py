"""`dflash-batch worker`: work on queued batches."""

from __future__ import annotations

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, cache_options, common_options, pass_common, talk
from dflash_batch.cli.launchd import agent, worker_agent
from dflash_batch.cli.models import (
    draft_options,
    engine_options,
    max_batch_option,
    max_context_option,
    model_ref,
    spec_option,
)
from dflash_batch.cli.queueing import open_queue
from dflash_batch.cli.status import worker_line
from dflash_batch.worker import main as worker_main
from dflash_batch.worker.conditions import ALWAYS, conditions
from dflash_batch.worker.contract import Spec
from dflash_batch.worker.home import cost_dir, home_dir, pending_dir
from dflash_batch.worker.server import redis_url
from dflash_batch.worker.settings import WorkerSettings


def _conditions(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        conditions(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.group("worker", invoke_without_command=True)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="Serve this model only: a folder, a Hugging Face id, or demo. "
    "[default: whatever the queue has work for]",
)
@draft_options
@spec_option
@max_batch_option
@max_context_option
@engine_options
@click.option(
    "--lease-ttl",
    type=click.FloatRange(min=1),
    default=45.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the queue waits for us when we are silent, before others get our rows.",
)
@click.option(
    "--only-when",
    default="",
    callback=_conditions,
    metavar="LIST",
    help="Rest unless all of these hold: plugged, idle, hours like 22:00-07:00. "
    "Heat and a draining battery are minded anyway.",
)
@click.option(
    "--launchd",
    type=click.Choice(["install", "remove", "status", "print"]),
    help="Have macOS start this worker, with the other options given, at login and after a fault; "
    "or undo that, show it, or print the file.",
)
@click.option("--burst", is_flag=True, help="Stop when nothing is left to do.")
@cache_options
@common_options
@pass_common
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    model: str | None,
    draft: str,
    draft_quant: str,
    block: int | None,
    dtype: str,
    spec: Spec,
    max_batch: int,
    max_context: int | None,
    memory: int | None,
    diagnostics: str | None,
    lease_ttl: float,
    only_when: str,
    launchd: str | None,
    burst: bool,
) -> None:
    """Work on queued batches until stopped; or, with ls, list who does.

    Ctrl-C finishes the rows in hand and stops; a second Ctrl-C gives them back at once. Any number
    of workers may share a queue.

    \b
    Example: dflash-batch worker --redis redis://studio.local:6379
    """
    if ctx.invoked_subcommand is not None:
        return
    ref = model_ref(model, draft, block, dtype, draft_quant) if model else None
    home = home_dir(common.home)
    if launchd is not None:
        agent(launchd, worker_agent(ctx, common, ref, home))
        return
    with redis_url(common.redis, home, insecure=common.insecure) as url:
        settings = WorkerSettings(
            redis_url=url,
            model=ref,
            max_batch=max_batch,
            lease_ttl_s=lease_ttl,
            max_context=max_context,
            memory=memory,
            diagnostics=diagnostics,
            spec=spec,
            cost_dir=str(cost_dir(home)),
            only_when=",".join(filter(None, (ALWAYS, only_when))),
            pending_dir=str(pending_dir(home)),
            cache_dir=common.cache_folder(home),
            cache_bytes=common.cache_size,
            burst=burst,
            log_level="DEBUG" if common.verbose else "WARNING" if common.quiet else "INFO",
        )
        code = worker_main.run_worker(settings)
    if code == exits.NOT_FOUND:
        talk("the model cannot be loaded; the reason is above")
    ctx.exit(code)


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each worker.")
@common_options
@pass_common
def list_workers(common: Common, as_json: bool) -> None:
    """List the workers of the queue.

    \b
    Example: dflash-batch worker ls
    """
    with open_queue(common) as queue:
        workers = queue.workers()
    for worker in workers:
        click.echo(worker.dump() if as_json else worker_line(worker))
    if not workers and not as_json and not common.quiet:
        talk("no worker is up; start one: dflash-batch worker")
