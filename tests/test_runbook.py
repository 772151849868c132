"""The runbook is true: its tables are the code's, and the commands in it are there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest

from dflash_batch.cli import exits
from dflash_batch.cli.main import VERBS, main
from dflash_batch.worker.conditions import IDLE_S, conditions
from dflash_batch.worker.contract import ErrorCode
from dflash_batch.worker.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "deploy" / "RUNBOOK.md").read_text("utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(title: str) -> set[str]:
    """The names in the first column."""
    cells = [name for first, *_ in rows(title) for name in re.findall(r"`([^`]+)`", first)]
    assert len(cells) == len(set(cells)), "a name has two rows"
    return set(cells)


def test_every_error_code_of_rows_is_explained() -> None:
    assert names("Error codes of rows") == {code.value for code in ErrorCode}


def test_every_exit_code_is_explained() -> None:
    codes = {value for name, value in vars(exits).items() if name.isupper() and name[0] != "_"}
    assert {int(first) for first, *_ in rows("Exit codes")} == codes


def test_every_error_of_a_command_is_explained_with_its_exit_code() -> None:
    for path in [*(ROOT / "cli").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]:
        if path.stem != "__init__":
            import_module(".".join(["dflash_batch", *path.relative_to(ROOT).with_suffix("").parts]))
    told = {re.findall(r"`(\w+)`", code)[0]: int(n) for code, n, *_ in rows("Errors of a command")}
    codes = {kind.code for kind in family(UserError) if kind.__module__.startswith("dflash_batch.")}
    assert told == {code: exits.exit_code(code) for code in codes}


def family(kind: type[UserError]) -> Iterator[type[UserError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def test_every_event_of_the_log_is_explained() -> None:
    events = {event for path in sorted((ROOT / "worker").rglob("*.py")) for event in logged(path)}
    assert names("What the log says") == events


def logged(path: Path) -> Iterator[str]:
    """The first words of all calls of `say` and `warn` in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if called and node.func.id in ("say", "warn"):  # type: ignore[attr-defined]
            for part in ast.walk(node.args[0]):  # type: ignore[attr-defined]
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def commands() -> list[str]:
    """Every `dflash-batch …` in code spans and blocks, without comments and prefixes."""
    blocks = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    spans = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", TEXT)
    lines = [line for block in blocks for line in block.splitlines()] + spans
    found = [re.sub(r"\s+#.*|^\S*/bin/", "", line).strip() for line in lines]
    return sorted({line for line in found if line.startswith("dflash-batch ")})


def test_the_runbook_names_commands() -> None:
    verbs = {shlex.split(line)[1] for line in commands()}
    assert {"doctor", "worker", "status", "check"} <= verbs


@pytest.mark.parametrize("line", commands())
def test_the_commands_named_are_there(line: str) -> None:
    _, verb, *words = shlex.split(line)
    assert verb in VERBS
    with main.make_context("dflash-batch", [verb]) as ctx:
        command = main.get_command(ctx, verb)
        assert command is not None
        command.make_context(verb, words, parent=ctx)  # raises what a user would see


def test_options_named_alone_are_there() -> None:
    options = set(re.findall(r"`(--[a-z-]+)[^`]*`", TEXT))
    known: set[str] = set()
    with main.make_context("dflash-batch", ["version"]) as ctx:
        for verb in VERBS:
            command = main.get_command(ctx, verb)
            assert command is not None
            known |= {
                name for p in command.params if isinstance(p, click.Option) for name in p.opts
            }
    assert options <= known
    assert "--launchd" in options


def test_the_files_named_are_there() -> None:
    named = set(re.findall(r"\]\(([^)]+)\)", TEXT)) | set(re.findall(r"deploy/([\w.-]+)", TEXT))
    assert {name for name in named if not (ROOT / "deploy" / name).exists()} == set()
    assert len(named) >= 3


def test_every_condition_is_explained() -> None:
    told = names("When a worker rests")
    for word in told:
        assert len(conditions(word)) == 1
    assert {"plugged", "idle", "cool", "charged"} <= told
    assert f"for {IDLE_S / 60:.0f} minutes" in section("When a worker rests")
