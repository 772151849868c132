"""A short sweep that measures what a cycle costs on this machine, by width, block length, context.

`python -m dflash_batch.decoder.bench` reads an `Order` as JSON from stdin and writes JSON lines:
`{"phase", "share"}` as it goes, then the result, or `{"error", "code"}`. The decoder itself runs
the cycles, under a policy that goes through the block lengths, so what is measured is what a batch
pays: the device, and the host where it is not hidden. The draft is also timed by itself.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_batch.decoder import demo, registry
from dflash_batch.decoder.arena import Lens, column_step
from dflash_batch.decoder.cost import CostKey, CostTable
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.loading import find, load_decoder, read_config
from dflash_batch.decoder.measured import cost_key, keep_table
from dflash_batch.decoder.policy import SIZES, Fixed, Landed, RowView, best_choices
from dflash_batch.decoder.types import LoadSpec, Progress, Request

ROUNDS = 4  # through all block lengths, so that a busy spell of the host spoils none alone
IN_A_ROW = 2  # cycles of a length in a round; the first round holds compiling and planning
ACCEPTANCES = (0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True)
class Order:
    """What to measure, and for how long at most."""

    target: str
    draft: str = "auto"
    draft_quant: Any = "none"
    block: int | None = None
    dtype: Any = "auto"
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (512, 4096)
    limit_s: float = 60.0
    cost_dir: str | None = None


class Sweep(Fixed):
    """Goes through block lengths, a few cycles each, and notes their times."""

    def __init__(self, sizes: Sequence[int], width: int, until: float) -> None:
        super().__init__(0, trim=False)
        self._todo = [n for _ in range(ROUNDS) for size in sizes for n in [size] * IN_A_ROW]
        self._width = width
        self._until = until
        self._seconds: dict[int, list[float]] = defaultdict(list)

    @property
    def over(self) -> bool:
        return not self._todo or time.perf_counter() > self._until

    def choose(self, rows: Sequence[RowView], width: int, context: int) -> int:
        return self._todo.pop(0) - 1 if self._todo else 0

    def landed(self, cycle: Landed) -> None:
        if cycle.seconds is not None and cycle.width == self._width:
            self._seconds[cycle.tokens].append(cycle.seconds)

    def times(self) -> dict[int, float]:
        """Median seconds of a cycle at each block length that was reached."""
        return {
            size: statistics.median(seconds[IN_A_ROW:])
            for size, seconds in self._seconds.items()
            if len(seconds) > IN_A_ROW
        }


def sweep(decoder: Decoder, order: Order, progress: Progress) -> CostTable:
    """Measure until all is measured or the time is up; the first point always is."""
    table = CostTable()
    _, drafter = decoder.pair
    most = drafter.spec.max_k + 1
    sizes = tuple(size for size in (*SIZES, most) if size <= most)
    sizes = tuple(sorted(set(sizes)))
    start = time.perf_counter()
    points = [(b, c) for b in sorted(order.widths) for c in sorted(order.contexts)]
    for i, (rows, context) in enumerate(points):
        share = max(i / len(points), (time.perf_counter() - start) / order.limit_s)
        if share >= 1.0:
            break
        progress(f"{rows} rows, context {context:,}", share)
        times = _cycles(decoder, sizes, rows, context, start + order.limit_s)
        for tokens, seconds in times.items():
            draft = _drafting(drafter, rows, tokens - 1, context)
            if draft:
                table.draft.put(rows, tokens, context, min(draft, 0.95 * seconds))
            table.forward.put(rows, tokens, context, max(seconds - draft, 0.05 * seconds))
    return table


def _cycles(
    decoder: Decoder, sizes: Sequence[int], rows: int, context: int, until: float
) -> dict[int, float]:
    """Seconds of a cycle at each block length, in a batch of random text behind one prefix."""
    room = 2 * ROUNDS * IN_A_ROW * sum(sizes)
    vocabulary, limit = decoder.info.vocab_size, decoder.info.context_length
    length = max(1, min(context - column_step(), limit - room))
    shared = np.random.default_rng(0).integers(0, vocabulary, size=length).tolist()
    policy = decoder.policy = Sweep(sizes, rows, until)
    for uid in range(rows):
        tail = ((uid + 1) % vocabulary, uid // vocabulary)
        budget = min(room, limit - length - len(tail))
        decoder.add(Request(uid, (*shared, *tail), budget, ignore_eos=True))
    while not policy.over and any(decoder.load()):
        decoder.step()
    decoder.close()
    return policy.times()


def _drafting(drafter: Drafter, rows: int, k: int, context: int) -> float:
    """Seconds of a draft by itself: the median of three, after one to warm up."""
    if not k:
        return 0.0
    lens = Lens(rows)
    lens.bound = context
    lens.offset = mx.full((rows,), context, dtype=mx.int32)
    state = drafter.new_state(lens)
    anchor = mx.zeros((rows,), dtype=mx.int32)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        mx.eval(drafter.propose(state, anchor, mx.full((rows,), k + 1, dtype=mx.int32), k))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def run(order: Order, progress: Progress) -> dict[str, Any]:
    """Load, measure, keep; the result as plain data. Raises LoadError."""
    spec = LoadSpec(
        target=order.target,
        draft=order.draft,
        draft_quant=order.draft_quant,
        block=order.block,
        dtype=order.dtype,
        max_batch=max(order.widths),
    )
    decoder = load_decoder(spec, progress)
    folder = find(str(demo.TARGET_DIR) if order.target == registry.DEMO else order.target)
    key: CostKey = cost_key(folder, read_config(folder), *decoder.pair)
    contexts = {min(c, decoder.info.context_length // 2) for c in order.contexts}
    order = Order(**{**vars(order), "contexts": tuple(contexts)})
    table = sweep(decoder, order, progress)
    path = keep_table(table, Path(order.cost_dir), key) if order.cost_dir else None
    best = best_choices(table, ACCEPTANCES)
    return {
        "table": table.to_json(key),
        "target": decoder.info.target,
        "draft": decoder.info.draft,
        "dtype": decoder.info.dtype,
        "file": str(path) if path else None,
        "wanted": len(order.widths) * len(order.contexts),
        "best": [choice._asdict() for choice in best],
    }


def main() -> int:
    values = json.load(sys.stdin)
    for name in ("widths", "contexts"):
        values[name] = tuple(values[name])
    try:
        _say(run(Order(**values), lambda phase, share: _say({"phase": phase, "share": share})))
    except LoadError as error:
        _say({"error": str(error), "code": error.code})
        return 1
    return 0


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(main())
