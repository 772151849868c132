"""`dflash-batch demo`: the bundled batch on the bundled model."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import (
    Common,
    cache_options,
    common_options,
    pass_common,
    printable,
    talk,
)
from dflash_batch.cli.intake import read_input
from dflash_batch.cli.models import DEMO, draft_options, max_batch_option, model_ref, spec_option
from dflash_batch.cli.run import run
from dflash_batch.cli.screen import open_screen
from dflash_batch.cli.summary import records
from dflash_batch.decoder.demo.problems import demo_answers, demo_rows, extract_answer
from dflash_batch.worker import client
from dflash_batch.worker.contract import Spec
from dflash_batch.worker.home import home_dir
from dflash_batch.worker.prefix import plan

PROBLEMS = 64

SHOWN = 4
"""Questions shown with their answers."""


@click.command("demo")
@draft_options
@spec_option
@max_batch_option
@click.option("-o", "--output", metavar="DIR", help="Where files go. [default: demo in --home]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end.")
@cache_options
@common_options
@pass_common
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    draft: str,
    draft_quant: str,
    block: int | None,
    dtype: str,
    spec: Spec,
    max_batch: int,
    output: str | None,
    as_json: bool,
) -> None:
    """Run the bundled batch on the bundled model: 64 word problems behind one prefix.

    It starts afresh each time. Compare with plain decoding: --draft none

    \b
    Example: dflash-batch demo
    """
    home = home_dir(common.home)
    folder = Path(output).absolute() if output is not None else home / "demo"
    source = _write_input(folder)
    with open_screen(common, "demo") as screen:
        intake = read_input(str(source), DEMO, screen)
        shared = plan(intake.reading.rows).shared_share
    options = client.RunOptions(
        digest=intake.reading.digest,
        name=intake.name,
        model=model_ref(DEMO, draft, block, dtype, draft_quant),
        output=folder / "demo.out.jsonl",
        errors=folder / "demo.errors.jsonl",
        home=home,
        redis=common.redis,
        insecure=common.insecure,
        new=True,
        max_batch=max_batch,
        spec=spec,
        cache_dir=common.cache_folder(home),
        cache_bytes=common.cache_size,
    )
    if not common.quiet:
        talk(f"demo: {PROBLEMS} word problems behind one prefix, shared text {shared:.0%}")
        if spec == "on" and draft != "none":
            talk("  drafts are on, to be seen at work; --spec auto uses them where they pay")
    totals = run(ctx, common, intake, options)
    replies = _replies(Path(totals.output))
    answers = demo_answers(PROBLEMS)
    score = sum(extract_answer(replies.get(name, "")) == answers[name] for name in answers)
    if not common.quiet:
        for line in _report(replies, answers, score, source):
            talk(line)
    if as_json:
        extra = {"score": score, "problems": PROBLEMS, "shared_prefix_share": round(shared, 4)}
        click.echo(json.dumps(totals.as_dict() | extra))
    ctx.exit(exits.SOME_FAILED if totals.failed else exits.OK)


def _write_input(folder: Path) -> Path:
    """The demo batch as a file. Raises click.UsageError when the folder cannot be written."""
    path = folder / "demo.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            for row in demo_rows(PROBLEMS):
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _replies(output: Path) -> dict[str, str]:
    """Answers by custom_id; the file is not there if every row failed."""
    if not output.exists():
        return {}
    return {
        record["custom_id"]: record["response"]["body"]["choices"][0]["message"]["content"]
        for record in records(output)
    }


def _report(
    replies: dict[str, str], answers: dict[str, int], score: int, source: Path
) -> Iterator[str]:
    questions = {row["custom_id"]: _question(row) for row in demo_rows(PROBLEMS)}
    for name in list(questions)[:SHOWN]:
        reply = replies.get(name, "")
        right = extract_answer(reply) == answers[name]
        mark = click.style("✓", fg="green") if right else click.style("✗", fg="red")
        yield ""
        yield f"  {printable(questions[name])}"
        yield f"  {mark} {printable(' '.join(reply.split())) or '(no answer)'}"
    yield ""
    colour = "green" if score == len(answers) else None
    yield "score " + click.style(f"{score}/{len(answers)}", fg=colour, bold=True) + " right"
    yield "next:"
    yield f"  dflash-batch check {shlex.quote(str(source))} -m demo"
    yield "  dflash-batch run FILE.jsonl -m MODEL      your own file; MODEL is a folder or an id"


def _question(row: dict[str, Any]) -> str:
    text: str = row["body"]["messages"][-1]["content"]
    return text
