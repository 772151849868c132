"""The state directory: where it is, and that it is ours alone. What lies in it, others decide."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from dflash_batch.worker.errors import UserError

ENV_HOME = "DFLASH_BATCH_HOME"


class HomeError(UserError):
    """Raised when the state directory cannot be made, is not ours, or cannot be written."""

    code = "home_unusable"


def home_dir(option: str | None) -> Path:
    """The absolute state directory, made with mode 0700 if it is not there.

    `option` (--home) comes before DFLASH_BATCH_HOME, and both before the platform's usual place.
    Raises HomeError.
    """
    named = option or os.environ.get(ENV_HOME)
    path = Path(named).expanduser() if named else platform_home()
    return private_dir(path.absolute())


def cost_dir(home: Path) -> Path:
    """Where measured cycle costs are kept."""
    return home / "costs"


def pending_dir(home: Path) -> Path:
    """Where records of workers wait while the queue is away."""
    return home / "pending"


def prefix_dir(home: Path) -> Path:
    """Where prefixes are kept on SSD."""
    return home / "prefixes"


def platform_home() -> Path:
    """Where this platform keeps an application's state."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "dflash-batch"
    state = os.environ.get("XDG_STATE_HOME")
    # The XDG rules say that a relative value is to be ignored.
    base = Path(state) if state and os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "dflash-batch"


def private_dir(path: Path) -> Path:
    """`path` as a directory that is ours; made with mode 0700, an older one is left as it is.

    Raises HomeError, which names the cure.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise HomeError(
            f"cannot make the state directory {path}: {error.strerror or error}. {_CHOOSE}"
        ) from error
    if found.st_uid != os.geteuid():
        raise HomeError(f"the state directory {path} belongs to another user. {_CHOOSE}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise HomeError(f"the state directory {path} cannot be written. {_CHOOSE}")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise HomeError(
            f"other users can write in the state directory {path}. "
            f"Take that away (chmod go-w), or choose another one with --home or {ENV_HOME}."
        )
    return path


_CHOOSE = f"Choose another one with --home or {ENV_HOME}."
