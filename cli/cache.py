"""`dflash-batch cache`: look after the prefixes kept on SSD.

The store is opened as the engine opens it, and may be in use meanwhile. Nothing here loads MLX.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from dflash_batch.cli import exits
from dflash_batch.cli.common import (
    Common,
    Size,
    cache_options,
    common_options,
    pass_common,
    printable,
    size_text,
    talk,
)
from dflash_batch.decoder.store.errors import StoreError
from dflash_batch.decoder.store.index import CACHE_ERRORS, Entry, Use
from dflash_batch.decoder.store.store import LAYOUT, Limits, Store
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.home import home_dir

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object.")

SHOWN = 12
"""Digits of a key that are shown; the first few that are unambiguous will do as an argument."""


class CacheNotFound(UserError):
    """Raised when there is no store in the folder, or no entry of that key in it."""

    code = "cache_not_found"


class CacheUnusable(UserError):
    """Raised when the store cannot be opened or read."""

    code = "cache_unusable"


@click.group("cache")
def command() -> None:
    """Look after the prefixes kept on SSD.

    Prompts that begin alike are computed once, and what is worth it is kept for the next time. It
    can be removed at any time: nothing is lost but time.

    \b
    Example: dflash-batch cache stats
    """


@command.command("stats")
@_AS_JSON
@cache_options
@common_options
@pass_common
def stats(common: Common, as_json: bool) -> None:
    """Show how much there is, and of what use it was."""
    with _opened(common) as store:
        report = _stats(store)
    if as_json:
        click.echo(json.dumps(report))
        return
    models: dict[str, dict[str, int]] = report["models"]
    click.echo(f"folder   {printable(report['folder'])}")
    click.echo(f"entries  {report['entries']:,}, {report['pinned']:,} of them pinned")
    click.echo(f"bytes    {size_text(report['bytes'])} of {size_text(report['cap'])}")
    click.echo(f"disk     {size_text(report['free'])} free; {size_text(report['floor'])} stay free")
    click.echo(
        f"written  {size_text(report['written_today'])} today, "
        f"of {size_text(report['daily'])} a day at most"
    )
    for name, amounts in models.items():
        size = size_text(amounts["bytes"])
        click.echo(
            printable(
                f"  {name}   {amounts['entries']:,} entries, {amounts['tokens']:,} tokens, {size}"
            )
        )
    for name, count in report["counters"].items():
        click.echo(f"  {name:<20} {count:,}")


@command.command("ls")
@_AS_JSON
@cache_options
@common_options
@pass_common
def ls(common: Common, as_json: bool) -> None:
    """List entries, the one used last first."""
    with _opened(common) as store:
        uses = store.uses()
        entries = sorted(store.entries().values(), key=lambda e: -uses[e.key].tick)
        listed = [_listed(entry, uses[entry.key]) for entry in entries]
    if as_json:
        click.echo(json.dumps({"entries": listed}))
        return
    for entry in listed:
        made = datetime.fromtimestamp(entry["created"])
        pin = "  pinned" if entry["pinned"] else ""
        click.echo(
            printable(
                f"{entry['key'][:SHOWN]}  {entry['tokens']:>7,} tokens  "
                f"{size_text(entry['bytes']):>9}  used {entry['uses']:>4,} times  "
                f"{made:%d %b %H:%M}  {entry['model']}{pin}"
            )
        )


@command.command("pin")
@click.argument("key")
@click.option("--off", is_flag=True, help="Let it go again when room is needed.")
@_AS_JSON
@cache_options
@common_options
@pass_common
def pin(common: Common, key: str, off: bool, as_json: bool) -> None:
    """Keep the entry KEY whatever room is needed. The first digits of a key will do."""
    with _opened(common) as store:
        entry = _find(store, key)
        store.pin(entry.key, not off)
        listed = _listed(entry, store.index.use(entry.key))
    if as_json:
        click.echo(json.dumps(listed))
    elif not common.quiet:
        talk(f"{entry.key[:SHOWN]} is {'not ' if off else ''}pinned")


@command.command("prune")
@click.option(
    "--to", "to", type=Size(), metavar="SIZE", help="Bytes to be left. [default: the cap]"
)
@_AS_JSON
@cache_options
@common_options
@pass_common
def prune(common: Common, to: int | None, as_json: bool) -> None:
    """Remove what was used least recently, down to a size, and what a crash left behind."""
    with _opened(common, cap=to) as store:
        gone = store.tidy()
        left = store.bytes
    if as_json:
        click.echo(json.dumps({"removed": gone, "bytes": left}))
    elif not common.quiet:
        talk(f"{gone:,} files removed, {size_text(left)} left")


@command.command("verify")
@_AS_JSON
@cache_options
@common_options
@pass_common
@click.pass_context
def verify(ctx: click.Context, common: Common, as_json: bool) -> None:
    """Read every entry; what is not sound is set aside, and the exit code is 1."""
    with _opened(common) as store:
        found = [(entry.key, wrong) for entry, wrong in store.verify()]
    bad = {key: wrong for key, wrong in found if wrong is not None}
    if as_json:
        click.echo(json.dumps({"checked": len(found), "bad": bad}))
    elif not common.quiet or bad:
        for key, wrong in bad.items():
            talk(f"{key[:SHOWN]}  {wrong}")
        talk(f"{len(found):,} checked, {len(bad):,} not sound" + (", set aside" if bad else ""))
    ctx.exit(exits.SOME_FAILED if bad else exits.OK)


@command.command("purge")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_AS_JSON
@cache_options
@common_options
@pass_common
def purge(common: Common, yes: bool, as_json: bool) -> None:
    """Remove every entry, pinned ones too: what came of prompts is then gone."""
    with _opened(common) as store:
        if not yes:
            click.confirm(f"remove all {len(store.entries()):,} entries?", abort=True, err=True)
        count = store.purge()
    if as_json:
        click.echo(json.dumps({"removed": count}))
    elif not common.quiet:
        talk(f"{count:,} entries removed")


@contextmanager
def _opened(common: Common, cap: int | None = None) -> Iterator[Store]:
    """The store of --cache-dir or of the home. Raises CacheNotFound, CacheUnusable."""
    folder = common.cache_folder(home_dir(common.home))
    if folder is None or not (Path(folder) / LAYOUT).is_dir():
        raise CacheNotFound(f"there is no prefix cache in {folder}: nothing has been kept yet")
    cap = common.cache_size if cap is None else cap
    try:
        store = Store(Path(folder), Limits() if cap is None else Limits(cap=cap))
        try:
            yield store
        finally:
            store.close()
    except (StoreError, *CACHE_ERRORS) as error:
        raise CacheUnusable(
            f"the prefix cache in {folder} cannot be used: {error}. It may be removed: nothing is "
            "lost but time"
        ) from error


def _find(store: Store, key: str) -> Entry:
    found = [entry for name, entry in store.entries().items() if name.startswith(key.lower())]
    if len(found) != 1:
        what = "no entry" if not found else f"{len(found)} entries"
        raise CacheNotFound(f"{what} of the key {key}; dflash-batch cache ls lists them")
    return found[0]


def _listed(entry: Entry, use: Use) -> dict[str, Any]:
    return {
        "key": entry.key,
        "model": entry.label,
        "fingerprint": entry.fingerprint,
        "tokens": entry.length,
        "bytes": entry.size,
        "uses": use.count,
        "pinned": use.pinned,
        "created": entry.created,
    }


def _stats(store: Store) -> dict[str, Any]:
    entries, uses = store.entries(), store.uses()
    models: dict[str, Counter[str]] = {}
    for entry in entries.values():
        models.setdefault(entry.label, Counter()).update(
            entries=1, tokens=entry.length, bytes=entry.size
        )
    counters = store.index.counters()
    return {
        "folder": str(store.folder),
        "entries": len(entries),
        "pinned": sum(use.pinned for use in uses.values()),
        "bytes": store.bytes,
        "cap": store.limits.cap,
        "free": store.free(),
        "floor": store.limits.floor,
        "written_today": store.written_today(),
        "daily": store.limits.daily,
        "models": {name: dict(amounts) for name, amounts in sorted(models.items())},
        "counters": {k: n for k, n in counters.items() if k not in ("tick", "generation", "met")},
    }
