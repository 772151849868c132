"""What all verbs have in common: where the state is, how much is said, and where."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from dflash_batch.worker.home import prefix_dir

_F = TypeVar("_F", bound=Callable[..., Any])
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])?(?:i?b)?", re.ASCII)


@dataclass
class Common:
    """Options that may stand before or after the verb; the later one counts."""

    home: str | None = None
    redis: str | None = None
    insecure: bool = False
    quiet: bool = False
    verbose: int = 0
    no_color: bool = False
    cache_dir: str | None = None
    cache_size: int | None = None  # bytes

    def cache_folder(self, home: Path) -> str | None:
        """Where prefixes are kept on SSD; None: nowhere."""
        if self.cache_dir is None:
            return str(prefix_dir(home))
        if self.cache_dir == "none":
            return None
        return str(Path(self.cache_dir).expanduser().absolute())


pass_common = click.make_pass_decorator(Common, ensure=True)


def common_options(function: _F) -> _F:
    """Give a command the options of `Common`; `pass_common` hands them over."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def cache_options(function: _F) -> _F:
    """`--cache-dir` and `--cache-size`: the prefix cache on SSD. They go into `Common` too."""
    return _CACHE_DIR(_CACHE_SIZE(function))


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """Bytes, with a unit if need be: 500M, 50G, 1.5T. Units are powers of 1,024."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip().lower())
        if match is None:
            self.fail(f"{value!r} is not a size such as 50G", param, ctx)
        return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


def size_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


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
_CACHE_DIR = _option(
    "--cache-dir",
    metavar="DIR|none",
    help="Where prefixes are kept on SSD, for the next time. [default: prefixes in --home]",
)
_CACHE_SIZE = _option(
    "--cache-size",
    type=Size(),
    metavar="SIZE",
    help="Most bytes of it, such as 20G. [default: 50G]",
)
