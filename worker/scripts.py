"""The scripts of the queue: the texts in scripts/ as one, behind the names of keys and constants.

Every change of a batch, a shard or a row is one operation in them, and so is atomic.
"""

from __future__ import annotations

from pathlib import Path

from dflash_batch.worker import states
from dflash_batch.worker.contract import TOP_PRIORITY, ErrorCode, Key

CRASH = 2
"""Suspicion of a death that was seen: the engine died with the shard in it."""

EXPIRY = 1
"""Suspicion of a lease that ran out: sleep and partitions look the same."""

KEEP_S = 7 * 86400
"""Results and the record of a batch are kept this long after its end."""

AGE_MS = 30 * 60_000
"""A batch that gets nothing for so long rises by one class of priority."""

RETRY_MS = 10_000
"""Pause before a row is tried the second time; it doubles with each further attempt."""

HOT_S = 600
"""A group is taken to be in the cache of the worker that leased it last, for so long."""

HUNGRY_MS = 1000
"""A worker that found nothing counts as idle for so long."""

_ORDER = ("prelude", "turns", "ready", "lease", "batch", "row")
"""Each file uses what those before it define."""


def script_text() -> str:
    """The whole script; ARGV[1] names the operation."""
    folder = Path(__file__).with_name("scripts")
    parts = [(folder / f"{name}.lua").read_text(encoding="utf-8") for name in _ORDER]
    return "\n".join([_head(), *parts, "return operation[ARGV[1]]()\n"])


def _head() -> str:
    names = {
        "leases": Key.LEASES,
        "batches": Key.BATCHES,
        "models": Key.MODELS,
        "meta": Key.META,
        "workers": Key.WORKERS,
        "aging": Key.AGING,
        "later": Key.LATER,
        "batch": Key.batch(""),
        "shard": Key.shard(""),
        "runnable": Key.runnable(""),
        "ready": Key.ready(""),
        "shared": Key.shared(""),
        "group": Key.group_of(""),
        "owners": Key.owners(""),
        "suspects": Key.suspects(""),
        "shards": Key.shards(""),
        "done": Key.done(""),
        "results": Key.results(""),
        "failed": Key.failed(""),
        "attempts": Key.attempts(""),
        "held": Key.worker_leases(""),
        "worker": Key.worker(""),
        "drain": Key.drain(""),
        "hot": Key.hot(""),
        "hungry": Key.hungry(""),
    }
    constants = {
        "CRASH": CRASH,
        "EXPIRY": EXPIRY,
        "KEEP_S": KEEP_S,
        "AGE_MS": AGE_MS,
        "RETRY_MS": RETRY_MS,
        "HOT_S": HOT_S,
        "HUNGRY_MS": HUNGRY_MS,
        "TOP_CLASS": TOP_PRIORITY,
        "CANCELLED": f"'{ErrorCode.BATCH_CANCELLED.value}'",
        "BATCH": states.as_lua(states.BATCH),
        "SHARD": states.as_lua(states.SHARD),
    }
    keys = ", ".join(f"{name} = '{key}'" for name, key in names.items())
    return f"local K = {{ {keys} }}\n" + "".join(
        f"local {name} = {value}\n" for name, value in constants.items()
    )
