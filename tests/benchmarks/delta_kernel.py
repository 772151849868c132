"""The gated delta rule on a GPU: how far its forms are from the steps in fp32, and what they cost.

    python tests/benchmarks/delta_kernel.py [--json FILE] [--shapes qwen3.5-4b,qwen3.5-27b]

First the kernel is built and tried; what the compiler says is shown in full, and the other forms
are then measured without it. Differences are of all lengths and widths with ragged counts, as far
as half of the time allows. Milliseconds are for one layer, of twelve in one evaluation, each with
its own states: the median of five, after two that do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.delta_choice import Heads, difference, sample
from dflash_batch.decoder.delta_kernel import CUDA, METAL, Dialect, Kernel, Tile, tile_for
from dflash_batch.decoder.delta_rule import Block, Chunk, Rule, Steps

SHAPES = {
    "qwen3.5-4b": Heads(16, 32, 128, 128),
    "qwen3.5-9b": Heads(16, 32, 128, 128),  # the 4B's, so not run unless asked for
    "qwen3.5-27b": Heads(16, 48, 128, 128),
    "tiny": Heads(2, 4, 32, 16),
}

LENGTHS = (16, 1, 8, 4, 2)
WIDTHS = (32, 1, 8, 16, 4, 2)
TILES = tuple(
    Tile(lanes, rows)
    for lanes, rows in ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 4), (16, 8), (32, 1), (32, 8))
)
LAYERS = 12

Facts = list[dict[str, Any]]


class Clock(NamedTuple):
    """The time this may take in all."""

    start: float
    seconds: float

    def share(self) -> float:
        return (time.perf_counter() - self.start) / self.seconds


def main(dialect: Dialect | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="qwen3.5-4b,qwen3.5-27b")
    parser.add_argument("--seconds", type=float, default=60, help="how long it may take, about")
    parser.add_argument("--json", type=Path, help="write all the numbers here")
    options = parser.parse_args()
    shapes = {name: SHAPES[name] for name in options.shapes.split(",")}
    clock = Clock(time.perf_counter(), options.seconds)
    dialect = dialect or (METAL if mx.metal.is_available() else CUDA)
    main_heads = next(iter(shapes.values()))
    print(f"mlx {version('mlx')}, {mx.default_device()}; shapes {', '.join(shapes)}")

    facts: dict[str, Any] = {"mlx": version("mlx"), "build": build(dialect, shapes)}
    works = not any(fact["problem"] for fact in facts["build"])
    if works:
        facts["differences"] = differences(Kernel(dialect), shapes, clock)
    named: dict[str, Rule] = {"kernel": Kernel(dialect)} if works else {}
    named |= {"chunk": Chunk(), "steps": Steps()}
    facts["milliseconds"] = costs(named, shapes)
    if works:
        facts["tiles"] = tiles(dialect, main_heads)
    facts["prefill"] = prefills(named, main_heads)
    facts["seconds"] = time.perf_counter() - clock.start
    print(f"took {facts['seconds']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1), "utf-8")
    raise SystemExit(0 if works else 1)


def build(dialect: Dialect, shapes: dict[str, Heads]) -> Facts:
    """Try the kernel as a load does, and show what is wrong with it."""
    facts: Facts = []
    for name, heads in shapes.items():
        for dtype in (mx.bfloat16, mx.float32):
            start = time.perf_counter()
            try:
                problem = difference(Kernel(dialect), heads, dtype)
            except (RuntimeError, ValueError) as e:
                problem = str(e)
            seconds = time.perf_counter() - start
            print(
                f"{name:12} {kind(dtype):9} {problem or 'agrees with the steps'} ({seconds:.1f} s)"
            )
            facts.append(
                {"shape": name, "dtype": kind(dtype), "problem": problem, "seconds": seconds}
            )
    return facts


def differences(rule: Rule, shapes: dict[str, Heads], clock: Clock) -> Facts:
    """Largest differences from the steps on the same inputs in fp32, absolute and relative to the
    largest number; the advance must give the very bits of verify and replay."""
    facts: Facts = []
    kinds = [(name, dtype) for name in shapes for dtype in (mx.bfloat16, mx.float32)]
    for done, (name, dtype) in enumerate(kinds, 1):
        seen = [
            compare(rule, shapes[name], dtype, width, length)
            for length in LENGTHS
            for width in WIDTHS
            if clock.share() < done / len(kinds) / 2
        ]
        facts += [{"shape": name, "dtype": kind(dtype), **one} for one in seen]
        report(f"{name:12} {kind(dtype):9}", seen)
    return facts


def report(what: str, seen: Facts) -> None:
    if not seen:
        print(f"{what} not compared: out of time")
        return
    y, y_rel, state, state_rel = (
        max(one[key] for one in seen) for key in ("y", "y_rel", "state", "state_rel")
    )
    print(
        f"{what} {len(seen)} of {len(LENGTHS) * len(WIDTHS)} cases: y {y:.1e} (rel {y_rel:.1e}), "
        f"state {state:.1e} (rel {state_rel:.1e}), "
        f"advance = verify + replay: {all(one['same_bits'] for one in seen)}",
        flush=True,
    )


def compare(rule: Rule, heads: Heads, dtype: mx.Dtype, rows: int, width: int) -> dict[str, Any]:
    block, state, keep = case(heads, dtype, rows, width)
    # Of a query in fp32 the steps give outputs in fp32; the rest they reckon in it anyway.
    exact = block._replace(q=block.q.astype(mx.float32))
    expected_y, exact_tape = Steps().verify(exact, state)
    expected_end = Steps().replay(exact_tape, state, keep)
    y, tape = rule.verify(block, state)
    end = rule.replay(tape, state, keep)
    settled, same_end = rule.advance(block, state, keep)
    inside = (mx.arange(width, dtype=mx.int32) < keep[:, None])[..., None, None]
    same = mx.array_equal(end, same_end) & mx.array_equal(
        settled, mx.where(inside, y, mx.zeros_like(y))
    )
    off_y, off_state = mx.abs(expected_y - y).max(), mx.abs(expected_end - end).max()
    numbers = off_y, off_y / mx.abs(expected_y).max(), off_state, off_state / mx.abs(end).max()
    values = [float(np.array(number)) for number in numbers]
    return {
        "rows": rows,
        "length": width,
        **dict(zip(("y", "y_rel", "state", "state_rel"), values, strict=True)),
        "same_bits": bool(np.array(same)),
    }


def case(heads: Heads, dtype: mx.Dtype, rows: int, width: int) -> tuple[Block, mx.array, mx.array]:
    """A block, states and counts: the first row keeps all, the others as the dice say."""
    block, state, _ = sample(heads, dtype, rows, width)
    counts = np.random.default_rng(rows * 1000 + width).integers(0, width + 1, size=rows)
    counts[0] = width
    return block, state, mx.array(counts.astype(np.int32))


def costs(rules: dict[str, Rule], shapes: dict[str, Heads]) -> Facts:
    print(f"{'ms a layer, verify + replay':>30}" + "".join(f"{name:>16}" for name in rules))
    facts: Facts = []
    for name, heads in shapes.items():
        first = name == next(iter(shapes))
        for rows in (1, 8, 32) if first else (8, 32):
            for width in (1, 2, 4, 8, 16) if first else (1, 16):
                line = f"{name:>14} B={rows:<3} T={width:<5}"
                for form, rule in rules.items():
                    if form == "steps" and (width not in (1, 16) or not first):
                        line += f"{'':>16}"
                        continue
                    verify, replay = cost(rule, heads, rows, width)
                    line += f"{verify:>9.3f}{replay:>7.3f}"
                    facts.append(
                        {"shape": name, "rows": rows, "length": width, "form": form}
                        | {"verify": verify, "replay": replay}
                    )
                print(line, flush=True)
    return facts


def cost(rule: Rule, heads: Heads, rows: int, width: int) -> tuple[float, float]:
    """Milliseconds of a verify and of a replay in bf16."""
    block, state, keep = case(heads, mx.bfloat16, rows, width)
    states = layered(state)
    tapes = [rule.verify(block, one)[1] for one in states]
    mx.eval(tapes)
    return (
        timed(lambda: [rule.verify(block, one) for one in states]),
        timed(
            lambda: [rule.replay(tape, one, keep) for tape, one in zip(tapes, states, strict=True)]
        ),
    )


def tiles(dialect: Dialect, heads: Heads) -> Facts:
    cases = ((1, 16), (8, 1), (8, 16), (32, 16))
    own = tile_for(heads.key_dim, heads.value_dim, dialect.held)
    print("tile, verify + replay" + "".join(f"{f'B={r} T={t}':>16}" for r, t in cases))
    facts: Facts = []
    for tile in TILES:
        if heads.key_dim % tile.lanes or heads.value_dim % tile.height:
            continue
        line = f"{tile.lanes:>4} lanes, {tile.rows} rows{'*' if tile == own else ' ':5}"
        for rows, width in cases:
            verify, replay = cost(Kernel(dialect, tile), heads, rows, width)
            line += f"{verify:>9.3f}{replay:>7.3f}"
            facts.append(
                {"lanes": tile.lanes, "rows_a_lane": tile.rows, "rows": rows, "length": width}
                | {"verify": verify, "replay": replay}
            )
        print(line, flush=True)
    return facts


def prefills(rules: dict[str, Rule], heads: Heads) -> Facts:
    """One layer's advance over ragged prompts."""
    facts: Facts = []
    rows, width = 8, 512
    block, state, keep = case(heads, mx.bfloat16, rows, width)
    for form, rule in rules.items():
        few = form == "steps"
        states = layered(state)[: 1 if few else 4]

        def run(rule: Rule = rule, states: list[mx.array] = states) -> Any:
            return [rule.advance(block, one, keep) for one in states]

        spent = timed(run, repeats=1 if few else 3, warm=1)
        print(f"prefill of {rows} x {width}, ms a layer: {form:8}{spent:>9.2f}", flush=True)
        facts.append({"form": form, "rows": rows, "length": width, "advance": spent})
    return facts


def layered(state: mx.array) -> list[mx.array]:
    """States of as many layers, none the same array."""
    states = [state + float(layer) for layer in range(LAYERS)]
    mx.eval(states)
    return states


def timed(run: Callable[[], list[Any]], repeats: int = 5, warm: int = 2) -> float:
    """Median milliseconds of one of the layers that `run` lists."""
    spent = []
    for _ in range(warm + repeats):
        start = time.perf_counter()
        layers = run()
        mx.eval(layers)
        spent.append((time.perf_counter() - start) * 1000 / len(layers))
    return statistics.median(spent[warm:])


def kind(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


if __name__ == "__main__":
    main()
