"""What a training run keeps on disk so that it can go on: its settings, its texts, a checkpoint.

work/order.json               what was asked, and how long the texts took; mode 0600
work/texts.jsonl              the target's replies so far
work/checkpoint.safetensors   parameters, moments, and in its header the step
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_batch.decoder.errors import TrainingError
from dflash_batch.decoder.training.files import save_text, save_weights
from dflash_batch.decoder.training.fit import Fitting
from dflash_batch.decoder.training.texts import TextFile

VERSION = 1


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0  # since the run began, all its processes together
    loss: float | None = None  # the last one reported
    first_tau: float | None = None  # of the draft it began with, if that was trained before
    tau: float | None = None  # the last one measured
    curve: list[list[float]] = field(default_factory=list)  # step, loss


class Work:
    """The folder `work` beside a draft."""

    def __init__(self, out: Path, order: dict[str, Any]) -> None:
        """Open or make it. Raises TrainingError when it is another run's."""
        self.folder = out / "work"
        self._path = self.folder / "order.json"
        self._checkpoint = self.folder / "checkpoint.safetensors"
        if not self._path.exists():
            if any((out / name).exists() for name in ("config.json", "model.safetensors")):
                raise TrainingError(f"{out} holds a model already; choose another folder with -o")
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write({"version": VERSION, "order": order, "text_seconds": None})
        kept = json.loads(self._path.read_text("utf-8"))
        if kept["version"] != VERSION:
            raise TrainingError(f"{self.folder} was written by another version; choose another -o")
        for name, value in order.items():
            if kept["order"].get(name) != value:
                raise TrainingError(
                    f"{out} was begun with another {name.replace('_', ' ')} "
                    f"({kept['order'].get(name)}, now {value}); choose another folder with -o"
                )
        self._kept = kept
        self.texts = TextFile(self.folder / "texts.jsonl")

    @property
    def text_seconds(self) -> float | None:
        """How long the texts took; None while they are not all there."""
        seconds: float | None = self._kept["text_seconds"]
        return seconds

    @text_seconds.setter
    def text_seconds(self, seconds: float) -> None:
        self._write({**self._kept, "text_seconds": seconds})

    def save(self, fitting: Fitting, progress: Progress) -> None:
        """Keep a checkpoint; the one before stays until this one is whole."""
        metadata = {"progress": json.dumps(asdict(progress))}
        save_weights(fitting.arrays(), self._checkpoint, metadata)

    def load(self, fitting: Fitting) -> Progress:
        """Take up the last checkpoint, if there is one."""
        if not self._checkpoint.exists():
            return Progress()
        loaded: Any = mx.load(str(self._checkpoint), return_metadata=True)
        arrays, metadata = loaded
        fitting.restore(arrays)
        return Progress(**json.loads(metadata["progress"]))

    def _write(self, kept: dict[str, Any]) -> None:
        self._kept = kept
        save_text(json.dumps(kept, indent=2) + "\n", self._path)
