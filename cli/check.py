"""`dflash-batch check`: what is in a batch file, and what is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, pass_common, printable
from dflash_batch.cli.intake import (
    SKIP_HINT,
    Intake,
    label,
    plural,
    problem_lines,
    read_input,
    size_text,
)
from dflash_batch.cli.models import model_ref
from dflash_batch.cli.screen import Screen, open_screen
from dflash_batch.worker.contract import CHAT, JobSpec
from dflash_batch.worker.prefix import Plan, plan
from dflash_batch.worker.reader import LineError

if TYPE_CHECKING:
    from dflash_batch.worker.fit import Fit


@click.command("check")
@click.argument("file")
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    help="Also count tokens with this model's tokenizer: a folder, a Hugging Face id, or demo.",
)
@click.option(
    "--max-context", type=click.IntRange(min=2), metavar="N", help="Use less context, in tokens."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with all problems.")
@common_options
@pass_common
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    file: str,
    model: str | None,
    max_context: int | None,
    as_json: bool,
) -> None:
    """Look for bad lines in FILE (or - for stdin); queue nothing.

    All problems are found in one pass. With -m, prompts that do not fit the model are problems too.

    \b
    Example: dflash-batch check batch.jsonl -m Qwen/Qwen3-4B
    """
    target = model_ref(model, "none", None, "auto").target if model else None
    with open_screen(common, label(file)) as screen:
        intake = read_input(file, model, screen)
        fit = _fit(intake, target, max_context, screen) if target else None
        screen.on_phase("planning", 0.0)
        planned = plan(intake.reading.rows)
    errors = sorted([*intake.reading.errors, *(fit.errors if fit else ())], key=lambda e: e.line)
    if as_json:
        click.echo(json.dumps(_report(intake, errors, planned, fit), ensure_ascii=False))
    else:
        for line in _screen(intake, errors, planned, fit):
            click.echo(line)
    ctx.exit(exits.INVALID_INPUT if errors else exits.OK)


def _fit(intake: Intake, target: str, max_context: int | None, screen: Screen) -> Fit:
    from dflash_batch.worker.fit import Ruler  # brings huggingface_hub with it

    screen.on_phase("loading the tokenizer", None)
    ruler = Ruler(target, max_context)
    rows = intake.reading.rows
    return ruler.fit(
        rows, lambda done: screen.on_phase("counting tokens", done / max(1, len(rows)))
    )


def _screen(
    intake: Intake, errors: list[LineError], planned: Plan, fit: Fit | None
) -> Iterator[str]:
    reading = intake.reading
    if errors:
        yield from problem_lines(intake.name, errors, reading.requests)
        for warning in reading.warnings:
            yield f"  warning  {printable(warning)}"
        yield SKIP_HINT
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in _endpoints(intake).items())
    requests = plural(reading.requests, "request")
    yield f"{printable(intake.name)}   {requests} · {size_text(reading.bytes)} · {kinds}"
    yield f"  valid           {len(reading.rows):,} ok · 0 invalid"
    if reading.models:
        names = ", ".join(f"{name} ({count:,})" for name, count in reading.models.items())
        yield f"  model           {printable(names[:200])}"
    yield f"  decoding        {_decoding(reading.rows)}"
    if fit is not None:
        yield (
            f"  prompt tokens   {fit.total:,}   p50 {fit.p50:,}   max {fit.largest:,}   "
            f"limit {fit.limit:,}   ok"
        )
    groups = plural(planned.groups, "group")
    yield f"  shared prefix   {planned.shared_share:.0%} of the prompt text, in {groups}"
    for warning in reading.warnings:
        yield f"  warning         {printable(warning)}"


def _decoding(rows: Sequence[JobSpec]) -> str:
    sampled = sum(row.temperature > 0 for row in rows)
    choices = sum(row.n * len(row.prompts or [None]) for row in rows)
    text = "greedy: temperature 0 where a line names none"
    if sampled:
        text = f"{sampled:,} sampled, {len(rows) - sampled:,} greedy (temperature 0 or none named)"
    return text if choices == len(rows) else f"{text} · {choices:,} choices"


def _endpoints(intake: Intake) -> dict[str, int]:
    return Counter("chat" if row.endpoint == CHAT else "completions" for row in intake.reading.rows)


def _report(
    intake: Intake, errors: list[LineError], planned: Plan, fit: Fit | None
) -> dict[str, Any]:
    reading = intake.reading
    tokens = None
    if fit is not None:
        tokens = {"total": fit.total, "p50": fit.p50, "max": fit.largest, "limit": fit.limit}
    return {
        "file": intake.name,
        "requests": reading.requests,
        "valid": reading.requests - len(errors),
        "invalid": len(errors),
        "lines": reading.lines,
        "bytes": reading.bytes,
        "sha256": reading.digest,
        "endpoints": _endpoints(intake),
        "models": reading.models,
        "ignored": reading.ignored,
        "shared_prefix_share": round(planned.shared_share, 4),
        "prompt_tokens": tokens,
        "warnings": reading.warnings,
        "errors": [error.model_dump(mode="json") for error in errors],
    }
