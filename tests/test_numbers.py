"""Logits that are no numbers: the row fails by name, and its neighbours never notice."""

from __future__ import annotations

import functools
import math
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import OracleDrafter, as_target, finish, greedy, make_decoder, make_model, request

from dflash_batch.decoder.cycle import sound
from dflash_batch.decoder.drafters import NoDrafter

PROMPTS = [[5, 9, 11], [6, 9, 13, 8], [7, 30, 12], [8, 2, 2, 40], [9, 1, 33]]
ILL = 1
COUNT = 14


@functools.cache
def case(name: str) -> tuple[Any, int, list[list[int]]]:
    """A model in which one token is not a number; that token, and the texts of the sound model.

    Only row ILL says it. The token's keys and values are no numbers either, as after an overflow.
    """
    model = make_model(name)
    texts = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    others = {t for row in range(len(PROMPTS)) if row != ILL for t in PROMPTS[row] + texts[row]}
    others |= {0, *PROMPTS[ILL]}  # 0 fills up the shorter prompts of a forward
    token = next(t for t in texts[ILL][3:] if t not in others)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    (path,) = [path for path in weights if path.endswith("embed_tokens.weight")]
    spoilt = (mx.arange(48) == token)[:, None]
    model.load_weights([(path, mx.where(spoilt, math.nan, weights[path]))], strict=False)
    return model, token, texts


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_without_numbers_fails_and_leaves_its_slot_clean(
    name: str, drafts: int, depth: int
) -> None:
    model, _, texts = case(name)
    drafter: Any = NoDrafter()
    if drafts:
        whole = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
        drafter = OracleDrafter(whole, block=drafts + 1, wrong=0.0, seed=1)
    decoder = make_decoder(as_target(model, name), drafter, max_batch=3, depth=depth)
    for uid, prompt in enumerate(PROMPTS):  # the last two take slots that others have left
        decoder.add(request(uid, prompt, COUNT))
    done = finish(decoder)

    assert sorted(done) == list(range(len(PROMPTS)))
    for uid, text in enumerate(texts):
        fault = done[uid].fault
        if uid == ILL:
            assert fault is not None
            assert fault.code == "numerical_error"
        else:
            assert fault is None
            assert list(done[uid].token_ids) == text


@pytest.mark.parametrize("scored", [False, True])
def test_a_prompt_without_numbers_fails_alone(scored: bool) -> None:
    model, token, texts = case("qwen3")
    decoder = make_decoder(as_target(model, "qwen3"), NoDrafter())
    options: dict[str, Any] = {"echo": True, "logprobs": 2} if scored else {}
    for uid, prompt in enumerate((PROMPTS[0], [9, token, 12], PROMPTS[2])):
        decoder.add(request(uid, prompt, COUNT, **options))
    done = finish(decoder)
    assert [done[uid].fault is None for uid in range(3)] == [True, False, True]
    assert [list(done[uid].token_ids) for uid in (0, 2)] == [texts[0], texts[2]]
    assert done[1].logprobs is None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_what_counts_as_no_number(dtype: mx.Dtype) -> None:
    values = [0.0, math.nan, math.inf, -math.inf]
    logits = mx.zeros((4, 3, 5000)).astype(dtype)
    for row, value in enumerate(values):
        logits[row, 1, 4321] = value
    logits[3, 2] = -math.inf
    first, second, third = (mx.array([[i >= n for i in (2, 1, 0)]] * 4) for n in (2, 1, 0))
    assert sound(logits, first).tolist() == [True] * 4
    assert sound(logits, second).tolist() == [True, False, False, True]
    assert sound(logits, third).tolist() == [True, False, False, False], "nothing can be chosen"
