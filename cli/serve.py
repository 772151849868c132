"""`dflash-batch serve`: the OpenAI API over the queue."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from dflash_batch.cli.common import Common, cache_options, common_options, pass_common, talk
from dflash_batch.cli.models import (
    draft_options,
    max_batch_option,
    max_context_option,
    model_ref,
    spec_option,
)
from dflash_batch.worker import log
from dflash_batch.worker.conditions import ALWAYS
from dflash_batch.worker.contract import Spec
from dflash_batch.worker.home import cost_dir, home_dir
from dflash_batch.worker.server import given_url
from dflash_batch.worker.settings import WorkerSettings

NEEDED = ("prometheus_client", "python_multipart", "starlette", "uvicorn")


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8321,
    show_default=True,
    metavar="N",
    help="0 takes one that is free.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Answer only callers with a bearer token of this file, one a line, mode 0600. "
    "Needed where --host can be reached from other machines.",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="Offer this model, and run a worker for it: a folder, a Hugging Face id, or demo. "
    "[default: the models of workers started elsewhere]",
)
@click.option("--no-worker", is_flag=True, help="Offer MODEL, but leave the work to others.")
@draft_options
@spec_option
@max_batch_option
@max_context_option
@cache_options
@common_options
@pass_common
def command(
    common: Common,
    host: str,
    port: int,
    token_file: str | None,
    model: str | None,
    no_worker: bool,
    draft: str,
    draft_quant: str,
    block: int | None,
    dtype: str,
    spec: Spec,
    max_batch: int,
    max_context: int | None,
) -> None:
    """Answer the OpenAI API on http://HOST:PORT/v1 until stopped.

    Files and batches are kept on disk and go on after a restart; live requests are rows of the
    same queue. Ctrl-C stops it cleanly.

    \b
    Example: dflash-batch serve -m Qwen/Qwen3-4B
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise click.UsageError(
            f"serve needs {', '.join(missing)}: pip install 'dflash-batch[serve]'"
        )
    from dflash_batch.worker.gateway.app import Options
    from dflash_batch.worker.gateway.guard import read_tokens
    from dflash_batch.worker.gateway.serve import Place, serve

    ref = model_ref(model, draft, block, dtype, draft_quant) if model else None
    home = home_dir(common.home)
    tokens = read_tokens(Path(token_file)) if token_file else frozenset()
    log.set_up("DEBUG" if common.verbose else "WARNING")
    settings = None
    if ref is not None and not no_worker:
        settings = WorkerSettings(
            redis_url="",
            model=ref,
            max_batch=max_batch,
            max_context=max_context,
            spec=spec,
            cost_dir=str(cost_dir(home)),
            cache_dir=common.cache_folder(home),
            cache_bytes=common.cache_size,
            only_when=ALWAYS,
        )

    def ready(url: str) -> None:
        if not common.quiet:
            talk(f"listening on {url}/v1" + ("" if tokens else " (no token: this machine only)"))

    options = Options(home, "", (ref,) if ref else (), tokens)
    serve(Place(host, port, given_url(common.redis)), options, settings, ready)
    if not common.quiet:
        talk("stopped; batches go on at the next start")
