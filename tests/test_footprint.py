"""Memory readings, from the system this runs on and from made-up ones."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_batch.worker.footprint import (
    Pressure,
    RusageInfoV4,
    darwin_footprint,
    darwin_pressure,
    footprint,
    pressure,
    proc_footprint,
    proc_pressure,
)

MB = 1 << 20


def test_a_process_that_takes_memory_has_a_larger_footprint() -> None:
    script = "import sys; held = bytearray(b'x' * {}); print(flush=True); sys.stdin.read()"
    sizes = []
    for held in (1, 96 * MB):
        process = subprocess.Popen(
            [sys.executable, "-c", script.format(held)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        sizes.append(footprint(process.pid))
        process.communicate()
    small, large = sizes
    assert small is not None
    assert large is not None
    assert 90 * MB < large - small < 120 * MB


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert footprint(process.pid) is None


def test_this_machine_tells_its_pressure() -> None:
    assert pressure() in (Pressure.NORMAL, Pressure.WARNING, Pressure.CRITICAL)
    assert (footprint(os.getpid()) or 0) > MB


@pytest.mark.parametrize(
    ("available", "level"),
    [(500, Pressure.NORMAL), (99, Pressure.WARNING), (39, Pressure.CRITICAL)],
)
def test_pressure_is_judged_by_what_is_available(
    tmp_path: Path, available: int, level: Pressure
) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  {available} kB\n")
    assert proc_pressure(file) is level


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "MemTotal: 8 kB\n", "\udcff"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "meminfo"
    file.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    assert proc_pressure(file) is Pressure.UNKNOWN
    assert proc_pressure(tmp_path / "none") is Pressure.UNKNOWN
    assert proc_footprint(tmp_path) is None


def test_swapped_out_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  10 kB\nVmSwap:\t  5 kB\n")
    assert proc_footprint(tmp_path) == 15 * 1024


def test_the_record_of_macos_has_its_layout() -> None:
    assert ctypes.sizeof(RusageInfoV4) == 296
    assert RusageInfoV4.phys_footprint.offset == 72


class FakeLibc:
    """macOS's C library as far as we call it: it writes where the real one would."""

    def __init__(self, *, status: int = 0, footprint: int = 0, level: int = 1) -> None:
        self._status, self._footprint, self._level = status, footprint, level

    def proc_pid_rusage(self, pid: int, flavour: int, buffer: Any) -> int:
        assert flavour == 4
        record = bytearray(296)
        record[72:80] = self._footprint.to_bytes(8, "little")
        ctypes.memmove(buffer, bytes(record), len(record))
        return self._status

    def sysctlbyname(self, name: bytes, old: Any, size: Any, new: None, length: int) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        ctypes.memmove(old, self._level.to_bytes(4, "little"), 4)
        return self._status


def test_macos_tells_the_footprint_and_the_level() -> None:
    assert darwin_footprint(1, FakeLibc(footprint=7 << 30)) == 7 << 30
    assert darwin_footprint(1, FakeLibc(status=-1)) is None
    assert darwin_pressure(FakeLibc(level=4)) is Pressure.CRITICAL
    assert darwin_pressure(FakeLibc(level=3)) is Pressure.UNKNOWN
    assert darwin_pressure(FakeLibc(status=-1)) is Pressure.UNKNOWN
