"""Decode speed: ours, plain and drafted, against mlx-lm's `batch_generate`, in one run.

    python tests/benchmarks/decode.py PROMPTS.jsonl -m TARGET [--draft DRAFT] [--widths 1,8,32]

PROMPTS.jsonl is a batch file of chat lines. All systems get the same token ids, decode greedily
and stop by themselves; times include prefill; each runs three times and the faster of the last two
counts. mlx-lm's `stream_generate` takes the first prompts one by one. `auto` has its costs measured
before, as `dflash-batch bench` does.
It also says how many of our texts equal mlx-lm's own, and for those that part, the gap between the
two best logits where they part: on a GPU, rows are summed in another order at another width, so
texts may part at near-ties.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import batch_generate, load, stream_generate

from dflash_batch.decoder.bench import Order
from dflash_batch.decoder.bench import run as measure
from dflash_batch.decoder.loading import DTYPES, find, load_decoder
from dflash_batch.decoder.types import Completion, LoadSpec, Request

Texts = list[list[int]]

RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts")
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--block", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--widths", default="1,8,32")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--alone", type=int, default=8, help="prompts to run one by one")
    parser.add_argument("--blocks", default="", help="block lengths to try beside the draft's own")
    parser.add_argument("--sweep", type=float, default=20, help="seconds to measure costs")
    parser.add_argument("--json", type=Path, help="write all the numbers here")
    options = parser.parse_args()
    with open(options.prompts, encoding="utf-8") as file:
        chats = [json.loads(line)["body"]["messages"] for line in file][: options.limit]
    spec = LoadSpec(
        target=options.model, draft=options.draft, block=options.block, dtype=options.dtype
    )
    reference = Peer(options.model, options.dtype)
    prompts = [reference.encode(chat) for chat in chats]
    print(f"{len(prompts)} prompts, {sum(map(len, prompts)):,} tokens, on {mx.default_device()}")
    print(f"{'system':<28}{'width':>6}{'tok/s':>9}{'jobs/s':>8}{'tau':>6}{'prefilled':>11}")
    widths = [int(w) for w in options.widths.split(",")]
    reference.alone(prompts[: options.alone], options.max_tokens)
    with tempfile.TemporaryDirectory() as costs:
        learn(replace(spec, cost_dir=costs), widths, options.sweep)
        for width in widths:
            theirs = reference.run(prompts, width, options.max_tokens)
            arms = [replace(spec, spec=how) for how in ("off", "on")]
            arms += [replace(spec, block=int(n)) for n in options.blocks.split(",") if n]
            arms.append(replace(spec, spec="auto", cost_dir=costs))
            for arm in arms:
                ours = run(replace(arm, max_batch=width), prompts, options.max_tokens)
                compare(reference, prompts, theirs, ours, width)
    print(f"peak memory {mx.get_peak_memory() / 2**30:.2f} GiB")
    if options.json:
        options.json.write_text(json.dumps(FACTS, indent=1))


FACTS: list[dict[str, Any]] = []


def learn(spec: LoadSpec, widths: list[int], seconds: float) -> None:
    """Measure what cycles cost here, for `auto`."""
    order = Order(
        spec.target,
        draft=spec.draft,
        block=spec.block,
        dtype=spec.dtype,
        widths=tuple(widths),
        contexts=(512,),
        limit_s=seconds,
        cost_dir=spec.cost_dir,
    )
    measure(order, lambda phase, share: None)


def report(name: str, width: int, texts: Texts, seconds: float, tau: float, prefilled: int) -> None:
    tokens = sum(map(len, texts))
    FACTS.append(
        {
            "system": name,
            "width": width,
            "tokens_per_s": tokens / seconds,
            "jobs_per_s": len(texts) / seconds,
            "tau": tau,
            "prefilled": prefilled,
        }
    )
    print(
        f"{name:<28}{width:>6}{tokens / seconds:>9.1f}{len(texts) / seconds:>8.2f}{tau:>6.2f}"
        f"{prefilled:>11,}",
        flush=True,
    )


def run(spec: LoadSpec, prompts: Texts, max_tokens: int) -> Texts:
    """Our decoder, once to warm up and once for the clock."""
    decoder = load_decoder(spec)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        requests = (Request(uid, tuple(p), max_tokens) for uid, p in enumerate(prompts))
        done: dict[int, Completion] = {c.uid: c for c in decoder.run(requests)}
        times.append(time.perf_counter() - start)
        decoder.close()  # the next run shall find no prefix held
    seconds = min(times[1:])
    texts = [list(done[uid].token_ids) for uid in range(len(prompts))]
    cycles = sum(c.cycles for c in done.values())
    report(
        f"dflash-batch, drafts {spec.spec}" + (f", block {spec.block}" if spec.block else ""),
        spec.max_batch,
        texts,
        seconds,
        (sum(map(len, texts)) - len(texts)) / max(cycles, 1),
        sum(c.prefill_tokens for c in done.values()),
    )
    return texts


class Peer:
    """mlx-lm on the same weights."""

    def __init__(self, name: str, dtype: str) -> None:
        loaded: Any = load(str(find(name)))
        self.model, self.tokenizer = loaded[0], loaded[1]
        if dtype != "auto":
            self.model.set_dtype(DTYPES[dtype])

    def encode(self, chat: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def alone(self, prompts: Texts, max_tokens: int) -> None:
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            texts = [
                [int(r.token) for r in stream_generate(self.model, self.tokenizer, p, max_tokens)]
                for p in prompts
            ]
            times.append(time.perf_counter() - start)
        prefilled = sum(map(len, prompts))
        report("mlx-lm stream_generate", 1, texts, min(times[1:]), 1.0, prefilled)

    def run(self, prompts: Texts, width: int, max_tokens: int) -> Texts:
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            answer: Any = batch_generate(
                self.model,
                self.tokenizer,
                prompts,
                max_tokens=max_tokens,
                completion_batch_size=width,
                prefill_batch_size=min(width, 8),
                return_token_ids=True,
            )
            times.append(time.perf_counter() - start)
        seconds = min(times[1:])
        texts: Texts = [list(map(int, ids)) for ids in answer.token_ids]
        prefilled = sum(map(len, prompts))
        report("mlx-lm batch_generate", width, texts, seconds, 1.0, prefilled)
        return texts

    def gap(self, text: list[int]) -> float:
        """Distance of the two best logits after `text`, in the model's own arithmetic."""
        best = np.array(mx.topk(self.model(mx.array([text]))[0, -1].astype(mx.float32), 2))
        return float(abs(best[0] - best[1]))


def compare(peer: Peer, prompts: Texts, theirs: Texts, ours: Texts, width: int) -> None:
    """Print how many texts are equal, and how close the call was where they part."""
    eos = set(peer.tokenizer.eos_token_ids)
    gaps = []
    for prompt, a, b in zip(prompts, theirs, ours, strict=True):
        # mlx-lm leaves the stop token out of its ids; it is in ours.
        a, b = ([t for t in text if t not in eos] for text in (a, b))
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None and len(a) != len(b):
            at = min(len(a), len(b))
        if at is not None:
            gaps.append(peer.gap([*prompt, *a[:at]]))
    note = f"; part at top-2 gaps up to {max(gaps):.3g}" if gaps else ""
    print(f"    {len(ours) - len(gaps)} of {len(ours)} texts equal mlx-lm's{note}", flush=True)


if __name__ == "__main__":
    main()
