"""`dflash-batch models`: which models are at hand, what they need, and whether a pair fits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, pass_common, printable, talk
from dflash_batch.cli.intake import size_text
from dflash_batch.cli.models import draft_options, model_ref
from dflash_batch.decoder.registry import Draft, draft_for, pairs, repo_for
from dflash_batch.worker.errors import UserError

if TYPE_CHECKING:
    from dflash_batch.worker.shelf import Held, Hub

CHECKER = (sys.executable, "-m", "dflash_batch.decoder.pairing")
WIDTHS = (1, 8, 32)

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


class CheckFailed(UserError):
    """Raised when the checking process cannot load the pair, or dies."""

    def __init__(self, message: str, code: str = "worker_failed") -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]  # the decoder's own word


def open_hub() -> Hub:
    """The hub; tests put another in its place."""
    from dflash_batch.worker.shelf import HuggingFace  # brings huggingface_hub with it

    return HuggingFace()


@click.group("models")
def command() -> None:
    """Models at hand: list, fetch and remove them, and check that a pair fits.

    \b
    Example: dflash-batch models ls --all
    """


@command.command("ls")
@click.option("--all", "everything", is_flag=True, help="Also public pairs that are not here.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    metavar="N",
    help="Tokens a row has, for the memory shown.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@common_options
@pass_common
def ls(common: Common, everything: bool, context: int, as_json: bool) -> None:
    """List models in the Hugging Face cache, with the memory that 1, 8 and 32 rows need.

    Memory is reckoned from the configs, the draft included if it is here: weights, and keys and
    values of so many rows. What a forward needs comes on top.
    """
    from dflash_batch.worker.shelf import bundled

    target, draft = bundled()
    held = open_hub().held()
    listed = [_entry(target, [draft], context), *(_entry(h, held, context) for h in held)]
    here = {entry["name"].lower() for entry in listed}
    absent = [
        {"name": pair.repo, "alias": pair.alias, "draft": _draft_name(pair.draft)}
        for pair in pairs()
        if everything and (pair.repo or "").lower() not in here
    ]
    if as_json:
        click.echo(json.dumps({"context": context, "models": listed, "not_here": absent}))
        return
    for line in _table(listed, context):
        click.echo(line)
    for entry in absent:
        click.echo(printable(f"{entry['name']}  not here · -m {entry['alias']} · {entry['draft']}"))


@command.command("pull")
@click.argument("name")
@click.option("--revision", metavar="COMMIT", help="A commit, tag or branch instead of the newest.")
@click.option("--no-draft", is_flag=True, help="Leave out the draft that is known for it.")
@common_options
@pass_common
def pull(common: Common, name: str, revision: str | None, no_draft: bool) -> None:
    """Fetch model NAME, and the draft known for it, into the Hugging Face cache.

    Only safetensors are fetched: pickles (.bin, .pt) can run code when they are read.

    \b
    Example: dflash-batch models pull Qwen/Qwen3-4B
    """
    from dflash_batch.worker.shelf import pull as fetch

    hub, name = open_hub(), repo_for(name) or name
    draft = None if no_draft else draft_for(name)
    wanted = [Draft(name, revision), *([draft] if draft else [])]
    for model in wanted:
        got = fetch(hub, model.name, model.revision)
        if got.skipped and not common.quiet:
            talk(f"left out: {', '.join(got.skipped)} (pickles, which can run code)")
        click.echo(printable(f"{got.name}  {got.folder}"))


@command.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
@pass_common
def rm(common: Common, name: str, yes: bool) -> None:
    """Remove model NAME, all its revisions, from the Hugging Face cache."""
    from dflash_batch.worker.shelf import find

    hub = open_hub()
    found = find(hub, repo_for(name) or name)
    size = size_text(sum(held.bytes for held in found))
    if not yes:
        click.confirm(printable(f"remove {found[0].name}, {size}?"), abort=True, err=True)
    hub.remove([held.revision for held in found])
    click.echo(printable(f"{found[0].name} removed, {size}"))


@command.command("check")
@click.argument("model")
@draft_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@common_options
@pass_common
@click.pass_context
def check(
    ctx: click.Context,
    common: Common,
    model: str,
    draft: str,
    draft_quant: str,
    block: int | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Load MODEL with its draft and see whether they fit. Exit code 1 if they do not.

    \b
    Example: dflash-batch models check Qwen/Qwen3-4B
    """
    order = model_ref(model, draft, block, dtype, draft_quant).model_dump()
    found = _checked(order, common)
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(printable(f"{found['target']}, draft {found['draft']}, {found['dtype']}"))
        for one in found["checks"]:
            level = click.style(f"{one['level']:<8}", fg=_COLOURS[one["level"]])
            click.echo(f"{level} {one['name']:<11} {printable(one['text'])}")
        click.echo(found["verdict"])
    ctx.exit(exits.SOME_FAILED if found["level"] == "failed" else exits.OK)


def _checked(order: dict[str, Any], common: Common) -> dict[str, Any]:
    """The report on a pair, made in a process of its own. Raises CheckFailed."""
    done = subprocess.run(
        CHECKER, input=json.dumps(order), capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        match json.loads(line):
            case {"phase": phase}:
                if not common.quiet:
                    talk(f"  {phase}")
            case {"error": str(message), "code": str(code)}:
                raise CheckFailed(message, code)
            case {"checks": _} as found:
                return dict(found)
    if common.verbose > 1:
        talk(done.stderr)
    raise CheckFailed(f"the check ended with status {done.returncode} and no result")


def _entry(held: Held, others: list[Held], context: int) -> dict[str, Any]:
    """A model as data. Its memory includes the draft, if that is among `others`."""
    draft = None if held.is_draft else draft_for(held.name)
    here = [other for other in others if draft and str(other.folder) == draft.name]
    here += [other for other in others if draft and other.name == draft.name]
    need = held.footprint
    if need is not None and here and here[0].footprint is not None:
        need = need + here[0].footprint
    return {
        "name": held.name,
        "revision": held.revision,
        "kind": "draft" if held.is_draft else "target",
        "bytes": held.bytes,
        "draft": _draft_name(draft),
        "draft_revision": draft.revision if draft else None,
        "draft_here": bool(here),
        "memory": {str(n): need.at(n, context) for n in WIDTHS} if need else None,
    }


def _draft_name(draft: Draft | None) -> str | None:
    if draft is None:
        return None
    return "demo (draft)" if draft.name.startswith("/") else draft.name


def _table(entries: list[dict[str, Any]], context: int) -> Iterator[str]:
    wide = max(len(entry["name"]) for entry in entries) + 2
    heads = "".join(f"{f'{n} rows':>10}" for n in WIDTHS)
    yield f"{'model':<{wide}}{'revision':<10}{'disk':>10}{heads}  draft"
    for entry in entries:
        memory = entry["memory"] or {}
        needs = "".join(f"{size_text(memory[str(n)]) if memory else '-':>10}" for n in WIDTHS)
        draft = "" if entry["kind"] == "target" else "is one"
        if entry["draft"]:
            draft = entry["draft"] + ("" if entry["draft_here"] else ", not here")
        disk = size_text(entry["bytes"])
        name, revision = printable(entry["name"]), entry["revision"][:8]
        yield f"{name:<{wide}}{revision:<10}{disk:>10}{needs}  {printable(draft)}".rstrip()
    yield f"memory at a context of {context:,}, without what a forward needs"
