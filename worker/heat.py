"""How hot the machine is, in the system's own four steps."""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any


class Heat(IntEnum):
    """As ProcessInfo.thermalState of macOS has them."""

    NOMINAL = 0
    FAIR = 1
    SERIOUS = 2
    CRITICAL = 3


SERIOUS_BELOW = 15_000
"""On Linux, heat is serious this many thousandths of a degree below where a zone trips,"""

CRITICAL_BELOW = 5_000
"""and critical this many below: at the trip itself the kernel turns the machine off."""


def heat() -> Heat | None:
    """What the system tells; None when it does not."""
    if sys.platform == "darwin":
        return notify_heat(_libc())
    return sysfs_heat(Path("/sys/class/thermal"))


def notify_heat(libc: Any) -> Heat | None:
    """By the state of macOS's thermal notification, which ProcessInfo reads too.

    Levels (OSThermalNotification.h): 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping.
    """
    token, level = ctypes.c_int(0), ctypes.c_uint64(0)
    name = b"com.apple.system.thermalpressurelevel"
    if libc.notify_register_check(name, ctypes.byref(token)) != 0:
        return None
    try:
        if libc.notify_get_state(token, ctypes.byref(level)) != 0:
            return None
    finally:
        libc.notify_cancel(token)
    return Heat(min(level.value, Heat.CRITICAL))


def sysfs_heat(folder: Path) -> Heat | None:
    """By a folder like Linux's /sys/class/thermal: the zone that is nearest to its trip counts."""
    margins = [
        trip - temperature
        for zone in sorted(folder.glob("thermal_zone*"))
        if (temperature := _number(zone / "temp")) is not None and temperature > 0
        for trip in _trips(zone)
    ]
    if not margins:
        return None
    if min(margins) <= CRITICAL_BELOW:
        return Heat.CRITICAL
    return Heat.SERIOUS if min(margins) <= SERIOUS_BELOW else Heat.NOMINAL


def _trips(zone: Path) -> list[int]:
    """Where the zone trips, in thousandths of a degree. Some firmware tells 0 or less: no trip."""
    trips = []
    for kind in sorted(zone.glob("trip_point_*_type")):
        name = kind.name.removesuffix("_type")
        value = _number(zone / f"{name}_temp")
        if value is not None and value > 0 and _text(kind) in ("hot", "critical"):
            trips.append(value)
    return trips


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:  # a sleeping sensor answers with an error
        return ""


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.notify_register_check.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    libc.notify_get_state.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.notify_cancel.argtypes = [ctypes.c_int]
    return libc
