"""Decode speed on a public model's shape, with random weights and acceptance as published.

    python tests/benchmarks/shape.py [--shape qwen3.5-4b] [--widths 1,8,16,32,64] [--p 0.85]

The draft's forward is really run and paid for, and so is every verify; only whether a draft stands
is drawn (each with probability p, given that those before it stood). Texts mean nothing here.
mlx-lm's `BatchGenerator` decodes the same prompts with the same weights. Times include prefill;
each system runs twice and the second run counts.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator

from dflash_batch.decoder.acceptance import Drafts, Greedy, Judged
from dflash_batch.decoder.cost import CostTable
from dflash_batch.decoder.draft_config import DraftConfig
from dflash_batch.decoder.draft_model import DFlashDrafter, DraftModel
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.loading import FAMILIES
from dflash_batch.decoder.policy import Fixed, Goodput
from dflash_batch.decoder.sampling import Sampler
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.types import ModelInfo, Request


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--widths", default="1,8,16,32,64")
    parser.add_argument("--p", type=float, default=0.85)
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    model, target, drafter = make(SHAPES[options.shape])
    dice = np.random.default_rng(0)
    vocab = target.vocab_size
    print(f"{options.shape}, {target.dtype}, p = {options.p}, on {mx.default_device()}")
    print(f"{'width':>6}{'mlx-lm':>9}{'plain':>9}{'block 16':>10}{'auto':>9}   tokens/s; ratios")
    table = CostTable()
    for width in [int(w) for w in options.widths.split(",")]:
        prompts = dice.integers(0, vocab - 1, size=(width, options.prompt)).tolist()
        speeds = [peer(model, prompts, options.tokens)]
        for policy, using in (
            (None, NoDrafter()),
            (Fixed(15, trim=False), drafter),
            (Goodput(table, 16), drafter),
        ):
            decoder = Decoder(target, using, info=info(target), max_batch=width, policy=policy)
            decoder._greedy = Drawn(options.p)
            speeds.append(ours(decoder, prompts, options.tokens))
        ratios = " ".join(f"{speed / speeds[0]:.2f}" for speed in speeds[1:])
        cells = "".join(f"{s:>{w}.0f}" for s, w in zip(speeds, (9, 9, 10, 9), strict=True))
        print(f"{width:>6}{cells}   {ratios}", flush=True)
    print(f"peak memory {mx.get_peak_memory() / 2**30:.1f} GiB")


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


def ours(decoder: Decoder, prompts: list[list[int]], tokens: int) -> float:
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        requests = (Request(i, tuple(p), tokens) for i, p in enumerate(prompts))
        count = sum(len(c.token_ids) for c in decoder.run(requests))
        seconds = time.perf_counter() - start
        assert count == len(prompts) * tokens
    return len(prompts) * tokens / seconds


def peer(model: Any, prompts: list[list[int]], tokens: int) -> float:
    seconds = 0.0
    for _ in range(2):
        generator = BatchGenerator(
            model,
            max_tokens=tokens,
            completion_batch_size=len(prompts),
            prefill_batch_size=min(8, len(prompts)),
        )
        start = time.perf_counter()
        generator.insert(prompts, [tokens] * len(prompts))
        count = 0
        while count < len(prompts) * tokens:
            count += len(generator.next_generated())
        seconds = time.perf_counter() - start
        generator.close()
    return len(prompts) * tokens / seconds


if __name__ == "__main__":
    main()
