"""Does a night of short jobs cost more memory each hour, and what do coming and going cost?

    python tests/benchmarks/steady.py [--shape tiny] [--jobs 2000] [--width 8] [--json FILE]

Short jobs of many lengths run through one decoder of random weights, plain and drafted. Memory is
read after each tenth: MLX's own and the process's. Joining is timed as the loading of a prompt that
has been run into a slot, leaving as the emptying of one, both until the device is done, against the
median cycle of the same width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.policy import Fixed
from dflash_batch.decoder.types import Request

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.shape import SHAPES, info, make

MiB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all the numbers here")
    options = parser.parse_args()
    _, target, drafter = make(SHAPES[options.shape])
    policy = Fixed(7, trim=False)
    decoder = Decoder(target, drafter, info=info(target), max_batch=options.width, policy=policy)
    print(f"{options.shape}, width {options.width}, on {mx.default_device()}")
    readings = soak(decoder, options.jobs, target.vocab_size)
    settled = readings[len(readings) // 5 :]  # after warm-up
    grown = {name: settled[-1][name] - settled[0][name] for name in ("mlx_mib", "process_mib")}
    jobs = settled[-1]["jobs"] - settled[0]["jobs"]
    print(f"growth over the last {jobs:,} jobs: {grown}")
    shares = turns(decoder, options.width, target.vocab_size)
    print("  ".join(f"{name} {value:.3f}" for name, value in shares.items()))
    if options.json:
        facts = {"readings": readings, "growth_mib": grown, "turns": shares}
        options.json.write_text(json.dumps(facts, indent=1))


def soak(decoder: Decoder, jobs: int, vocab: int) -> list[dict[str, Any]]:
    dice = np.random.default_rng(0)
    readings: list[dict[str, Any]] = []
    requests = (
        Request(
            uid,
            tuple(dice.integers(0, vocab - 1, size=int(dice.integers(4, 40))).tolist()),
            int(dice.integers(1, 12)),
        )
        for uid in range(jobs)
    )
    for done, _ in enumerate(decoder.run(requests), 1):
        if done % max(jobs // 10, 1) == 0:
            readings.append(
                {
                    "jobs": done,
                    "mlx_mib": round(mx.get_active_memory() / MiB, 2),
                    "process_mib": round(resident() / MiB, 1),
                }
            )
            print(
                "  ".join(f"{name} {value:,}" for name, value in readings[-1].items()), flush=True
            )
    return readings


def resident() -> int:
    """Bytes this process holds; 0 where the system does not tell as Linux does."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * 4096


def turns(decoder: Decoder, width: int, vocab: int) -> dict[str, float]:
    """Milliseconds of a cycle, of a join and of a leave, each waited for."""
    for uid in range(width):
        decoder.add(Request(uid, tuple(range(1, 33)), 400))
    cycles = []
    for _ in range(16):
        start = time.perf_counter()
        decoder.step()
        mx.eval(decoder._slots.lens.offset)
        cycles.append(time.perf_counter() - start)
    slots = decoder._slots
    held = slots.arena.snapshot(0, 32), slots.draft.snapshot(0, 32)
    mx.eval(held[0].arrays())
    joins, leaves = [], []
    for _ in range(16):
        start = time.perf_counter()
        slots.arena.load(width - 1, held[0])
        slots.draft.load(width - 1, held[1])
        slots.place(width - 1, length=32, anchor=1, remaining=9)
        mx.eval(slots.arena.arrays(), slots.lens.offset, slots.anchor, slots.remaining)
        joins.append(time.perf_counter() - start)
        start = time.perf_counter()
        slots.place(width - 1, length=0, anchor=0, remaining=0)
        mx.eval(slots.lens.offset, slots.anchor, slots.remaining)
        leaves.append(time.perf_counter() - start)
    decoder.close()
    cycle = 1e3 * statistics.median(cycles[4:])
    join, leave = (1e3 * statistics.median(times[4:]) for times in (joins, leaves))
    return {
        "cycle_ms": cycle,
        "join_ms": join,
        "leave_ms": leave,
        "join_share": join / cycle,
        "leave_share": leave / cycle,
    }


if __name__ == "__main__":
    main()
