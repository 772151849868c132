"""The optimisation loop that target and draft share: AdamW, warm-up, cosine, clipping, a clock.

What is trained and on what is handed in. With a time budget the schedule follows the clock where
that is ahead of the step count, so a run that is cut short still ends on a small learning rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

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
    optimizer = optim.AdamW(
        learning_rate=settings.peak_rate, betas=[0.9, 0.95], weight_decay=settings.weight_decay
    )
    step_once = _compiled_step(model, loss, optimizer, settings.clip)
    began, losses, recent = time.monotonic(), list[float](), list[mx.array]()
    for step in range(1, settings.steps + 1):
        spent = (time.monotonic() - began) / settings.seconds
        optimizer.learning_rate = settings.rate(max(step / settings.steps, spent))
        recent.append(step_once(*next(batches)))
        mx.async_eval(recent[-1], model.state, optimizer.state)
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


def _compiled_step(
    model: nn.Module, loss: Loss, optimizer: optim.Optimizer, clip: float
) -> Callable[..., mx.array]:
    state: list[Any] = [model.state, optimizer.state]
    loss_and_gradient = nn.value_and_grad(model, loss)
    optimizer.init(model.trainable_parameters())

    def step(*batch: mx.array) -> mx.array:
        value: mx.array
        value, gradient = loss_and_gradient(*batch)
        gradient, _ = optim.clip_grad_norm(gradient, clip)
        optimizer.update(model, gradient)
        return value

    return compiled(step, inputs=state, outputs=state)


def compiled(function: Callable[..., mx.array], **captured: Any) -> Callable[..., mx.array]:
    """``mx.compile`` on a GPU; on the CPU, where it calls a C++ compiler, the function as it is."""
    if mx.default_device() == mx.Device(mx.cpu):
        return function
    faster: Callable[..., mx.array] = mx.compile(function, **captured)
    return faster
