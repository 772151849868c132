"""When a worker may run: small conditions, each with a word of `--only-when`.

A reading that the system does not give holds nothing back; that is said once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime, time
from typing import Generic, Protocol, TypeVar

from dflash_batch.worker.heat import Heat, heat
from dflash_batch.worker.idle import idle_s
from dflash_batch.worker.log import say
from dflash_batch.worker.power import Power, power

T = TypeVar("T")

ALWAYS = "cool,charged"
"""What every worker minds, asked or not: it ends before the machine does."""

IDLE_S = 300.0
"""A machine is idle when nobody has touched it for this long."""

LOW_CHARGE, GOOD_CHARGE = 0.20, 0.30
"""A battery that drains below the one rests us until it holds the other."""


class Condition(Protocol):
    def objection(self) -> str:
        """Why rows may not run now, for people; empty when they may."""


class Told(Generic[T]):
    """A reading that says, once, that the system does not give it."""

    def __init__(self, what: str, read: Callable[[], T | None]) -> None:
        self._what, self._read = what, read
        self._said = False

    def __call__(self) -> T | None:
        value = self._read()
        if value is None and not self._said:
            self._said = True
            say("no_reading", of=self._what)
        return value


class Plugged:
    """`plugged`: not on battery power."""

    def __init__(self, read: Callable[[], Power | None] = power) -> None:
        self._read = Told("power", read)

    def objection(self) -> str:
        now = self._read()
        return "on battery power" if now is not None and not now.plugged else ""


class Charged:
    """`charged`: the battery is not running out. A large Mac can drain it on a small charger."""

    def __init__(self, read: Callable[[], Power | None] = power) -> None:
        self._read = Told("power", read)
        self._low = False

    def objection(self) -> str:
        now = self._read()
        if now is None or now.charge is None:
            self._low = False
        elif self._low:
            self._low = now.charge < GOOD_CHARGE
        else:
            self._low = now.charge < LOW_CHARGE and not now.charging
        return "the battery is low" if self._low else ""


class Cool:
    """`cool`: rests at critical heat, until it is not even serious any more."""

    def __init__(self, read: Callable[[], Heat | None] = heat) -> None:
        self._read = Told("heat", read)
        self._hot = False

    def objection(self) -> str:
        now = self._read()
        limit = Heat.SERIOUS if self._hot else Heat.CRITICAL
        self._hot = now is not None and now >= limit
        return "the machine is too hot" if self._hot else ""


class Idle:
    """`idle`: nobody uses the machine."""

    def __init__(self, read: Callable[[], float | None] = idle_s) -> None:
        self._read = Told("idle time", read)

    def objection(self) -> str:
        now = self._read()
        return "somebody uses this machine" if now is not None and now < IDLE_S else ""


class Hours:
    """`22:00-07:00`: times of day, local, the end not included; several are alternatives.

    0        7                    22    24        0     9         17       24
    |========|---------------------|=====|        |-----|==========|--------|
      22:00-07:00, over midnight                    09:00-17:00
    """

    def __init__(
        self,
        windows: Sequence[tuple[time, time]],
        now: Callable[[], time] = lambda: datetime.now().time(),
    ) -> None:
        self._windows, self._now = windows, now

    def objection(self) -> str:
        now = self._now()
        for start, end in self._windows:
            inside = start <= now < end if start < end else now >= start or now < end
            if inside:
                return ""
        hours = ", ".join(f"{start:%H:%M}-{end:%H:%M}" for start, end in self._windows)
        return f"outside {hours}"


_BY_WORD: dict[str, Callable[[], Condition]] = {
    "plugged": Plugged,
    "idle": Idle,
    "cool": Cool,
    "charged": Charged,
}
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-(?:([01]?\d|2[0-3]):([0-5]\d)|24:00)", re.ASCII)


def conditions(text: str) -> list[Condition]:
    """The conditions that a comma-separated list names, all of which must hold.

    Raises ValueError, which says what may stand there.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    windows = []
    found: dict[str, Condition] = {}
    for word in words:
        if word in _BY_WORD:
            found[word] = found.get(word) or _BY_WORD[word]()
        elif (hours := _HOURS.fullmatch(word)) is not None:
            windows.append(_window(hours))
        else:
            known = ", ".join(_BY_WORD)
            raise ValueError(f"{word!r} is none of {known}, or hours like 22:00-07:00")
    return [*found.values(), *([Hours(windows)] if windows else [])]


def _window(hours: re.Match[str]) -> tuple[time, time]:
    start = time(int(hours[1]), int(hours[2]))
    end = time(int(hours[3]), int(hours[4])) if hours[3] else time(0, 0)  # 24:00
    if start == end:
        raise ValueError(f"{hours[0]} is no time at all; leave it out for the whole day")
    return start, end
