"""`dflash-batch bench`: what a cycle costs on this machine, and which width and block are best."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, pass_common, talk
from dflash_batch.cli.models import draft_options, model_ref
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.home import cost_dir, home_dir

ENGINE = (sys.executable, "-m", "dflash_batch.decoder.bench")


class BenchFailed(UserError):
    """Raised when the measuring process cannot load the model, or dies."""

    def __init__(self, message: str, code: str = "worker_failed") -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the engine's own word


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Positive whole numbers with commas between."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            numbers = sorted({int(part) for part in str(value).split(",")})
        except ValueError:
            numbers = [0]
        if numbers[0] < 1:
            self.fail(f"{value!r} is not a list of positive numbers such as 1,4,16", param, ctx)
        return numbers


@click.command("bench")
@click.option(
    "-m", "--model", required=True, metavar="MODEL", help="A folder, a Hugging Face id, or demo."
)
@draft_options
@click.option(
    "--widths",
    type=Numbers(),
    default="1,2,4,8,16",
    show_default=True,
    metavar="B,B,…",
    help="Rows decoded together.",
)
@click.option(
    "--contexts",
    type=Numbers(),
    default="512,4096",
    show_default=True,
    metavar="N,N,…",
    help="Tokens each row sees; at most half the model's context.",
)
@click.option(
    "--limit",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Stop measuring after this time; the model's loading does not count.",
)
@click.option("--plot", metavar="FILE.png", help="Draw it too; needs the extra `plot`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout at the end.")
@common_options
@pass_common
@click.pass_context
def command(
    ctx: click.Context,
    common: Common,
    model: str,
    draft: str,
    draft_quant: str,
    block: int | None,
    dtype: str,
    widths: list[int],
    contexts: list[int],
    limit: float,
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure what a cycle costs with MODEL on this machine, and keep it for --spec auto.

    Shown are milliseconds of a whole cycle, drafting included, by rows (B) and tokens per row (T,
    1: plain), and the best choice at several acceptances.

    \b
    Example: dflash-batch bench -m Qwen/Qwen3-4B --plot costs.png
    """
    if plot:
        _need_matplotlib()
    ref = model_ref(model, draft, block, dtype, draft_quant)
    order = {
        **ref.model_dump(),
        "widths": widths,
        "contexts": contexts,
        "limit_s": limit,
        "cost_dir": str(cost_dir(home_dir(common.home))),
    }
    result = measure(order, common)
    if plot:
        draw(result, Path(plot))
    if as_json:
        click.echo(json.dumps(result))
    else:
        for line in report(result):
            click.echo(line)
    if result["file"] and not common.quiet:
        talk(f"kept in {result['file']}")
    ctx.exit(exits.OK)


def measure(order: dict[str, Any], common: Common) -> dict[str, Any]:
    """Run the sweep in a process of its own. Raises BenchFailed."""
    process = subprocess.Popen(ENGINE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    try:
        with process.stdin as stdin:
            stdin.write(json.dumps(order))
        for line in process.stdout:
            match json.loads(line) if line.startswith("{") else None:
                case {"phase": phase, "share": share}:
                    if not common.quiet:
                        talk(f"  {phase}" + ("" if share is None else f"  ({share:.0%})"))
                case {"error": message, "code": code}:
                    raise BenchFailed(message, code)
                case {"table": _} as result:
                    pass
                case _:
                    talk(line.rstrip())
        status = process.wait()
    finally:
        process.kill()  # of no effect on one that has ended
        process.stdout.close()
        process.wait()
    if not result:
        raise BenchFailed(f"the measuring process ended with status {status} and no result")
    return result


def report(result: dict[str, Any]) -> Iterator[str]:
    """The result for people."""
    cycles, key = whole_cycles(result), result["table"]["key"]
    yield f"{result['target']}, draft {result['draft'] or 'none'}, {result['dtype']}"
    yield f"{key['machine']}, mlx {key['mlx']}"
    for context in sorted({c for _, _, c in cycles}):
        sizes = sorted({t for _, t, c in cycles if c == context})
        yield ""
        yield f"context {context:,}: ms a cycle"
        yield f"{'B':>6}" + "".join(f"{f'T={t}':>9}" for t in sizes)
        for rows in sorted({b for b, _, c in cycles if c == context}):
            cells = [cycles.get((rows, t, context)) for t in sizes]
            shown = ("-" if s is None else f"{1e3 * s:.1f}" for s in cells)
            yield f"{rows:>6}" + "".join(f"{text:>9}" for text in shown)
    yield ""
    yield f"{'context':>8}{'acceptance':>12}{'best B':>8}{'T':>4}{'tokens/s':>10}{'plain':>16}"
    for best in result["best"]:
        plain = f"{best['plain_tokens_per_s']:.0f} at B={best['plain_rows']}"
        yield (
            f"{best['context']:>8,}{best['acceptance']:>12.0%}{best['rows']:>8}"
            f"{best['tokens']:>4}{best['tokens_per_s']:>10.0f}{plain:>16}"
        )
    points = len({(b, c) for b, _, c in cycles})
    if points < result["wanted"]:
        yield f"{points} of {result['wanted']} points were measured; --limit gives more time"


def whole_cycles(result: dict[str, Any]) -> dict[tuple[int, int, int], float]:
    """Seconds of drafting and verifying together by (rows, tokens, context)."""
    seconds = {(b, t, c): s for b, t, c, s, _ in result["table"]["forward"]}
    for b, t, c, s, _ in result["table"]["draft"]:
        seconds[b, t, c] += s
    return seconds


def draw(result: dict[str, Any], path: Path) -> None:
    """Milliseconds per cycle over block length, a line for each width, a panel each context."""
    pyplot = _need_matplotlib()
    cycles = whole_cycles(result)
    contexts = sorted({c for _, _, c in cycles})
    figure, panels = pyplot.subplots(
        1, len(contexts), figsize=(5 * len(contexts), 4), squeeze=False, sharey=True
    )
    for panel, context in zip(panels[0], contexts, strict=True):
        for rows in sorted({b for b, _, c in cycles if c == context}):
            points = sorted((t, s) for (b, t, c), s in cycles.items() if (b, c) == (rows, context))
            panel.plot([t for t, _ in points], [1e3 * s for _, s in points], "o-", label=f"{rows}")
        panel.set(title=f"context {context:,}", xlabel="tokens per row", ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms a cycle")
    panels[0][0].legend(title="rows")
    figure.suptitle(f"{result['target']}, draft {result['draft'] or 'none'}")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _need_matplotlib() -> Any:
    """pyplot without a window. Raises click.UsageError when it is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise click.UsageError(
            "--plot needs matplotlib: pip install 'dflash-batch[plot]'"
        ) from error
