"""Where the machine's power comes from, and how full its battery is."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_batch.worker.ask import ask


@dataclass(frozen=True)
class Power:
    """A reading. A machine without a battery is plugged and has no charge."""

    plugged: bool
    charge: float | None = None  # 0 to 1
    charging: bool = False


def power() -> Power | None:
    """What the system tells; None when it does not."""
    if sys.platform == "darwin":
        said = ask("/usr/bin/pmset", "-g", "batt")
        return None if said is None else pmset_power(said)
    return sysfs_power(Path("/sys/class/power_supply"))


_SOURCE = re.compile(r"Now drawing from '([^']+)'")
_BATTERY = re.compile(r"-InternalBattery.*?\s(\d+)%;\s*([^;]+);")


def pmset_power(said: str) -> Power | None:
    """By the text of `pmset -g batt`."""
    source = _SOURCE.search(said)
    if source is None:
        return None
    plugged = source[1] == "AC Power"
    battery = _BATTERY.search(said)
    if battery is None:
        return Power(plugged)
    state = battery[2].strip().lower()
    return Power(
        plugged,
        charge=int(battery[1]) / 100,
        charging=state in ("charging", "charged", "finishing charge"),
    )


def sysfs_power(folder: Path) -> Power | None:
    """By a folder like Linux's /sys/class/power_supply; an empty one is a machine on mains."""
    if not folder.is_dir():
        return None
    mains: list[bool] = []
    charges: list[float] = []
    states: list[str] = []
    for supply in sorted(folder.iterdir()):
        if _word(supply / "scope") == "Device":  # of a mouse or a headset
            continue
        match _word(supply / "type"):
            case "Battery":
                states.append(_word(supply / "status"))
                capacity = _word(supply / "capacity")
                charges += [int(capacity) / 100] if capacity.isdecimal() else []
            case "Mains" | "USB" | "Wireless":
                mains.append(_word(supply / "online") not in ("0", ""))
            case _:
                pass
    return Power(
        plugged=any(mains) if mains else "Discharging" not in states,
        charge=min(charges, default=None),
        charging=bool(states) and set(states) <= {"Charging", "Full"},
    )


def _word(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:  # a driver may refuse a single value
        return ""
