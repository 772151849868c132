"""How long nobody has touched the machine."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from dflash_batch.worker.ask import ask


def idle_s() -> float | None:
    """Seconds since the last input of a person; None when the system does not tell."""
    if sys.platform == "darwin":
        said = ask("/usr/sbin/ioreg", "-r", "-d", "1", "-c", "IOHIDSystem")
        return None if said is None else ioreg_idle_s(said)
    dev = Path("/dev")
    return terminals_idle_s([*dev.glob("pts/[0-9]*"), *dev.glob("tty[0-9]*")], time.time())


_IDLE_NS = re.compile(r'"HIDIdleTime"\s*=\s*(\d+)')


def ioreg_idle_s(said: str) -> float | None:
    """By what `ioreg` tells of keyboard, mouse and trackpad."""
    found = _IDLE_NS.search(said)
    return None if found is None else int(found[1]) / 1e9


def terminals_idle_s(terminals: Iterable[Path], now: float) -> float | None:
    """As `w` does it: a terminal's access time is when somebody last typed there. `now`: Unix."""
    touched = []
    for terminal in terminals:
        try:
            touched.append(terminal.stat().st_atime)
        except OSError:  # closed since
            continue
    return max(0.0, now - max(touched)) if touched else None
