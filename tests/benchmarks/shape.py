"""Decode speed on a public model's shape, with random weights and acceptance as published.

    python tests/benchmarks/shape.py [--shape qwen3.5-4b] [--widths 1,8,16,32,64] [--p 0.85]
                                     [--json FILE]

The draft's forward is really run and paid for, and so is every verify; only whether a draft stands
is drawn (each with probability p, given that those before it stood). Texts mean nothing here.
mlx-lm's `BatchGenerator` decodes the same prompts with the same weights. Ours: plain, each block
length, and what `--spec auto` chooses by costs measured before. Each system runs three times: the
first warms up, and the faster of the others counts, since a host's clock moves. `decode` is tokens
a second without the time of prompts, as mlx-lm counts it; `total` is with all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator

from dflash_batch.decoder.acceptance import Drafts, Greedy, Judged
from dflash_batch.decoder.bench import Order, sweep
from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.diagnostics import CycleFacts, Parts
from dflash_batch.decoder.draft_config import DraftConfig
from dflash_batch.decoder.draft_model import DFlashDrafter, DraftModel
from dflash_batch.decoder.drafters import Drafter, NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.loading import FAMILIES
from dflash_batch.decoder.policy import Fixed, Goodput, Landed, Policy
from dflash_batch.decoder.sampling import Sampler
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.types import Completion, ModelInfo, Request


class Shape(NamedTuple):
    """A target of random weights, and what its draft has otherwise."""

    family: str
    target: dict[str, Any]
    taps: tuple[int, ...]
    draft: dict[str, Any]


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rope_theta": 1e6,
}

SHAPES = {
    "qwen3-4b": Shape(
        "qwen3",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_theta": 1e6,
        },
        taps=(1, 9, 17, 25, 33),
        draft={},
    ),
    "qwen3.5-4b": Shape(
        "qwen3_5",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "intermediate_size": 9216,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 248320,
            "rope_theta": 1e7,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        taps=(1, 8, 15, 22, 29),
        draft={
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "tiny": Shape("qwen3", TINY, taps=(1, 3), draft={}),
    "tiny-hybrid": Shape(
        "qwen3_5",
        {
            **TINY,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        },
        taps=(1, 3),
        draft={"num_attention_heads": 8, "head_dim": 8},
    ),
}

CONTEXT = 4096


class Drawn(Greedy):
    """Greedy, but whether a draft stands is drawn."""

    def __init__(self, p: float) -> None:
        self.p = p

    def judge(
        self, logits: mx.array, drafts: Drafts, width: mx.array, sampler: Sampler, anchor: mx.array
    ) -> Judged:
        judged = super().judge(logits, drafts, width, sampler, anchor)
        return Judged(judged.chosen, mx.random.uniform(shape=drafts.tokens.shape) < self.p)


class Speed(NamedTuple):
    """Tokens a second."""

    decode: float  # prompts not counted
    total: float


BLOCKS = (4, 8, 16)
RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--widths", default="1,8,16,32,64")
    parser.add_argument("--p", type=float, default=0.85)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--sweep", type=float, default=40, help="seconds to measure costs")
    parser.add_argument("--json", type=Path, help="write all the numbers here")
    options = parser.parse_args()
    widths = [int(w) for w in options.widths.split(",")]
    model, target, drafter = make(SHAPES[options.shape])
    rule = Drawn(options.p)
    print(f"{options.shape}, {target.dtype}, p = {options.p}, on {mx.default_device()}")
    table = costs(target, drafter, rule, widths, options)
    names = ["mlx-lm", "plain", *(f"T={block}" for block in BLOCKS), "auto"]
    print(f"{'width':<14}" + "".join(f"{name:>8}" for name in names) + "   over mlx-lm")
    dice = np.random.default_rng(0)
    facts: list[dict[str, Any]] = []
    for width in widths:
        prompts = dice.integers(0, target.vocab_size - 1, (width, options.prompt)).tolist()
        speeds = {"mlx-lm": peer(model, prompts, options.tokens)}
        policies = {f"T={block}": Fixed(block - 1, trim=False) for block in BLOCKS}
        systems: tuple[tuple[str, Policy | None, Drafter], ...] = (
            ("plain", None, NoDrafter()),
            *((name, policy, drafter) for name, policy in policies.items()),
            ("auto", Chosen(table, drafter.spec.max_k + 1), drafter),
        )
        for name, policy, using in systems:
            decoder = Decoder(target, using, info=info(target), max_batch=width, policy=policy)
            decoder._greedy = rule
            speeds[name] = ours(decoder, prompts, options.tokens)
            if isinstance(policy, Chosen):
                taken = policy.chosen.most_common()
        show(width, names, speeds)
        print(f"{'':>14}auto took " + ", ".join(f"{n} cycles of {w}x{t}" for (w, t), n in taken))
        times = parts(target, drafter, rule, prompts, options.tokens)
        facts.append({"width": width, "speeds": {n: s._asdict() for n, s in speeds.items()}})
        facts[-1]["parts_ms"] = times
    print("parts of a cycle, ms, each waited for:")
    for fact in facts:
        for block, times in fact["parts_ms"].items():
            cells = "  ".join(f"{part} {ms:.1f}" for part, ms in times.items())
            print(f"  width {fact['width']:<4} T={block:<3} {cells}")
    tops = {name: max(fact["speeds"][name]["decode"] for fact in facts) for name in names}
    ours_top = max(speed for name, speed in tops.items() if name != "mlx-lm")
    print(f"best of all widths: ours {ours_top / tops['mlx-lm']:.2f} x mlx-lm's")
    print(f"peak memory {mx.get_peak_memory() / 2**30:.1f} GiB")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "widths": facts}, indent=1))


class Chosen(Goodput):
    """`--spec auto`, and what it chose: cycles by width and block."""

    def __init__(self, table: CostTable, most: int) -> None:
        super().__init__(table, most)
        self.chosen: Counter[tuple[int, int]] = Counter()

    def landed(self, cycle: Landed) -> None:
        super().landed(cycle)
        self.chosen[cycle.width, cycle.tokens] += 1


def show(width: int, names: list[str], speeds: dict[str, Speed]) -> None:
    for which in ("decode", "total"):
        of = {name: getattr(speeds[name], which) for name in names}
        cells = "".join(f"{of[name]:>8.0f}" for name in names)
        ratios = " ".join(f"{of[name] / of['mlx-lm']:.2f}" for name in names[1:])
        print(f"{width:>4} {which:<9}{cells}   {ratios}", flush=True)


def costs(
    target: Target, drafter: DFlashDrafter, rule: Drawn, widths: list[int], options: Any
) -> CostTable:
    """What `dflash-batch bench` would measure."""
    decoder = Decoder(target, drafter, info=info(target), max_batch=max(widths))
    decoder._greedy = rule
    context = -(-(options.prompt + options.tokens) // 256) * 256
    order = Order("shape", widths=tuple(widths), contexts=(context,), limit_s=options.sweep)
    start = time.perf_counter()
    table = sweep(decoder, order, lambda phase, share: None)
    print(f"costs measured in {time.perf_counter() - start:.0f} s; ms by width and block:")
    for b, t, c in sorted(table.forward.cells):
        if t in (1, *BLOCKS):
            print(f"  {b}x{t}: {1e3 * float(table.cycle(b, [t], c)[0]):.1f}", end="")
    print()
    return table


def parts(
    target: Target, drafter: DFlashDrafter, rule: Drawn, prompts: list[list[int]], tokens: int
) -> dict[int, dict[str, float]]:
    """Median milliseconds of each part of a cycle, without and with a whole block."""
    found = {}
    for block, using in ((1, NoDrafter()), (BLOCKS[-1], drafter)):
        watch = Watching()
        policy = Fixed(block - 1, trim=False)
        decoder = Decoder(
            target,
            using,
            info=info(target),
            max_batch=len(prompts),
            policy=policy,
            watch=watch,
        )
        decoder._greedy = rule
        for i, prompt in enumerate(prompts):
            decoder.add(Request(i, tuple(prompt), tokens))
        for _ in range(14):
            decoder.step()
        decoder.close()
        found[block] = {
            part: statistics.median(cycle[part] for cycle in watch.seen[len(watch.seen) // 3 :])
            for part in watch.seen[-1]
        }
    return found


class Watching(Parts):
    """Notes the parts of each cycle."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def cycle(self, facts: CycleFacts) -> None:
        self.seen.append(facts.parts_ms)

    def job(self, completion: Completion) -> None:
        pass

    def close(self) -> None:
        pass


def make(shape: Shape) -> tuple[Any, Target, DFlashDrafter]:
    common = {"rms_norm_eps": 1e-6, **shape.target}
    module = importlib.import_module(f"mlx_lm.models.{shape.family}")
    model = module.Model(module.ModelArgs.from_dict(arguments(shape.family, common)))
    randomise(model)
    target = FAMILIES[shape.family](model, shape.family, CONTEXT)
    config = DraftConfig.parse(
        {
            **common,
            **shape.draft,
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 5,
            "num_target_layers": target.layers,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": list(shape.taps)},
        }
    )
    draft = DraftModel(config)
    randomise(draft)
    return model, target, DFlashDrafter(draft, config, target, 16)


def arguments(family: str, common: dict[str, Any]) -> dict[str, Any]:
    """A target's `config.json`: of a hybrid, its text model is a part."""
    text = {
        "model_type": family,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        **common,
    }
    if family != "qwen3_5":
        return text
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": common["rope_theta"],
        "partial_rotary_factor": 0.25,
    }
    return {"model_type": family, "vocab_size": common["vocab_size"], "text_config": text}


def randomise(model: Any) -> None:
    model.update(
        tree_map(
            lambda a: (mx.random.normal(a.shape) * 0.02).astype(mx.bfloat16), model.parameters()
        )
    )
    mx.eval(model.parameters())


def info(target: Target) -> ModelInfo:
    return ModelInfo(
        target="shape",
        family=target.family,
        draft=None,
        draft_notice=None,
        block=16,
        dtype="bfloat16",
        context_length=CONTEXT,
        vocab_size=target.vocab_size,
        eos_token_ids=frozenset(),
        has_tokenizer=False,
        has_chat_template=False,
    )


def ours(decoder: Decoder, prompts: list[list[int]], tokens: int) -> Speed:
    admit = decoder._admit
    prefill = 0.0

    def timed() -> list[Any]:
        nonlocal prefill
        start = time.perf_counter()
        over = admit()
        prefill += time.perf_counter() - start
        return over

    decoder._admit = timed  # type: ignore[method-assign]
    speeds = []
    for _ in range(RUNS):
        prefill = 0.0
        start = time.perf_counter()
        requests = (Request(i, tuple(p), tokens) for i, p in enumerate(prompts))
        count = sum(len(c.token_ids) for c in decoder.run(requests))
        seconds = time.perf_counter() - start
        assert count == len(prompts) * tokens
        # A row's first token comes with its prompt.
        speeds.append(Speed(len(prompts) * (tokens - 1) / (seconds - prefill), count / seconds))
    return best(speeds)


def best(speeds: list[Speed]) -> Speed:
    return Speed(*(max(of) for of in zip(*speeds[1:], strict=True)))


def peer(model: Any, prompts: list[list[int]], tokens: int) -> Speed:
    speeds = []
    for _ in range(RUNS):
        generator = BatchGenerator(
            model,
            max_tokens=tokens,
            completion_batch_size=len(prompts),
            prefill_batch_size=min(8, len(prompts)),
        )
        with generator.stats() as stats:
            start = time.perf_counter()
            generator.insert(prompts, [tokens] * len(prompts))
            count = 0
            while count < len(prompts) * tokens:
                count += len(generator.next_generated())
            seconds = time.perf_counter() - start
        generator.close()
        speeds.append(Speed(stats.generation_tps, count / seconds))
    return best(speeds)


if __name__ == "__main__":
    main()
