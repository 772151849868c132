"""`dflash-batch doctor`: does what is needed work here?"""

from __future__ import annotations

import json

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, pass_common, printable
from dflash_batch.cli.models import draft_options, model_ref
from dflash_batch.worker.checkup import Subject, examine
from dflash_batch.worker.home import home_dir
from dflash_batch.worker.server import given_url

_COLOURS = {"ok": "green", "note": None, "warning": "yellow", "failed": "red"}


@click.command("doctor")
@click.option("-m", "--model", metavar="MODEL", help="Load this model too, and decode with it.")
@draft_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
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
    as_json: bool,
) -> None:
    """Look whether everything that is needed works here. Exit code 1 if something does not.

    \b
    Example: dflash-batch doctor -m Qwen/Qwen3-4B --redis redis://studio.local
    """
    ref = model_ref(model, draft, block, dtype, draft_quant) if model else None
    subject = Subject(home_dir(common.home), given_url(common.redis), ref, common.insecure)
    found = []
    for finding in examine(subject):
        found.append(finding)
        if not as_json and not (common.quiet and finding.level in ("ok", "note")):
            level = click.style(f"{finding.level:<8}", fg=_COLOURS[finding.level])
            click.echo(f"{level} {finding.check:<11} {printable(finding.text)}")
            if finding.cure:
                click.echo(f"{'':<20} {printable(finding.cure)}")
    failed = any(finding.level == "failed" for finding in found)
    if as_json:
        report = {"ok": not failed, "findings": [finding.as_dict() for finding in found]}
        click.echo(json.dumps(report, ensure_ascii=False))
    ctx.exit(exits.SOME_FAILED if failed else exits.OK)
