"""What all verbs have in common: where the state is, how much is said, and where."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class Common:
    """Options that may stand before or after the verb; the later one counts."""

    home: str | None = None
    redis: str | None = None
    insecure: bool = False
    quiet: bool = False
    verbose: int = 0
    no_color: bool = False


pass_common = click.make_pass_decorator(Common, ensure=True)


def common_options(function: _F) -> _F:
    """Give a command the options of `Common`; `pass_common` hands them over."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def cache_dir_option(function: _F) -> _F:
    """`--cache-dir DIR`: the place of the prefix cache, which so far lives in memory only."""
    return _CACHE_DIR(function)


def talk(text: str = "") -> None:
    """A line for people, on stderr."""
    click.echo(text, err=True)


def printable(text: str) -> str:
    """`text` on one line, without what could command a terminal."""
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    common = ctx.ensure_object(Common)
    if value and param.name is not None:
        setattr(common, param.name, value)
    if common.no_color or os.environ.get("NO_COLOR"):
        ctx.color = False


def _say_unused(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        talk(
            f"--cache-dir {value}: not used by this version, which keeps shared prefixes in memory"
        )


def _option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    return click.option(*names, expose_value=False, callback=_keep, **settings)


_OPTIONS = (
    _option(
        "--home",
        metavar="DIR",
        help="Where state is kept. [env: DFLASH_BATCH_HOME; default: the platform's usual place]",
    ),
    _option(
        "--redis",
        metavar="URL",
        help="A Redis or Valkey to use instead of our own. [env: DFLASH_BATCH_REDIS]",
    ),
    _option(
        "--insecure",
        is_flag=True,
        envvar="DFLASH_BATCH_INSECURE",
        help="Take a --redis over which others on the network can read along. "
        "[env: DFLASH_BATCH_INSECURE]",
    ),
    _option("-q", "--quiet", is_flag=True, help="Say nothing but errors."),
    _option("-v", "--verbose", count=True, help="Say more; twice shows where an error arose."),
    _option("--no-color", is_flag=True, help="No colours. [env: NO_COLOR]"),
)
_CACHE_DIR = click.option(
    "--cache-dir",
    metavar="DIR",
    expose_value=False,
    callback=_say_unused,
    help="Where the prefix cache is to live. Not used yet: prefixes are kept in memory.",
)
