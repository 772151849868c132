"""Makes the bundled demo pair: tokenizer, target, the target's own replies, draft, and a report.

``python -m dflash_batch.decoder.training.demo --out DIR --seed 0`` writes ``DIR/target`` and
``DIR/draft`` in the public layouts. ``--smoke`` goes through every stage of a far smaller pair, in
well under a minute on a CPU.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import Tokenizer

from dflash_batch.decoder.demo.problems import (
    Problem,
    extract_answer,
    few_shot_messages,
    make_problems,
)
from dflash_batch.decoder.training.corpus import (
    Packer,
    Rows,
    Tokens,
    Turn,
    encode_systems,
    encode_turns,
    pad_turns,
)
from dflash_batch.decoder.training.draft import Draft, DraftConfig, save_draft
from dflash_batch.decoder.training.features import FrozenTarget
from dflash_batch.decoder.training.fit import FitSettings
from dflash_batch.decoder.training.measure import tokens_per_cycle
from dflash_batch.decoder.training.objective import train_draft
from dflash_batch.decoder.training.target import (
    build_target,
    chat_batches,
    own_replies,
    round_to_bfloat16,
    save_target,
    target_config,
    train_target,
)
from dflash_batch.decoder.training.tokenizer import (
    END,
    END_OF_TEXT,
    MASK,
    chat_text,
    save_tokenizer,
    token_id,
    train_tokenizer,
)

CHECK_SEED = (
    777  # held-out problems for the progress lines; neither the demo's nor the few-shot seed
)


@dataclass(frozen=True)
class DemoSettings:
    """Everything that shapes the pair; sizes of batches are (rows, tokens)."""

    vocab_size: int = 704
    problems: int = 300_000
    own_problems: int = 80_000
    check_problems: int = 512
    shape: tuple[tuple[str, int], ...] = ()
    draft_layers: int = 2
    draft_intermediate: int | None = None
    taps: tuple[int, ...] = (1, 2, 3)
    block_size: int = 16
    short: tuple[int, int] = (128, 256)
    long: tuple[int, int] = (16, 2048)
    draft_short: tuple[int, int] = (96, 256)
    draft_long: tuple[int, int] = (8, 2048)
    single: int = 192  # tokens of a row that holds one turn
    rounds: int = 16  # of Jacobi iteration
    target_fit: FitSettings = field(default_factory=lambda: FitSettings(steps=8000))
    draft_fit: FitSettings = field(default_factory=lambda: FitSettings(steps=8000, check_every=500))


SMOKE = DemoSettings(
    vocab_size=512,
    problems=400,
    own_problems=16,
    check_problems=4,
    shape=(
        ("hidden_size", 32),
        ("intermediate_size", 48),
        ("num_attention_heads", 2),
        ("num_hidden_layers", 2),
    ),
    draft_layers=1,
    taps=(0, 1),
    short=(4, 192),
    long=(1, 512),
    draft_short=(2, 192),
    draft_long=(1, 256),
    rounds=2,
    target_fit=FitSettings(steps=24, peak_rate=5e-3, report_every=6, check_every=24),
    draft_fit=FitSettings(steps=16, peak_rate=5e-3, report_every=4, check_every=16),
)


class Words(NamedTuple):
    """The tokenizer and what is derived from it."""

    tokenizer: Tokenizer
    systems: list[Tokens]
    newline: Tokens
    end: int

    def packer(self, turns: list[Turn], seed: int) -> Packer:
        return Packer(turns, self.systems, self.newline, seed)


def make_demo(settings: DemoSettings, out: Path, seed: int, seconds: float = math.inf) -> None:
    """Run all stages and write the pair under ``out``; see the module's docstring."""
    began = time.monotonic()
    mx.random.seed(seed)
    problems = make_problems(seed, settings.problems, "train")
    words = _words(settings, problems)
    turns = encode_turns(words.tokenizer, problems)
    _say(f"stage=data problems={len(problems)} seconds={time.monotonic() - began:.1f}")

    config = _config(settings, words.tokenizer)
    model = _trained_target(settings, config, words, turns, seed, 0.45 * seconds)
    save_target(model, config, out / "target")
    save_tokenizer(words.tokenizer, out / "target", config["max_position_embeddings"])

    own = _own_turns(settings, model, words, turns[: settings.own_problems])
    left = 0.9 * (seconds - (time.monotonic() - began))
    draft, draft_config = _trained_draft(settings, config, model, words, own, seed, left)
    save_draft(draft, draft_config, out / "draft")
    _report(settings, words, model, draft, draft_config)
    _say(f"stage=done seconds={time.monotonic() - began:.1f}")


def _words(settings: DemoSettings, problems: list[Problem]) -> Words:
    # Without the special tokens: these are never split, so no merge is to be spent on them.
    texts = [f"user\n{p.question}\nassistant\n{p.reply}\n" for p in problems[:20_000]]
    texts += [f"{m['role']}\n{m['content']}" for m in few_shot_messages()] * 20
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    newline = np.array(tokenizer.encode("\n", add_special_tokens=False).ids, np.int32)
    return Words(tokenizer, encode_systems(tokenizer), newline, token_id(tokenizer, END))


def _config(settings: DemoSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    end, pad = token_id(tokenizer, END), token_id(tokenizer, END_OF_TEXT)
    return target_config(settings.vocab_size, end, pad, **dict(settings.shape))


def _trained_target(
    settings: DemoSettings,
    config: dict[str, Any],
    words: Words,
    turns: list[Turn],
    seed: int,
    seconds: float,
) -> nn.Module:
    model = build_target(config)
    fresh = make_problems(CHECK_SEED, settings.check_problems)
    rows = pad_turns(encode_turns(words.tokenizer, fresh), settings.single)

    def check(step: int) -> str:
        return f"exact={_exact(settings, model, words, rows, fresh):.4f}"

    batches = chat_batches(words.packer(turns, seed), settings.short, settings.long)
    _say("stage=target")
    train_target(model, batches, replace(settings.target_fit, seconds=seconds), _say, check)
    round_to_bfloat16(model)
    _say(f"stage=rounded {check(0)}")
    return model


def _own_turns(
    settings: DemoSettings, model: nn.Module, words: Words, turns: list[Turn]
) -> list[Turn]:
    """The same questions with the target's own replies; what did not settle is left out."""
    rows, settled = own_replies(
        model, pad_turns(turns, settings.single), words.end, settings.rounds
    )
    own = [
        Turn(turn.asked, tokens[supervised])
        for turn, tokens, supervised, kept in zip(
            turns, rows.tokens, rows.supervised, settled, strict=True
        )
        if kept
    ]
    _say(f"stage=own asked={len(turns)} settled={len(own)}")
    return own or turns


def _trained_draft(
    settings: DemoSettings,
    config: dict[str, Any],
    model: nn.Module,
    words: Words,
    own: list[Turn],
    seed: int,
    seconds: float,
) -> tuple[Draft, DraftConfig]:
    draft_config = DraftConfig.for_target(
        config,
        layers=settings.draft_layers,
        taps=settings.taps,
        mask_token_id=token_id(words.tokenizer, MASK),
        block_size=settings.block_size,
        intermediate_size=settings.draft_intermediate,
    )
    draft, target = Draft(draft_config), FrozenTarget(model, settings.taps)
    fresh = make_problems(CHECK_SEED, min(128, settings.check_problems))
    turns = encode_turns(words.tokenizer, fresh)
    rows, settled = own_replies(
        model, pad_turns(turns, settings.single), words.end, settings.rounds
    )
    kept = _some(rows, settled)

    def check(step: int) -> str:
        return f"tau={tokens_per_cycle(draft, target, draft_config, kept):.3f}"

    _say("stage=draft")
    train_draft(
        draft,
        draft_config,
        target,
        _draft_rows(words.packer(own, seed + 1), settings),
        replace(settings.draft_fit, seconds=seconds),
        seed=seed,
        report=_say,
        check=check,
    )
    return draft, draft_config


def _draft_rows(packer: Packer, settings: DemoSettings) -> Iterator[Rows]:
    while True:
        for size in (settings.draft_short,) * 3 + (settings.draft_long,):
            yield packer.rows(*size)


def _report(
    settings: DemoSettings, words: Words, model: nn.Module, draft: Draft, config: DraftConfig
) -> None:
    """Exact match and tokens per cycle on held-out problems, alone and behind the few-shot prefix.

    Both come from forwards of one shape; ``measure`` decodes token by token.
    """
    target = FrozenTarget(model, config.target_layer_ids)
    fresh = make_problems(CHECK_SEED + 1, min(200, settings.check_problems))
    turns = encode_turns(words.tokenizer, fresh)
    prefix_text = "".join(chat_text(m["role"], m["content"]) for m in few_shot_messages())
    prefix = np.array(words.tokenizer.encode(prefix_text, add_special_tokens=False).ids, np.int32)
    for name, before in (("zero_shot", None), ("few_shot", prefix)):
        length = settings.single + (0 if before is None else len(before))
        rows = pad_turns(turns, length, before)
        exact = _exact(settings, model, words, rows, fresh)
        own, settled = own_replies(model, rows, words.end, settings.rounds, batch=64)
        tau = tokens_per_cycle(draft, target, config, _some(own, settled), batch=16)
        _say(f"stage=report form={name} n={len(fresh)} exact={exact:.4f} tau={tau:.3f}")


def _exact(
    settings: DemoSettings, model: nn.Module, words: Words, rows: Rows, problems: list[Problem]
) -> float:
    """Share of problems whose greedy reply ends in the right number."""
    own, settled = own_replies(model, rows, words.end, settings.rounds, batch=128)
    texts = words.tokenizer.decode_batch(
        [tokens[marks].tolist() for tokens, marks in zip(own.tokens, own.supervised, strict=True)]
    )
    right = [
        bool(ok) and extract_answer(text) == problem.answer
        for text, ok, problem in zip(texts, settled, problems, strict=True)
    ]
    return sum(right) / len(right)


def _some(rows: Rows, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> Rows:
    kept = chosen if chosen.any() else np.ones_like(chosen)
    return Rows(rows.tokens[kept], rows.supervised[kept])


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Read the command line and make the pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="steps of each of the two trainings")
    parser.add_argument("--time-budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller pair")
    given = parser.parse_args()
    settings = SMOKE if given.smoke else DemoSettings()
    if given.steps is not None:
        settings = replace(
            settings,
            target_fit=replace(settings.target_fit, steps=given.steps),
            draft_fit=replace(settings.draft_fit, steps=given.steps),
        )
    make_demo(settings, given.out, given.seed, given.time_budget)


if __name__ == "__main__":
    main()
