"""Memory of an engine: who is over the limit, and how wide the next one is. No processes."""

from __future__ import annotations

import os

import pytest

from dflash_batch.decoder.errors import PromptError, code_of
from dflash_batch.worker import width
from dflash_batch.worker.footprint import Pressure
from dflash_batch.worker.guard import Guard
from dflash_batch.worker.width import Width


def test_the_guard_speaks_when_the_limit_is_passed_and_remembers_the_most() -> None:
    sizes = iter([50, 120, 80])
    guard = Guard(100, taken=lambda pid: next(sizes), shortness=lambda: Pressure.NORMAL)
    assert [guard.look(1), guard.was_short] == [False, False]
    assert [guard.look(1), guard.was_short] == [True, True]
    assert [guard.look(1), guard.was_short] == [False, False]
    assert guard.highest == 120
    guard.forget()
    assert guard.highest == 0


def test_a_system_without_memory_is_short_though_the_engine_is_small() -> None:
    guard = Guard(100, taken=lambda pid: None, shortness=lambda: Pressure.CRITICAL)
    assert [guard.look(1), guard.was_short] == [False, True]


def test_without_a_limit_it_is_a_share_of_the_machines_memory() -> None:
    guard = Guard(None)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0.8 * machine < guard.limit < machine
    assert not guard.look(os.getpid())
    assert guard.highest > 1 << 20, "our own footprint is measured"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Monotonic seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr("dflash_batch.worker.width.time.monotonic", lambda: now[0])
    return now


def test_early_trouble_halves_the_width_down_to_one(clock: list[float]) -> None:
    rows = Width(6)
    seen = []
    for _ in range(4):
        rows.start()
        rows.trouble()
        seen.append(rows.rows)
    assert seen == [3, 1, 1, 1]
    assert rows.least


def test_trouble_after_a_long_life_is_a_leak_and_peace_widens_again(clock: list[float]) -> None:
    rows = Width(8)
    rows.start()
    rows.trouble()
    rows.start()
    rows.peace()
    assert rows.rows == 4, "it has not proved itself yet"
    clock[0] += width.SETTLED_S + 1
    rows.trouble()
    assert rows.rows == 4
    rows.peace()
    rows.peace()
    assert rows.rows == 8


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[malloc] Unable to allocate 68719476736 bytes."), "out_of_memory"),
        (
            RuntimeError(
                "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum"
            ),
            "out_of_memory",
        ),
        (
            RuntimeError(
                "[METAL] Command buffer execution failed: Insufficient Memory "
                "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
            ),
            "out_of_memory",
        ),
        (RuntimeError("cudaMallocAsync(&data) failed: out of memory"), "out_of_memory"),
        (RuntimeError("[matmul] shapes do not match"), "internal_error"),
        (PromptError("out of memory", code="invalid_value"), "invalid_value"),
    ],
)
def test_want_of_memory_is_known_by_its_words(error: Exception, code: str) -> None:
    assert code_of(error) == code
