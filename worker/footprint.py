"""How much memory a process takes, and how short memory is, as the system tells it.

On macOS a process's footprint is what it owes: dirty, compressed and GPU memory, the figure of
Activity Monitor. Resident size leaves out what was compressed, so it falls just when memory gets
short; Linux has nothing better that is cheap.
"""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

_RUSAGE_INFO_V4 = 4
_KB = 1024

WARNING_SHARE = 0.10
"""On Linux, memory is short when less than this share of it is available,"""

CRITICAL_SHARE = 0.04
"""and nearly gone below this one."""


class Pressure(IntEnum):
    """How short memory is; the higher, the worse. UNKNOWN is no ground for anything."""

    UNKNOWN = 0
    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def footprint(pid: int) -> int | None:
    """Bytes of memory that the process takes; None if it is gone, not ours, or nobody tells."""
    if sys.platform == "darwin":
        return darwin_footprint(pid, _libc())
    return proc_footprint(Path(f"/proc/{pid}"))


def pressure() -> Pressure:
    """How short memory is on this machine."""
    if sys.platform == "darwin":
        return darwin_pressure(_libc())
    return proc_pressure(Path("/proc/meminfo"))


class RusageInfoV4(ctypes.Structure):
    """`struct rusage_info_v4` of macOS's <sys/resource.h>: a uuid and 35 numbers, 296 bytes."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("before", ctypes.c_uint64 * 6),  # user and system time, wake-ups, page-ins, wired size
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("after", ctypes.c_uint64 * 27),
    )


def darwin_footprint(pid: int, libc: Any) -> int | None:
    """What `proc_pid_rusage` of this C library says."""
    usage = RusageInfoV4()
    if libc.proc_pid_rusage(pid, _RUSAGE_INFO_V4, ctypes.byref(usage)) != 0:
        return None
    return int(usage.phys_footprint)


def darwin_pressure(libc: Any) -> Pressure:
    """The kernel's own level: 1, 2 or 4, as ours are."""
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    name = b"kern.memorystatus_vm_pressure_level"
    if libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0) != 0:
        return Pressure.UNKNOWN
    return Pressure(level.value) if level.value in list(Pressure) else Pressure.UNKNOWN


def proc_footprint(folder: Path) -> int | None:
    """Resident bytes, with what was swapped out, by a folder like /proc/PID."""
    facts = _kilobytes(folder / "status")
    if "VmRSS" not in facts:  # a zombie, or gone
        return None
    return (facts["VmRSS"] + facts.get("VmSwap", 0)) * _KB


def proc_pressure(meminfo: Path) -> Pressure:
    """Judged by the share of memory that could be had without swapping."""
    facts = _kilobytes(meminfo)
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable")
    if not total or available is None:
        return Pressure.UNKNOWN
    share = available / total
    if share < CRITICAL_SHARE:
        return Pressure.CRITICAL
    return Pressure.WARNING if share < WARNING_SHARE else Pressure.NORMAL


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of /proc; none if it cannot be read."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return {}
    lines = [line.split() for line in text.splitlines()]
    return {
        words[0].rstrip(":"): int(words[1])
        for words in lines
        if len(words) == 3 and words[2] == "kB" and words[1].isdecimal()
    }


@cache
def _libc() -> Any:
    """The C library of this process; made once, with the types of what we call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.proc_pid_rusage.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    libc.sysctlbyname.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    return libc
