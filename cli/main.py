"""The command `dflash-batch`: finds the verb, and turns trouble into one line and an exit code.

A verb's module is imported when the verb is used, so that starting is quick.
"""

from __future__ import annotations

import importlib
import os
import traceback

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import Common, common_options, talk
from dflash_batch.worker.errors import UserError

VERBS = {
    "demo": "Run the bundled batch on the bundled model: see it work.",
    "check": "Look for bad lines in a batch file; queue nothing.",
    "run": "Run a batch file from start to end.",
    "submit": "Put a batch file into the queue and print its id.",
    "worker": "Work on queued batches until stopped.",
    "status": "Show workers and batches, or one batch.",
    "results": "Write the results of a queued batch.",
    "ls": "List the batches of the queue.",
    "pause": "Give out no more rows of a batch, or of any.",
    "resume": "Go on with what is paused.",
    "cancel": "End a batch; what is done stays.",
    "retry": "Queue the failed rows of a batch once more.",
    "priority": "Say which batch goes first.",
    "drain": "Have workers finish what they hold, and end.",
    "rm": "Remove batches and their results from the queue.",
    "serve": "Answer the OpenAI API: files, batches, live requests.",
    "models": "List, fetch and remove models; check that a pair fits.",
    "cache": "Look after the prefixes kept on SSD.",
    "bench": "Measure what decoding costs here, for --spec auto.",
    "doctor": "Look whether everything that is needed works here.",
    "draft": "Train a draft on your own prompts, or measure one.",
    "version": "Print the versions of what is installed.",
}

_HOMES = dict.fromkeys(("pause", "resume", "cancel", "priority", "drain"), "steer")
_HOMES["models"] = "shelf"
"""Verbs whose module has another name than they."""

WELCOME = """\
dflash-batch runs files of prompts through a language model, fast, and loses none.

To start:
  dflash-batch demo                               see it work with the bundled model
  dflash-batch run FILE.jsonl -m MODEL            run your own file

All commands: dflash-batch --help"""


class Verbs(click.Group):
    """A group that imports a verb when it is used, and reports what goes wrong in it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"dflash_batch.cli.{_HOMES.get(cmd_name, cmd_name)}")
        command = getattr(module, "command", None) or getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except UserError as error:
            trouble, code = str(error), exits.exit_code(error.code)
            _show_trace(ctx, error)
        except KeyboardInterrupt:
            trouble, code = "interrupted", exits.INTERRUPTED
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:  # the border: whatever it is, the user gets one line
            trouble = (
                f"internal error: {type(error).__name__}: {error}. "
                "DFLASH_BATCH_DEBUG=1 shows where; please report it"
            )
            code = exits.INTERNAL
            _show_trace(ctx, error)
        talk(f"{click.style('error', fg='red')}: {trouble}")
        ctx.exit(code)


def _show_trace(ctx: click.Context, error: Exception) -> None:
    common = ctx.find_object(Common)
    if os.environ.get("DFLASH_BATCH_DEBUG") or (common is not None and common.verbose > 1):
        talk("".join(traceback.format_exception(error)))


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@common_options
@click.pass_context
def main(ctx: click.Context) -> None:
    """Batch generation on Apple silicon: JSONL in, DFlash decoding, JSONL out.

    \b
    dflash-batch demo                       see it work with the bundled model
    dflash-batch run FILE.jsonl -m MODEL    run your own file

    Results go to files or stdout, talk goes to stderr. Exit codes: 0 all requests answered,
    1 some failed, 2 usage, 3 invalid input, 4 not found, 5 queue unreachable, 6 no worker can
    run it, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(WELCOME)


if __name__ == "__main__":
    main()
