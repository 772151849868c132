"""Readings of power, heat, idleness and sleep, and the conditions on them, from made-up systems."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_tools import until

from dflash_batch.worker.ask import ask
from dflash_batch.worker.citizen import Citizen
from dflash_batch.worker.conditions import (
    ALWAYS,
    Charged,
    Cool,
    Hours,
    Idle,
    Plugged,
    conditions,
)
from dflash_batch.worker.heat import Heat, heat, notify_heat, sysfs_heat
from dflash_batch.worker.idle import idle_s, ioreg_idle_s, terminals_idle_s
from dflash_batch.worker.power import Power, pmset_power, power, sysfs_power
from dflash_batch.worker.sleep import SleepWatch, StayAwake, continuous

# --- power ---------------------------------------------------------------------------------------


def supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


@pytest.mark.parametrize(
    ("online", "status", "expected"),
    [
        ("1", "Charging", Power(True, 0.57, True)),
        ("1", "Full", Power(True, 0.57, True)),
        ("1", "Discharging", Power(True, 0.57, False)),  # a charger too small for the load
        ("0", "Discharging", Power(False, 0.57, False)),
    ],
)
def test_linux_tells_power(tmp_path: Path, online: str, status: str, expected: Power) -> None:
    supply(tmp_path, "AC", type="Mains", online=online)
    supply(tmp_path, "BAT0", type="Battery", status=status, capacity="57")
    supply(tmp_path, "mouse", type="Battery", status="Discharging", capacity="3", scope="Device")
    assert sysfs_power(tmp_path) == expected


def test_linux_without_a_mains_supply_goes_by_the_battery(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="57")
    assert sysfs_power(tmp_path) == Power(False, 0.57)


def test_a_machine_without_battery_is_plugged_and_a_silent_system_tells_nothing(
    tmp_path: Path,
) -> None:
    assert sysfs_power(tmp_path) == Power(plugged=True)
    assert sysfs_power(tmp_path / "none") is None


def test_a_battery_whose_driver_tells_nothing_is_no_crash(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", capacity="many")
    (tmp_path / "BAT1").mkdir()
    assert sysfs_power(tmp_path) == Power(plugged=True)


PMSET = "Now drawing from '{}'\n -InternalBattery-0 (id=21233763)\t{}; present: true\n"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (PMSET.format("AC Power", "100%; charged; 0:00 remaining"), Power(True, 1.0, True)),
        (PMSET.format("AC Power", "81%; charging; 1:02 remaining"), Power(True, 0.81, True)),
        (PMSET.format("AC Power", "80%; AC attached; not charging"), Power(True, 0.8, False)),
        (PMSET.format("Battery Power", "9%; discharging; 0:20 remaining"), Power(False, 0.09)),
        ("Now drawing from 'AC Power'\n", Power(True)),
        ("Now drawing from 'UPS Power'\n -UPS (id=1)\t50%; discharging;", Power(False)),
        ("pmset: no such command", None),
    ],
)
def test_macos_tells_power(said: str, expected: Power | None) -> None:
    assert pmset_power(said) == expected


# --- heat ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(45, Heat.NOMINAL), (86, Heat.SERIOUS), (96, Heat.CRITICAL), (104, Heat.CRITICAL)],
)
def test_linux_tells_heat_by_the_way_to_the_trip(
    tmp_path: Path, degrees: int, expected: Heat
) -> None:
    cool = {"temp": "30000", "trip_point_0_type": "critical", "trip_point_0_temp": "110000"}
    hot = {"temp": f"{degrees}000", "trip_point_0_type": "passive", "trip_point_0_temp": "40000"}
    hot |= {"trip_point_1_type": "hot", "trip_point_1_temp": "100000"}
    supply(tmp_path, "thermal_zone0", **cool)
    supply(tmp_path, "thermal_zone1", **hot)
    assert sysfs_heat(tmp_path) is expected


def test_zones_that_tell_nonsense_are_left_out(tmp_path: Path) -> None:
    supply(tmp_path, "thermal_zone0", temp="60000", trip_point_0_type="critical")
    supply(
        tmp_path,
        "thermal_zone1",
        temp="60000",
        trip_point_0_type="critical",
        trip_point_0_temp="-274000",
    )
    supply(
        tmp_path,
        "thermal_zone2",
        temp="broken",
        trip_point_0_type="hot",
        trip_point_0_temp="90000",
    )
    assert sysfs_heat(tmp_path) is None
    assert sysfs_heat(tmp_path / "none") is None


class FakeNotify:
    """macOS's notification calls as far as we use them."""

    def __init__(self, level: int, *, status: int = 0) -> None:
        self._level, self._status = level, status
        self.open = 0

    def notify_register_check(self, name: bytes, token: Any) -> int:
        assert name == b"com.apple.system.thermalpressurelevel"
        self.open += 1
        return 0

    def notify_get_state(self, token: Any, state: Any) -> int:
        ctypes.memmove(state, self._level.to_bytes(8, "little"), 8)
        return self._status

    def notify_cancel(self, token: Any) -> int:
        self.open -= 1
        return 0


def test_macos_tells_heat() -> None:
    found = [notify_heat(FakeNotify(level)) for level in range(5)]
    assert found == [Heat.NOMINAL, Heat.FAIR, Heat.SERIOUS, Heat.CRITICAL, Heat.CRITICAL]
    broken = FakeNotify(0, status=1)
    assert notify_heat(broken) is None
    assert broken.open == 0


# --- idleness ------------------------------------------------------------------------------------


def test_the_terminal_touched_last_tells_idleness(tmp_path: Path) -> None:
    for name, touched in (("a", 100), ("b", 700)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (touched, 5000))
    terminals = [tmp_path / "a", tmp_path / "b", tmp_path / "closed"]
    assert terminals_idle_s(terminals, 1000.0) == 300.0
    assert terminals_idle_s(terminals, 600.0) == 0.0, "a clock that was set back"
    assert terminals_idle_s([], 1000.0) is None


def test_macos_tells_idleness() -> None:
    said = '+-o IOHIDSystem  <class IOHIDSystem>\n    {\n      "HIDIdleTime" = 301500000000\n    }'
    assert ioreg_idle_s(said) == 301.5
    assert ioreg_idle_s("+-o IOHIDSystem") is None


def test_programs_that_are_not_there_or_fail_tell_nothing() -> None:
    assert ask("/none/such") is None
    assert ask(sys.executable, "-c", "raise SystemExit(1)") is None
    assert ask(sys.executable, "-c", "print('fact')") == "fact\n"


def test_the_readings_of_this_machine_can_be_taken() -> None:
    assert isinstance(power(), Power | None)
    assert isinstance(heat(), Heat | None)
    assert (idle_s() or 0.0) >= 0.0


# --- conditions ----------------------------------------------------------------------------------


def readings(*values: Any) -> Callable[[], Any]:
    """Gives one value after the other."""
    left = list(values)
    return lambda: left.pop(0)


def test_plugged_objects_to_battery_power() -> None:
    condition = Plugged(readings(Power(True), Power(False, 0.9), None))
    assert [condition.objection() for _ in range(3)] == ["", "on battery power", ""]


def test_a_low_battery_rests_us_until_it_has_some_charge_again() -> None:
    course = [(0.21, False), (0.19, False), (0.19, True), (0.29, True), (0.31, True), (0.25, True)]
    condition = Charged(readings(*(Power(True, charge, up) for charge, up in course)))
    assert [bool(condition.objection()) for _ in course] == [False, True, True, True, False, False]


def test_a_machine_without_battery_is_never_low() -> None:
    assert Charged(readings(Power(True))).objection() == ""


def test_heat_rests_us_until_it_is_not_even_serious() -> None:
    course = [Heat.SERIOUS, Heat.CRITICAL, Heat.SERIOUS, Heat.FAIR, Heat.SERIOUS, None]
    condition = Cool(readings(*course))
    assert [bool(condition.objection()) for _ in course] == [False, True, True, *[False] * 3]


def test_idle_objects_to_a_person() -> None:
    condition = Idle(readings(3.0, 299.0, 301.0, None))
    assert [bool(condition.objection()) for _ in range(4)] == [True, True, False, False]


def test_a_missing_reading_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dflash_batch")
    condition = Cool(lambda: None)
    assert [condition.objection() for _ in range(3)] == ["", "", ""]
    assert [record.getMessage() for record in caplog.records] == ["no_reading of=heat"]


times = st.times().map(lambda t: t.replace(second=0, microsecond=0, fold=0))


@given(start=times, end=times, now=times)
def test_hours_are_what_a_clock_shows_between_them(start: time, end: time, now: time) -> None:
    if start == end:
        return
    today = datetime(2026, 1, 1)
    begin = datetime.combine(today, start)
    until_end = (datetime.combine(today, end) - begin) % timedelta(days=1)
    since = (datetime.combine(today, now) - begin) % timedelta(days=1)
    assert (Hours([(start, end)], lambda: now).objection() == "") == (since < until_end)


def test_several_hours_are_alternatives_and_all_else_must_hold() -> None:
    night, noon, plugged = "22:00-07:00", "12:00-13:00", "plugged"
    found = conditions(f"{night}, {plugged},{noon},{plugged},{ALWAYS}")
    assert [type(c).__name__ for c in found] == ["Plugged", "Cool", "Charged", "Hours"]
    windows = [(time(22), time(7)), (time(12), time(13))]
    assert Hours(windows, lambda: time(12, 30)).objection() == ""
    assert Hours(windows, lambda: time(7)).objection() == "outside 22:00-07:00, 12:00-13:00"
    assert conditions("") == []


@pytest.mark.parametrize(
    "text", ["pluged", "22-07", "25:00-07:00", "22:60-07:00", "07:00-07:00", "22:00", "٢٢:00-07:00"]
)
def test_a_condition_nobody_knows_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        conditions(f"plugged,{text}")


def test_the_end_of_the_day_may_be_written_24() -> None:
    (hours,) = conditions("18:00-24:00")
    assert isinstance(hours, Hours)
    assert Hours([(time(18), time(0))], lambda: time(23, 59)).objection() == ""


def test_all_objections_are_told_together_and_looks_are_not_repeated_too_soon() -> None:
    citizen = Citizen(
        [Plugged(readings(Power(False))), Idle(readings(0.0)), Cool(readings(Heat.NOMINAL))],
        look_s=3600,
    )
    for _ in range(3):  # a second look would find no reading left
        assert citizen.may_run().reason == "on battery power, somebody uses this machine"


# --- sleep ---------------------------------------------------------------------------------------


def test_sleep_is_the_time_in_which_one_clock_stood_still() -> None:
    awake, always = [100.0], [5000.0]
    watch = SleepWatch(lambda: awake[0], lambda: always[0])
    assert watch.slept_s() == 0.0
    awake[0] += 10
    always[0] += 10.001
    assert watch.slept_s() == 0.0
    awake[0] += 1
    always[0] += 3601
    assert watch.slept_s() == pytest.approx(3600, abs=0.01)
    assert watch.slept_s() == 0.0


def test_the_clocks_of_this_machine_agree_while_it_is_awake() -> None:
    watch = SleepWatch()
    before = continuous()
    assert watch.slept_s() == 0.0
    assert continuous() >= before


def test_after_sleep_the_conditions_are_looked_at_at_once() -> None:
    always = [0.0]
    citizen = Citizen(
        [Plugged(readings(Power(True), Power(False)))],
        sleep=SleepWatch(lambda: 0.0, lambda: always[0]),
        look_s=3600,
    )
    assert citizen.may_run().may
    always[0] = 60.0
    assert citizen.slept_s() == 60.0
    assert not citizen.may_run().may


def test_staying_awake_is_a_process_that_lives_as_long_as_it_is_wanted() -> None:
    awake = StayAwake(["/bin/sleep", "60"])
    awake.hold(True)
    process = awake._process
    assert process is not None
    awake.hold(True)
    assert awake._process is process
    assert process.poll() is None
    awake.hold(False)
    assert not awake.held
    assert process.returncode is not None
    awake.hold(True)
    assert awake.held
    awake.hold(False)


@pytest.mark.parametrize("command", [["/none/such"], ["/bin/sh", "-c", "exit 3"]])
def test_what_cannot_keep_the_machine_awake_is_said_once(
    command: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    awake = StayAwake(command)

    def said() -> list[str]:
        awake.hold(True)
        return [record.getMessage().split()[0] for record in caplog.records]

    until(lambda: bool(said()), "the failure is noticed")
    assert said() == ["sleep_not_held_off"]
    assert not awake.held


def test_a_machine_without_such_a_program_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    StayAwake(None).hold(True)
    assert caplog.records == []
