"""What a worker owes the machine it is a guest on: when it may run, and when the machine may sleep.

The service loop asks; what is looked at is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_batch.worker.conditions import Condition, conditions
from dflash_batch.worker.sleep import SleepWatch, StayAwake, caffeinate

LOOK_S = 10.0
"""Seconds between looks: some readings start a small program."""


@dataclass(frozen=True)
class Verdict:
    """Whether rows may run now, and if not, why, for people."""

    reason: str = ""

    @property
    def may(self) -> bool:
        return not self.reason


class Citizen:
    """The machine's side of the service loop."""

    def __init__(
        self,
        conditions: Sequence[Condition] = (),
        *,
        awake: StayAwake | None = None,
        sleep: SleepWatch | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self._conditions = conditions
        self._awake = awake or StayAwake(None)
        self._sleep = sleep or SleepWatch()
        self._look_s = look_s
        self._next_look = 0.0
        self._verdict = Verdict()

    def may_run(self) -> Verdict:
        """Cheap to ask often: conditions are looked at every `look_s` seconds."""
        if self._conditions and time.monotonic() >= self._next_look:
            objections = [condition.objection() for condition in self._conditions]
            self._verdict = Verdict(", ".join(text for text in objections if text))
            self._next_look = time.monotonic() + self._look_s
        return self._verdict

    def keep_awake(self, running: bool) -> None:
        """Hold idle sleep off while rows run, and only then."""
        self._awake.hold(running)

    def slept_s(self) -> float:
        """Seconds the machine slept since the last call."""
        slept = self._sleep.slept_s()
        if slept:
            self._next_look = 0.0  # in sleep the hour, the plug and the heat have changed
        return slept


def citizen(only_when: str) -> Citizen:
    """One for this machine, by the conditions in the list. Raises ValueError for a bad list."""
    return Citizen(conditions(only_when), awake=StayAwake(caffeinate()))
