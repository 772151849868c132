"""The optimisation loop that target and draft share: AdamW, warm-up, cosine, clipping, a clock.

What is trained and on what is handed in. With a time budget the schedule follows the clock where
that is ahead of the step count, so a run that is cut short still ends on a small learning rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

Batch = tuple[mx.array, ...]
Loss = Callable[..., mx.array]
Report = Callable[[str], None]


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast to train."""

    steps: int
    peak_rate: float = 2e-3
    warm_up: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    report_every: int = 100
    check_every: int = 1000
    seconds: float = math.inf

    def rate(self, progress: float) -> float:
        """Learning rate after a share ``progress`` of the run: linear warm-up, cosine to zero."""
        if progress < self.warm_up:
            return self.peak_rate * progress / self.warm_up
        done = (min(progress, 1.0) - self.warm_up) / (1.0 - self.warm_up)
        return self.peak_rate * 0.5 * (1.0 + math.cos(math.pi * done))


class Fitting:
    """A model and its optimiser, one step at a time; can be kept and taken up again.

    The model's own parameters and AdamW's moments are float32 masters; the loss is computed with
    parameters rounded to `compute`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        settings: FitSettings,
        compute: mx.Dtype = mx.float32,
    ) -> None:
        self.model = model
        self.compute = compute
        self._loss, self._clip = loss, settings.clip
        self._optimizer = optim.AdamW(
            learning_rate=settings.peak_rate, betas=[0.9, 0.95], weight_decay=settings.weight_decay
        )
        self._optimizer.init(model.trainable_parameters())
        self._step: Callable[..., mx.array] | None = None

    def step(self, rate: float, *batch: mx.array) -> mx.array:
        """One update at a learning rate; the loss, not yet computed."""
        if self._step is None:  # not before `restore`: it holds on to the state it finds
            state: list[Any] = [self.model.state, self._optimizer.state]
            self._step = compiled(self._once, inputs=state, outputs=state)
        self._optimizer.learning_rate = rate
        value = self._step(*batch)
        mx.async_eval(value, self.model.state, self._optimizer.state)
        return value

    def arrays(self) -> dict[str, mx.array]:
        """All that `restore` needs, by name."""
        trees = {"model": self.model.parameters(), "optimizer": self._optimizer.state}
        return dict(tree_flatten(trees))

    def restore(self, arrays: dict[str, mx.array]) -> None:
        """Go on from `arrays`, before the first step."""
        assert self._step is None
        trees: Any = tree_unflatten(list(arrays.items()))
        self.model.update(trees["model"])
        self._optimizer.state = trees["optimizer"]

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """The model as the loss sees it."""
        master = self.model.parameters()
        self.model.update(self._rounded(master))
        try:
            yield
        finally:
            self.model.update(master)

    def _once(self, *batch: mx.array) -> mx.array:
        master = self.model.trainable_parameters()

        def loss(parameters: Any, *batch: mx.array) -> mx.array:
            self.model.update(self._rounded(parameters))
            return self._loss(*batch)

        value, gradient = mx.value_and_grad(loss)(master, *batch)
        self.model.update(master)
        gradient, _ = optim.clip_grad_norm(gradient, self._clip)
        self._optimizer.update(self.model, gradient)
        return value

    def _rounded(self, parameters: Any) -> Any:
        return tree_map(lambda w: w.astype(self.compute), parameters)


def fit(
    model: nn.Module,
    loss: Loss,
    batches: Iterator[Batch],
    settings: FitSettings,
    report: Report = print,
    check: Callable[[int], str] | None = None,
) -> list[float]:
    """Train ``model`` in place with ``loss(*batch)`` and return the reported losses.

    ``check(step)`` runs every ``check_every`` steps and at the end; its text joins the line.
    """
    fitting = Fitting(model, loss, settings)
    began, losses, recent = time.monotonic(), list[float](), list[mx.array]()
    for step in range(1, settings.steps + 1):
        spent = (time.monotonic() - began) / settings.seconds
        recent.append(
            fitting.step(settings.rate(max(step / settings.steps, spent)), *next(batches))
        )
        last = step == settings.steps or spent >= 1.0
        if step % settings.report_every == 0 or last:
            losses.append(float(np.array(mx.mean(mx.stack(recent)))))
            recent.clear()
            seconds = time.monotonic() - began
            line = f"step={step} loss={losses[-1]:.4f} seconds={seconds:.1f}"
            if check is not None and (step % settings.check_every == 0 or last):
                line += " " + check(step)
            report(line)
        if last:
            break
    return losses


def compiled(function: Callable[..., mx.array], **captured: Any) -> Callable[..., mx.array]:
    """``mx.compile`` on a GPU; on the CPU, where it calls a C++ compiler, the function as it is."""
    if mx.default_device() == mx.Device(mx.cpu):
        return function
    faster: Callable[..., mx.array] = mx.compile(function, **captured)
    return faster
