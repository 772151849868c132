"""What a cycle costs, in seconds, by arena rows, tokens per row and visible columns.

A `CostTable` holds measured points of two parts: the target's forward (with acceptance, commit
and the host's share) and the draft's. Between the points it follows a linear model of what a
forward does; at the points it says what was measured. It learns from the engine's own cycles.
How the time is used to choose a block length is the business of `policy`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VERSION = 1
"""Of the file. Another version is not read."""

SHORTEST = 128
"""Context bucket below which a context makes no difference, in columns."""

LEARNING = 0.1
"""Least weight of a new measurement against what is known."""

OUTLIER = 2.0
"""A measurement counts at most as this factor off: pauses of the machine are not its cost."""

_REFIT = 64  # measurements between two fits of the linear model
_APART = 4.0  # a doubling of rows or tokens is as far as four doublings of the context

Point = tuple[int, int, int]
"""Arena rows, tokens per row (anchor included), context bucket in columns."""


@dataclass(frozen=True)
class CostKey:
    """What a table was measured on. Times of another machine, version or model are no use."""

    machine: str
    mlx: str
    model: str  # fingerprint of target and draft: configs, weight names, sizes, dtypes

    @property
    def file_name(self) -> str:
        text = json.dumps([self.machine, self.mlx, self.model])
        return f"cost-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(slots=True)
class Cell:
    """A measured point."""

    seconds: float
    count: int


class _Plan(NamedTuple):
    """Of some points: seconds by the linear model, and each cell's weight for the ratio to it."""

    modelled: NDArray[np.float64]
    near: NDArray[np.float64]


@dataclass(slots=True)
class Surface:
    """Seconds over (rows B, tokens T, context C).

    Linear model (roofline, all weights ≥ 0): t = a₀ + a₁·B + a₂·BT + a₃·(BT - 64)⁺ + a₄·BC +
    a₅·BTC. That is launches, state per row, weights against arithmetic, reading and computing
    attention. The ratio of what was measured to the model is interpolated between the points by
    inverse distance over log₂ B, log₂ T, log₂ C.
    """

    cells: dict[Point, Cell] = field(default_factory=dict)
    _weights: NDArray[np.float64] | None = None
    _coordinates: NDArray[np.float64] | None = None
    _ratios: NDArray[np.float64] | None = None  # log of measured over modelled, of each cell
    _index: dict[Point, int] = field(default_factory=dict)
    _plans: dict[tuple[int, tuple[int, ...], int], _Plan] = field(default_factory=dict)
    _since_fit: int = 0

    def predict(self, rows: int, tokens: Sequence[int], context: int) -> NDArray[np.float64]:
        """Seconds at each of `tokens` per row. Zero where nothing was ever measured."""
        if not self.cells:
            return np.zeros(len(tokens))
        self._prepare()
        assert self._ratios is not None
        modelled, near = self._plan(rows, tuple(tokens), context)
        seconds: NDArray[np.float64] = modelled * np.exp(near @ self._ratios)
        return seconds

    def observe(
        self, rows: int, tokens: int, context: int, seconds: float, expected: float
    ) -> None:
        """Take in a measurement; `expected` is what `predict` says of it."""
        point = (rows, tokens, bucket(context))
        cell = self.cells.get(point)
        if cell is None:
            scale = 1.0
            if self.cells:
                self._prepare()
                scale = float(self._model([point])[0] / self._model([(rows, tokens, context)])[0])
            self.cells[point] = Cell(seconds * scale, 1)
            self._weights = None
            return
        ratio = min(max(seconds / expected, 1 / OUTLIER), OUTLIER)
        cell.count += 1
        change = 1.0 + max(LEARNING, 1.0 / cell.count) * (ratio - 1.0)
        cell.seconds *= change
        self._since_fit += 1
        if self._since_fit >= _REFIT:
            self._weights = None
        elif self._ratios is not None:
            self._ratios[self._index[point]] += math.log(change)

    def put(self, rows: int, tokens: int, context: int, seconds: float, count: int = 8) -> None:
        """Set a point, as measured by a sweep."""
        self.cells[rows, tokens, bucket(context)] = Cell(seconds, count)
        self._weights = None

    def count(self, tokens: int) -> int:
        """Measurements taken at `tokens` per row, at any width and context."""
        return sum(cell.count for point, cell in self.cells.items() if point[1] == tokens)

    def _prepare(self) -> None:
        if self._weights is None:
            points = list(self.cells)
            seconds = np.array([cell.seconds for cell in self.cells.values()])
            self._weights = _fit(_features(points), seconds)
            self._coordinates = _coordinates(points)
            self._ratios = np.log(seconds / self._model(points))
            self._index = {point: i for i, point in enumerate(points)}
            self._plans.clear()
            self._since_fit = 0

    def _plan(self, rows: int, tokens: tuple[int, ...], context: int) -> _Plan:
        """What `predict` needs of these points, kept until the next fit."""
        plan = self._plans.get((rows, tokens, context))
        if plan is None:
            assert self._coordinates is not None
            at = [(rows, t, context) for t in tokens]
            apart = _coordinates(at)[:, None, :] - self._coordinates[None, :, :]
            near = 1.0 / ((apart**2).sum(axis=-1) + 1e-6) ** 2
            plan = _Plan(self._model(at), near / near.sum(axis=1, keepdims=True))
            self._plans[rows, tokens, context] = plan
        return plan

    def _model(self, points: Sequence[Point]) -> NDArray[np.float64]:
        assert self._weights is not None
        seconds: NDArray[np.float64] = _features(points) @ self._weights
        return seconds


class CostTable:
    """Seconds of a cycle's parts. Pure arithmetic; `load` and `save` keep it in a file."""

    def __init__(self, forward: Surface | None = None, draft: Surface | None = None) -> None:
        self.forward = forward or Surface()
        self.draft = draft or Surface()

    def t_fwd(self, rows: int, tokens: int, context: int) -> float:
        """Seconds to verify `tokens` per row in `rows` rows that see `context` columns."""
        return float(self.forward.predict(rows, [tokens], context)[0])

    def t_draft(self, rows: int, k: int, context: int) -> float:
        """Seconds to draft `k` tokens per row; 0 for k = 0."""
        return float(self.draft.predict(rows, [k + 1], context)[0]) if k else 0.0

    def cycle(self, rows: int, tokens: Sequence[int], context: int) -> NDArray[np.float64]:
        """Seconds of a whole cycle at each of `tokens` per row."""
        drafting = np.array([t > 1 for t in tokens])
        draft = np.where(drafting, self.draft.predict(rows, tokens, context), 0.0)
        seconds: NDArray[np.float64] = draft + self.forward.predict(rows, tokens, context)
        return seconds

    def observe(self, rows: int, tokens: int, context: int, seconds: float) -> None:
        """Learn from a whole cycle. Its parts share the news in proportion to what they cost;
        as long as no draft was timed by itself, the forward stands for both."""
        draft = self.t_draft(rows, tokens - 1, context)
        forward = self.t_fwd(rows, tokens, context)
        share = draft / (draft + forward) if forward > 0.0 else 0.0
        if share > 0.0:
            self.draft.observe(rows, tokens, context, seconds * share, draft)
        self.forward.observe(rows, tokens, context, seconds * (1.0 - share), forward)

    @property
    def empty(self) -> bool:
        return not self.forward.cells

    def to_json(self, key: CostKey) -> dict[str, Any]:
        return {
            "version": VERSION,
            "key": asdict(key),
            "unit": "seconds",
            "columns": ["rows", "tokens", "context", "seconds", "count"],
            "forward": _rows(self.forward),
            "draft": _rows(self.draft),
        }

    def save(self, folder: Path, key: CostKey) -> Path:
        """Write the file for `key`, whole or not at all, for the owner's eyes. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / key.file_name
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".cost-")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(key), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return path


def load_table(folder: Path, key: CostKey) -> tuple[CostTable, str | None]:
    """The stored table for `key`, or an empty one; with a notice when a file had to be ignored."""
    path = folder / key.file_name
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["version"] != VERSION:
            return CostTable(), f"{path}: cost table of version {data['version']}: measured anew"
        if data["key"] != asdict(key):
            return CostTable(), f"{path}: cost table of another machine or model: measured anew"
        return CostTable(_surface(data["forward"]), _surface(data["draft"])), None
    except FileNotFoundError:
        return CostTable(), None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return CostTable(), f"{path}: cost table cannot be read ({error}): measured anew"


def bucket(context: int) -> int:
    """The power of two nearest to a context, at least SHORTEST."""
    return int(2 ** round(math.log2(max(context, SHORTEST))))


def _rows(surface: Surface) -> list[list[float]]:
    return [[*point, cell.seconds, cell.count] for point, cell in sorted(surface.cells.items())]


def _surface(rows: list[list[float]]) -> Surface:
    surface = Surface()
    for b, t, c, seconds, count in rows:
        if not (min(b, t, c) >= 1 and 0.0 < seconds < math.inf):
            raise ValueError(f"no cost: {[b, t, c, seconds]}")
        surface.put(int(b), int(t), int(c), float(seconds), int(count))
    return surface


def _coordinates(points: Sequence[Point]) -> NDArray[np.float64]:
    values = np.array(points, dtype=np.float64)
    values[:, 2] = np.maximum(values[:, 2], SHORTEST)
    coordinates: NDArray[np.float64] = np.log2(values) * np.array([_APART, _APART, 1.0])
    return coordinates


def _features(points: Sequence[Point]) -> NDArray[np.float64]:
    b, t, c = np.array(points, dtype=np.float64).T
    m = b * t
    return np.stack([np.ones_like(b), b, m, np.maximum(m - 64.0, 0.0), b * c, m * c], axis=1)


def _fit(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights ≥ 0 of least relative error, by coordinate descent; a slight ridge decides ties."""
    scaled = features / seconds[:, None]
    size = np.maximum(np.abs(scaled).max(axis=0), 1e-30)
    scaled = scaled / size
    gram = (scaled.T @ scaled + 1e-4 * np.eye(scaled.shape[1])).tolist()
    aim = scaled.sum(axis=0).tolist()
    weights = [0.0] * len(aim)
    for _ in range(200):
        for i, row in enumerate(gram):
            rest = sum(g * w for g, w in zip(row, weights, strict=True)) - row[i] * weights[i]
            weights[i] = max(0.0, (aim[i] - rest) / row[i])
    fitted: NDArray[np.float64] = np.array(weights) / size
    return fitted
