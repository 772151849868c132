"""What `doctor` looks at: the installation, the machine, the state directory and the queue.

Each check is a function from a Subject to findings; a new one is appended to CHECKS. What needs
MLX is in decoder/checkup.py and runs in a process of its own, as an engine would.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import redis
from packaging.requirements import Requirement

from dflash_batch.decoder.finding import Finding
from dflash_batch.worker.ask import ask
from dflash_batch.worker.binary import find_binary
from dflash_batch.worker.contract import SCHEMA, ModelRef
from dflash_batch.worker.errors import UserError
from dflash_batch.worker.footprint import Pressure, pressure
from dflash_batch.worker.heat import Heat, heat
from dflash_batch.worker.power import power
from dflash_batch.worker.queue import Queue, connect
from dflash_batch.worker.server import check_server

PYTHON = (3, 11)
FULL_BYTES = 1 << 30
LOW_BYTES = 10 << 30
SKEW_S = 5.0
ENGINE_CHECKUP = (
    # the engine's own imports first: what is missing there would be missing in every worker
    "import dflash_batch.worker.engine; from dflash_batch.decoder.checkup import main; main()"
)


@dataclass(frozen=True)
class Subject:
    """What is looked at. `home` is there; `url` and `model` may be None."""

    home: Path
    url: str | None = field(repr=False)  # it may hold a password
    model: ModelRef | None = None
    insecure: bool = False  # `url` may be where others can read along


Check = Callable[[Subject], Iterator[Finding]]


def python(subject: Subject) -> Iterator[Finding]:
    """The interpreter, and on a Mac that it is not an Intel one under Rosetta."""
    said = f"{platform.python_version()} on {platform.platform()}"
    if sys.version_info < PYTHON:
        yield Finding("python", "failed", said, "Python 3.11 or newer is needed")
    elif sys.platform == "darwin" and platform.machine() != "arm64":
        yield Finding("python", "failed", said, "use a Python for arm64; MLX has no Intel Macs")
    else:
        yield Finding("python", "ok", said)


def packages(subject: Subject) -> Iterator[Finding]:
    """What is installed against what our own metadata asks for."""
    wanted = [Requirement(text) for text in metadata.requires("dflash-batch") or []]
    versions = []
    for need in wanted:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = _version(need.name)
        if version is None:
            yield Finding("packages", "failed", f"{need.name} is missing", f'pip install "{need}"')
        elif not need.specifier.contains(version, prereleases=True):
            said = f"{need.name} is {version}; {need.specifier} is needed"
            yield Finding("packages", "failed", said, f'pip install "{need}"')
        elif need.name.startswith("mlx"):
            versions.append(f"{need.name} {version}")
    yield Finding("packages", "ok", ", ".join([f"dflash-batch {_own_version()}", *versions]))


def disk(subject: Subject) -> Iterator[Finding]:
    """Room where state is kept."""
    free = shutil.disk_usage(subject.home).free
    said = f"{free / 2**30:,.0f} GiB free at {subject.home}"
    if free < FULL_BYTES:
        yield Finding("disk", "failed", said, "make room, or choose another place with --home")
    elif free < LOW_BYTES:
        yield Finding("disk", "warning", said, "results, the queue and models need room")
    else:
        yield Finding("disk", "ok", said)


def modes(subject: Subject) -> Iterator[Finding]:
    """That nobody else can read what the state directory holds: prompts among it."""
    mode = stat.S_IMODE(subject.home.stat().st_mode)
    if mode & 0o077:
        yield Finding(
            "state",
            "warning",
            f"others may look into {subject.home} (mode {mode:04o})",
            f"chmod 700 '{subject.home}'",
        )
    else:
        yield Finding("state", "ok", f"{subject.home} is yours alone")


def power_source(subject: Subject) -> Iterator[Finding]:
    """Mains or battery."""
    now = power()
    if now is None:
        yield Finding("power", "note", "the system does not tell where its power comes from")
    elif not now.plugged:
        charge = f" at {now.charge:.0%}" if now.charge is not None else ""
        yield Finding("power", "warning", f"on battery power{charge}", "plug it in for long runs")
    else:
        yield Finding("power", "ok", "plugged in")


def sleep_settings(subject: Subject) -> Iterator[Finding]:
    """On macOS, what puts this Mac to sleep or slows it down."""
    said = ask("/usr/bin/pmset", "-g") if sys.platform == "darwin" else None
    if said is not None:
        yield from pmset_findings(said)


def pmset_findings(said: str) -> Iterator[Finding]:
    """By the text of `pmset -g`."""
    settings = dict(re.findall(r"^\s*(\w+)\s+(\d+)\b", said, re.MULTILINE))
    minutes = int(settings.get("sleep", 0))
    if minutes:
        text = f"idle sleep after {minutes} min; a worker holds it off while rows run"
        yield Finding("sleep", "note", text, "sudo pmset -c sleep 0, for a Mac that others rely on")
    else:
        yield Finding("sleep", "ok", "no idle sleep")
    if settings.get("lowpowermode", "0") != "0":
        cure = "sudo pmset -c lowpowermode 0"
        yield Finding("sleep", "warning", "low power mode slows the GPU", cure)


def temperature(subject: Subject) -> Iterator[Finding]:
    """Heat."""
    now = heat()
    if now is None:
        yield Finding("heat", "note", "the system does not tell its heat")
    elif now >= Heat.SERIOUS:
        cure = "let it cool, or look at its fans; a worker rests at critical heat"
        yield Finding("heat", "warning", f"{now.name.lower()}: it slows itself down", cure)
    else:
        yield Finding("heat", "ok", now.name.lower())


def memory(subject: Subject) -> Iterator[Finding]:
    """Memory pressure."""
    now = pressure()
    if now in (Pressure.WARNING, Pressure.CRITICAL):
        cure = "close programs, or use a smaller model or --max-batch"
        yield Finding("memory", "warning", f"pressure: {now.name.lower()}", cure)
    else:
        yield Finding("memory", "ok", f"pressure: {now.name.lower()}")


def queue(subject: Subject) -> Iterator[Finding]:
    """The server named by --redis, or that one of our own could be started."""
    try:
        if subject.url is None:
            yield Finding("queue", "ok", f"a server of our own: {find_binary()}")
            return
        check_server(subject.url, insecure=subject.insecure)
        yield from _shared_queue(subject.url)
    except UserError as error:
        yield Finding("queue", "failed", str(error))
    except redis.RedisError as error:
        yield Finding("queue", "failed", f"the queue's server refuses: {error}")


def _shared_queue(url: str) -> Iterator[Finding]:
    client = connect(url)
    try:
        facts = client.info("server") | client.info("persistence")
        name = facts.get("server_name") or "redis"
        version = facts.get("valkey_version") or facts.get("redis_version")
        yield Finding("queue", "ok", f"{name} {version} answers")
        if not int(facts.get("aof_enabled", 0)):
            cure = "appendonly yes, as in deploy/valkey.conf"
            yield Finding("queue", "warning", "a restart of it loses the queue", cure)
        yield from _openness(url)
        seconds, micros = client.time()
        skew = abs(time.time() - (seconds + micros / 1e6))
        if skew > SKEW_S:
            text = f"its clock and ours are {skew:,.0f} s apart"
            yield Finding("queue", "note", text, "leases go by its clock alone; shown times differ")
        yield from _workers(Queue(client, mirror=False))
    finally:
        client.close()


def _openness(url: str) -> Iterator[Finding]:
    """A queue on a network without a password is everybody's."""
    parts = urlsplit(url)
    local = parts.scheme == "unix" or parts.hostname in ("localhost", "127.0.0.1", "::1", None)
    if local:
        return
    if not parts.password:
        text = f"no password is given for {parts.hostname}: who reaches it may read prompts"
        yield Finding("queue", "warning", text, "requirepass in its configuration")
    if parts.scheme != "rediss":
        text = "prompts travel unencrypted, unless through WireGuard or SSH"
        yield Finding("queue", "note", text, "rediss://, or a tunnel")


def _workers(queue: Queue) -> Iterator[Finding]:
    """Who works on it, and whether they speak one version."""
    workers = queue.workers()
    versions = sorted({worker.version for worker in workers})
    yield Finding("workers", "note" if not workers else "ok", f"{len(workers)} up")
    if len(versions) > 1:
        yield Finding("workers", "note", f"of several versions: {', '.join(versions)}")
    if any(not worker.schema_min <= SCHEMA <= worker.schema_max for worker in workers):
        text = f"some cannot read what this version submits (schema {SCHEMA})"
        yield Finding("workers", "warning", text, "upgrade them")


def engine(subject: Subject) -> Iterator[Finding]:
    """MLX's device and arithmetic, and the model if one is named, in a process of its own."""
    command = [sys.executable, "-c", ENGINE_CHECKUP]
    if (model := subject.model) is not None:
        spec = {"target": model.target, "draft": model.draft, "block": model.block}
        command.append(json.dumps(spec | {"dtype": model.dtype}))
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):  # a library may print too
            yield Finding(**json.loads(line))
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        yield Finding("engine", "failed", f"an engine would die: {words[-1]}")


CHECKS: list[Check] = [
    python,
    packages,
    engine,
    memory,
    disk,
    modes,
    power_source,
    sleep_settings,
    temperature,
    queue,
]
"""In the order in which they are shown."""


def examine(subject: Subject) -> Iterator[Finding]:
    """What all checks find, one by one."""
    for check in CHECKS:
        yield from check(subject)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _own_version() -> str:
    return metadata.version("dflash-batch")
