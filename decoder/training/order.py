"""What a training run is asked to do, and the time it has for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Order:
    """What to train, and for how long."""

    target: str
    prompts: str  # a file, as `PromptFile` reads it
    out: str  # the folder to write
    init: str | None = None  # a draft to begin with
    layers: int | None = None
    block: int | None = None
    steps: int | None = None
    time_budget_s: float | None = None  # of all, texts included
    lr: float | None = None
    seed: int = 0
    width: int = 64  # rows generated together
    max_tokens: int = 256  # of a reply
    samples: int = 1  # replies a prompt
    batch_tokens: int = 8192  # of a step
    mask_token: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    checkpoint_s: float = 60.0

    def fixed(self, digest: str) -> dict[str, Any]:
        """What may not change when a run goes on."""
        names = ("target", "init", "layers", "block", "seed", "max_tokens", "samples")
        more = ("batch_tokens", "mask_token", "dtype")
        kept = {name: getattr(self, name) for name in (*names, *more)}
        return {**kept, "prompts": digest}


class Clock:
    """Time since the run began, in all its processes, against its budget."""

    def __init__(self, budget: float | None) -> None:
        self.budget = budget or math.inf
        self._before = 0.0
        self._began = time.monotonic()

    def add(self, before: float) -> None:
        """Seconds that earlier processes took."""
        self._before += before

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def at(self, share: float) -> float:
        """When, on `time.monotonic`, that share of the budget is used up."""
        return self._began + share * self.budget - self._before
