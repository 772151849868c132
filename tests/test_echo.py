"""Echo: the log probabilities of prompts, against mlx-lm's own forward."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny import OracleDrafter, as_target, finish, greedy, make_decoder, make_model, request

from dflash_batch.decoder import echo, prefill
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.types import Completion, Request

RANDOM = np.random.default_rng(5)
PROMPTS = [RANDOM.integers(0, 48, n).tolist() for n in (37, 1, 20, 52)]


def direct(model: Any, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Log p of every token after the first, and log p of everything at these places."""
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    logs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1]
    return logs[np.arange(len(tokens) - 1), tokens[1:]], logs


def check(model: Any, prompt: list[int], done: Completion, most: int) -> None:
    tokens = [*prompt, *done.token_ids]
    own, logs = direct(model, tokens)
    assert done.logprobs is not None
    assert [entry.chosen.token for entry in done.logprobs] == tokens
    assert math.isnan(done.logprobs[0].chosen.logprob)
    assert done.logprobs[0].top == ()
    for entry, logprob, row in zip(done.logprobs[1:], own, logs, strict=True):
        assert entry.chosen.logprob == pytest.approx(logprob, abs=1e-4)
        likeliest = np.argsort(-row, kind="stable")[:most]
        assert [c.token for c in entry.top] == likeliest.tolist()
        assert [c.logprob for c in entry.top] == pytest.approx(row[likeliest].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma4"])
def test_prompts_are_scored_as_by_a_direct_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHUNK", 16)  # several forwards to a prompt
    monkeypatch.setattr(echo, "MOST_LOGITS", 5 * 48)  # and several heads to a forward
    model = make_model(name)
    texts = [prompt + greedy(model, prompt, 6) for prompt in PROMPTS if len(prompt) > 1]
    drafter = OracleDrafter(texts, block=4, wrong=0.3, seed=1)
    decoder = make_decoder(as_target(model, name), drafter, max_batch=3)
    budgets = [0, 1, 1, 6]
    for uid, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True)):
        decoder.add(request(uid, prompt, budget, echo=True, logprobs=4))
    done = finish(decoder)
    for uid, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True)):
        assert list(done[uid].token_ids) == greedy(model, prompt, budget)
        assert done[uid].finish_reason == "length"
        assert done[uid].prefill_tokens == len(prompt)
        check(model, prompt, done[uid], 4)


def test_a_held_prefix_hides_nothing_and_neighbours_keep_theirs() -> None:
    """Rows with and without echo behind one prefix, in an order that mixes them."""
    model = make_model("qwen3")
    shared = RANDOM.integers(0, 48, 40).tolist()
    prompts = [[*shared, i, i + 1] for i in range(5)]
    decoder = make_decoder(as_target(model, "qwen3"), NoDrafter(), max_batch=4)
    for uid, prompt in enumerate(prompts):
        scored: dict[str, Any] = {"echo": True, "logprobs": 1} if uid % 2 else {}
        decoder.add(request(uid, prompt, 3, **scored))
    done = finish(decoder)
    for uid, prompt in enumerate(prompts):
        assert list(done[uid].token_ids) == greedy(model, prompt, 3)
        if uid % 2:
            check(model, prompt, done[uid], 1)
        else:
            assert done[uid].logprobs is None


def test_echo_without_log_probabilities_runs_as_any_row_does() -> None:
    model = make_model("qwen3")
    decoder = make_decoder(as_target(model, "qwen3"), NoDrafter())
    decoder.add(request(0, PROMPTS[0], 0, echo=True))
    decoder.add(request(1, PROMPTS[0], 4, echo=True))
    done = finish(decoder)
    assert [len(done[uid].token_ids) for uid in range(2)] == [0, 4]
    assert done[0].logprobs is None
    assert done[0].echo == ""  # there is no tokenizer here


def test_a_prompt_may_fill_the_context_when_nothing_is_to_be_said() -> None:
    model = make_model("qwen3")
    decoder = make_decoder(as_target(model, "qwen3"), NoDrafter())
    full = RANDOM.integers(0, 48, decoder.info.context_length).tolist()
    assert decoder.room(full, 0) == 0
    with pytest.raises(ValueError, match="0 with echo"):
        Request(uid=0, prompt=(1,), max_tokens=0)


class Counting:
    """Notes the largest head that a target was asked for."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def logits(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._target.logits(hidden)
        self.most = max(self.most, logits.size)
        return logits


def test_the_logits_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "MOST_LOGITS", 7 * 48)
    target: Any = Counting(as_target(make_model("qwen3"), "qwen3"))
    decoder = make_decoder(target, NoDrafter())
    for uid, prompt in enumerate(PROMPTS):
        decoder.add(request(uid, prompt, 0, echo=True, logprobs=2))
    done = finish(decoder)
    assert target.most <= 7 * 48
    for uid, prompt in enumerate(PROMPTS):
        logprobs = done[uid].logprobs
        assert logprobs is not None
        assert len(logprobs) == len(prompt)
