"""`dflash-batch draft`: train a draft for a target on one's own prompts, and measure one."""

from __future__ import annotations

import io
import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, pass_common, talk
from dflash_batch.cli.intake import InputNotFound, plural, problem_lines
from dflash_batch.cli.job import drive
from dflash_batch.cli.models import draft_options, model_ref
from dflash_batch.cli.summary import duration
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.home import cost_dir, home_dir
from dflash_batch.worker.reader import read_lines

TRAIN = "dflash_batch.decoder.training.train"
EVALUATE = "dflash_batch.decoder.training.evaluate"

KINDS = ("kind", "category")
"""Where a line says what kind of prompt it is: at top level or in its metadata."""


class BadPrompts(UserError):
    """Raised when a line of the prompts is no request."""

    code = "invalid_input"


_model = click.option(
    "-m", "--model", required=True, metavar="MODEL", help="A folder, a Hugging Face id, or demo."
)
_prompts = click.option(
    "--prompts",
    required=True,
    metavar="FILE.jsonl",
    help="Prompts, written as for run; max_tokens counts, sampling does not. "
    "A line may name its kind or category.",
)
_max_tokens = click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    default=256,
    show_default=True,
    metavar="N",
    help="Most tokens of a reply.",
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group("draft")
def command() -> None:
    """Train a DFlash draft on your own prompts, and measure one.

    \b
    Example: dflash-batch draft train -m Qwen/Qwen3-4B --prompts my.jsonl -o my-draft
    """


@command.command("train")
@_model
@_prompts
@click.option("-o", "--out", required=True, metavar="DIR", help="The folder to write.")
@click.option("--init", metavar="DRAFT", help="Begin with this draft: a folder, an id, or demo.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Steps. [default: 8 passes]")
@click.option(
    "--time-budget",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="End after this time, the target's replies included.",
)
@click.option("--layers", type=click.IntRange(1, 64), metavar="N", help="Layers. [default: 5]")
@click.option(
    "--block", type=click.IntRange(2, 64), metavar="N", help="Block length. [default: 16]"
)
@click.option(
    "--lr",
    type=click.FloatRange(min=0, min_open=True),
    metavar="RATE",
    help="Peak learning rate. [default: by the size; a third of it with --init]",
)
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of all chance.")
@_max_tokens
@click.option(
    "--samples",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    metavar="N",
    help="Replies a prompt: the first greedy, others at temperature 0.7.",
)
@click.option(
    "--width",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Replies written together.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=64),
    default=8192,
    show_default=True,
    metavar="N",
    help="Tokens a step.",
)
@click.option("--mask-token", type=int, metavar="ID", help="[default: one that no text needs]")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Arithmetic of the target.",
)
@_json
@common_options
@pass_common
@click.pass_context
def train(ctx: click.Context, common: Common, /, as_json: bool, **chosen: Any) -> None:
    """Train a draft for MODEL and write it to DIR, in the public layout with a model card.

    It learns from MODEL's own replies to your prompts. Stop it, kill it: the same command goes on.

    \b
    Example: dflash-batch draft train -m Qwen/Qwen3-4B --prompts my.jsonl -o my-draft
    """
    init = chosen["init"]
    ref = model_ref(chosen["model"], init or "none", None, chosen["dtype"])
    out = Path(chosen["out"]).expanduser().absolute()
    with _normal(chosen["prompts"]) as prompts:
        order = {
            "target": ref.target,
            "prompts": prompts.name,
            "out": str(out),
            "init": ref.draft if init else None,
            "time_budget_s": chosen["time_budget"],
            **{name: chosen[name] for name in _SAME_NAME},
        }
        word = drive(TRAIN, order, _Teller(common).show)
    if "stopped" in word:
        stopped = word["stopped"]
        of = "" if stopped["of"] is None else f" of {stopped['of']:,}"
        talk(
            f"stopped in {stopped['phase']} after {stopped['done']:,}{of}, and kept. "
            "The same command goes on"
        )
        ctx.exit(exits.INTERRUPTED)
    facts = word["result"]
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for line in _trained(facts):
            click.echo(line)
    ctx.exit(exits.OK)


_SAME_NAME = (
    *("steps", "layers", "block", "lr", "seed", "max_tokens", "samples"),
    *("width", "batch_tokens", "mask_token", "dtype"),
)


@command.command("eval")
@_model
@draft_options
@_prompts
@_max_tokens
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="N",
    help="Most rows decoded together.",
)
@_json
@common_options
@pass_common
@click.pass_context
def evaluate(
    ctx: click.Context,
    common: Common,
    model: str,
    draft: str,
    block: int | None,
    dtype: str,
    draft_quant: str,
    prompts: str,
    max_tokens: int,
    max_batch: int,
    as_json: bool,
) -> None:
    """Decode the prompts greedily with a draft: tokens per cycle, and how often drafts stand.

    After `dflash-batch bench -m MODEL --draft DIR` it also says how much faster that is.

    \b
    Example: dflash-batch draft eval -m Qwen/Qwen3-4B --draft my-draft --prompts my.jsonl
    """
    ref = model_ref(model, draft, block, dtype, draft_quant)
    with _normal(prompts) as file:
        order = {
            "target": ref.target,
            "draft": ref.draft,
            "block": ref.block,
            "dtype": ref.dtype,
            "draft_quant": ref.draft_quant,
            "prompts": file.name,
            "width": max_batch,
            "max_tokens": max_tokens,
            "cost_dir": str(cost_dir(home_dir(common.home))),
        }
        word = drive(EVALUATE, order, _Teller(common).show)
    if "stopped" in word:
        raise KeyboardInterrupt
    if as_json:
        click.echo(json.dumps(word["result"]))
    else:
        for line in _evaluated(word["result"]):
            click.echo(line)
    ctx.exit(exits.OK)


def _normal(file: str) -> Any:
    """The prompts of `file`, one a line as the decoder reads them, in a file of ours (mode 0600).

    Raises InputNotFound, InputError and BadPrompts.
    """
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise InputNotFound(f"cannot read {file}: {error.strerror or error}") from error
    lines, kinds = _without_kinds(data)
    reading = read_lines(io.BytesIO(lines), default_model="any")
    if reading.errors:
        for problem in problem_lines(os.path.basename(file), reading.errors, reading.requests):
            talk(problem)
        raise BadPrompts(f"{plural(len(reading.errors), 'line')} of {file} cannot be used")
    normal = tempfile.NamedTemporaryFile(  # noqa: SIM115  closed by the caller
        "w", encoding="utf-8", prefix="prompts-", suffix=".jsonl"
    )
    for row in reading.rows:
        inputs: list[dict[str, Any]] = [{"prompt": prompt} for prompt in row.prompts or ()]
        for entry in inputs or [{"messages": row.messages}]:
            kind = kinds.get(row.line) or _kind(row.metadata or {})
            normal.write(json.dumps({**entry, "kind": kind, "max_tokens": row.max_tokens}) + "\n")
    normal.flush()
    return normal


def _without_kinds(data: bytes) -> tuple[bytes, dict[int, str]]:
    """The lines without their top-level kinds, and those by line number. What cannot be read is
    left as it is: the reader says what is wrong with it."""
    lines, kinds = data.split(b"\n"), dict[int, str]()
    for at, line in enumerate(lines):
        if not any(f'"{name}"'.encode() in line for name in KINDS):
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        kind = _kind(entry) if isinstance(entry, dict) else None
        if kind is not None:
            kinds[at + 1] = kind
            kept = {name: value for name, value in entry.items() if name not in KINDS}
            lines[at] = json.dumps(kept).encode()
    return b"\n".join(lines), kinds


def _kind(entry: dict[str, Any]) -> str | None:
    found = next((entry[name] for name in KINDS if isinstance(entry.get(name), str)), None)
    return str(found) if found is not None else None


class _Teller:
    """Progress in plain lines on stderr."""

    def __init__(self, common: Common) -> None:
        self._quiet = common.quiet
        self._phase, self._tenth = "", -1

    def show(self, word: dict[str, Any]) -> None:
        if self._quiet:
            return
        if "phase" in word:
            self._on_phase(word)
        if "note" in word:
            talk(f"  {word['note']}")
        if "loss" in word:
            of = f" of {word['steps']:,}" if word["steps"] else ""
            speed = f" · {word['steps_per_s']:.3g} steps/s" if word["steps_per_s"] else ""
            talk(
                f"  step {word['step']:,}{of} ({word['share']:.0%}) · loss {word['loss']:.3f}"
                f"{speed} · {duration(word['seconds'])}"
            )
        if "tau" in word:
            talk(f"  step {word['step']:,} · {word['tau']:.2f} tokens per cycle on held-out texts")

    def _on_phase(self, word: dict[str, Any]) -> None:
        """A line for each phase, and for each tenth of one that has shares."""
        tenth = -1 if word["share"] is None else int(10 * word["share"])
        if word["phase"] == self._phase and tenth <= self._tenth:
            return
        self._phase, self._tenth = word["phase"], tenth
        share = "" if word["share"] is None else f"  ({word['share']:.0%})"
        speed = f"  {word['tokens_per_s']:,.0f} tokens/s" if word.get("tokens_per_s") else ""
        talk(f"  {word['phase']}{share}{speed}")


def _trained(facts: dict[str, Any]) -> Iterator[str]:
    tau = f"{facts['tau']:.2f} tokens per cycle"
    if facts["first_tau"] is not None:
        tau += f", {facts['first_tau']:.2f} before"
    yield f"{tau}, on {plural(facts['held_out'], 'held-out text')} of the target's own"
    yield (
        f"  {facts['steps']:,} steps on {facts['texts']:,} texts · {duration(facts['seconds'])}, "
        f"{duration(facts['text_seconds'])} of it for the texts"
    )
    draft = shlex.quote(facts["out"])
    yield f"  use it    dflash-batch run FILE.jsonl -m {facts['target']} --draft {draft}"
    yield f"  measure   dflash-batch draft eval -m {facts['target']} --draft {draft} --prompts FILE"


def _evaluated(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['target']}, draft {result['draft']}, block {result['block']}, "
        f"{result['dtype']}, at most {result['max_tokens']:,} tokens"
    )
    if result["left_out"]:
        yield f"  {plural(result['left_out'], 'prompt')} left out: longer than the context"
    heads = f"{'prompts':>8}{'tokens':>9}{'cycles':>8}{'τ':>7}"
    yield f"{'':<16}{heads}   drafts that stand, by position"
    for name, part in (("all", result), *result["kinds"].items()):
        tau = "-" if part["tau"] is None else f"{part['tau']:.2f}"
        stands = " ".join(f"{share:.0%}" for share in part["stands_by_position"])
        yield (
            f"{name[:15]:<16}{part['rows']:>8,}{part['tokens']:>9,}{part['cycles']:>8,}"
            f"{tau:>7}   {stands}"
        )
    if result["speedups"]:
        parts = (f"{s['speedup']:.2f} at {plural(s['rows'], 'row')}" for s in result["speedups"])
        yield f"speed against no draft, by the costs measured here: {', '.join(parts)}"
    else:
        yield "what it gains in speed is not known: dflash-batch bench measures the costs here"
