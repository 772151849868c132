"""What a check of the installation found: one line for people, one object for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "failed"]
"""`failed`: something will not work. `warning`: it will, worse than it could."""


@dataclass(frozen=True)
class Finding:
    """`cure` says what to do about it; empty when there is nothing to do."""

    check: str
    level: Level
    text: str
    cure: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)
