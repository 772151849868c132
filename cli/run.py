"""`dflash-batch run`: a batch file from start to end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, cache_options, common_options, pass_common, talk
from dflash_batch.cli.intake import (
    SKIP_HINT,
    STDIN,
    InputNotFound,
    Intake,
    label,
    read_input,
    show_problems,
    show_warnings,
)
from dflash_batch.cli.models import (
    draft_options,
    engine_options,
    max_batch_option,
    max_context_option,
    model_option,
    model_ref,
    named_model,
    spec_option,
)
from dflash_batch.cli.screen import Screen, open_screen
from dflash_batch.cli.summary import summary
from dflash_batch.worker import client
from dflash_batch.worker.contract import Spec
from dflash_batch.worker.home import home_dir
from dflash_batch.worker.results import Totals


@dataclass(frozen=True)
class Places:
    """Where results go."""

    output: Path
    errors: Path


@click.command("run")
@click.argument("file")
@model_option
@draft_options
@spec_option
@max_batch_option
@max_context_option
@engine_options
@click.option(
    "--on-invalid",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do about bad lines: run nothing, or run the others.",
)
@click.option("-o", "--output", metavar="FILE", help="Results. [default: <stem>.out.jsonl]")
@click.option("--errors", metavar="FILE", help="Failed lines. [default: <stem>.errors.jsonl]")
@click.option("--new", is_flag=True, help="Start over, replacing the results of an earlier run.")
@click.option(
    "--lease-ttl",
    type=click.FloatRange(min=1),
    default=45.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a worker that is silent keeps its rows.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end.")
@cache_options
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
    spec: Spec,
    max_batch: int,
    max_context: int | None,
    memory: int | None,
    diagnostics: str | None,
    on_invalid: str,
    output: str | None,
    errors: str | None,
    new: bool,
    lease_ttl: float,
    as_json: bool,
) -> None:
    """Run FILE from start to end, with a worker of its own.

    Results are written as they come. Whatever happens, running the same command again continues
    where it stopped; --new starts over. Decoding is greedy unless a request names a temperature.

    \b
    Example: dflash-batch run batch.jsonl -m Qwen/Qwen3-4B
    """
    places = _places(file, output, errors)
    # a wrong name is said before a long file is read
    ref = model_ref(model, draft, block, dtype, draft_quant) if model else None
    with open_screen(common, label(file)) as screen:
        intake = read_input(file, model, screen)
    check_intake(ctx, common, intake, skip=on_invalid == "skip")
    ref = ref or model_ref(named_model(model, intake.reading), draft, block, dtype, draft_quant)
    home = home_dir(common.home)
    options = client.RunOptions(
        digest=intake.reading.digest,
        name=intake.name,
        model=ref,
        output=places.output,
        errors=places.errors,
        home=home,
        redis=common.redis,
        insecure=common.insecure,
        new=new,
        max_batch=max_batch,
        lease_ttl_s=lease_ttl,
        max_context=max_context,
        memory=memory,
        diagnostics=diagnostics,
        spec=spec,
        cache_dir=common.cache_folder(home),
        cache_bytes=common.cache_size,
    )
    totals = run(ctx, common, intake, options)
    if as_json:
        click.echo(json.dumps(totals.as_dict()))
    ctx.exit(exits.SOME_FAILED if totals.failed else exits.OK)


def check_intake(ctx: click.Context, common: Common, intake: Intake, *, skip: bool) -> None:
    """Show problems and warnings; exit 3 if they forbid to go on."""
    reading = intake.reading
    if reading.errors and (not skip or not common.quiet):
        show_problems(intake)
    if reading.errors and not skip:
        talk(SKIP_HINT)
        ctx.exit(exits.INVALID_INPUT)
    if not reading.rows:
        talk("nothing was queued: no line can be run")
        ctx.exit(exits.INVALID_INPUT)
    if not common.quiet:
        show_warnings(reading.warnings)


def run(ctx: click.Context, common: Common, intake: Intake, options: client.RunOptions) -> Totals:
    """Run to the end and say what came of it; exits with 130 when interrupted."""
    reading = intake.reading
    try:
        with open_screen(common, intake.name) as screen:
            totals = client.run_batch(reading.rows, reading.errors, options, screen)
    except client.Interrupted as stopped:
        talk(
            f"interrupted: {stopped.done:,} of {stopped.total:,} rows are written; "
            "rerun the same command to continue"
        )
        ctx.exit(exits.INTERRUPTED)
    if not common.quiet:
        for line in summary(totals):
            talk(line)
        _say_if_old(screen)
    return totals


def _say_if_old(screen: Screen) -> None:
    if not screen.rows_ran:
        talk("  all rows were done by an earlier run; --new starts over")


def _places(file: str, output: str | None, errors: str | None) -> Places:
    """Result files for these options, absolute. Raises click.UsageError and InputNotFound."""
    source = Path(file)
    if file == STDIN and output is None:
        raise click.UsageError("reading stdin needs -o FILE for the results")
    if source.is_dir():
        raise InputNotFound(f"{file} is a folder; name a file")
    out = Path(output) if output is not None else source.with_name(f"{source.stem}.out.jsonl")
    if out.is_dir():
        raise click.UsageError(f"{out} is a folder; name a file with -o")
    stem = out.name.removesuffix(".jsonl").removesuffix(".out")
    bad = Path(errors) if errors is not None else out.with_name(f"{stem}.errors.jsonl")
    for place in (out, bad):
        if file != STDIN and place.exists() and source.exists() and place.samefile(source):
            raise click.UsageError(f"{place} is the input; name another file with -o")
    return Places(out.absolute(), bad.absolute())
