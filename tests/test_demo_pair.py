"""The bundled checkpoints: public layout, small, and able to do what the model card says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from dflash_batch.decoder.demo import DRAFT_DIR, TARGET_DIR
from dflash_batch.decoder.demo.problems import (
    MAX_TOKENS,
    extract_answer,
    few_shot_messages,
    make_problems,
)
from dflash_batch.decoder.training.draft import load_draft
from dflash_batch.decoder.training.measure import dflash_greedy, plain_greedy


@pytest.fixture(scope="module")
def pair() -> Any:
    """(target in float32, its tokenizer), loaded as anyone would load them."""
    model, tokenizer = load(str(TARGET_DIR))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def test_both_checkpoints_together_stay_small() -> None:
    files = [path for folder in (TARGET_DIR, DRAFT_DIR) for path in folder.iterdir()]

    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_the_draft_has_all_public_keys_and_fits_the_target() -> None:
    target, draft = config(TARGET_DIR), config(DRAFT_DIR)
    nested = draft["dflash_config"]

    assert draft["architectures"] == ["DFlashDraftModel"]
    assert draft["model_type"] == "qwen3"
    assert draft["block_size"] == nested["block_size"] == 16
    assert draft["num_target_layers"] == target["num_hidden_layers"]
    assert draft["hidden_size"] == target["hidden_size"]
    assert draft["vocab_size"] == target["vocab_size"]
    assert max(nested["target_layer_ids"]) < draft["num_target_layers"]
    assert draft["layer_types"] == ["full_attention"] * draft["num_hidden_layers"]
    assert draft["rope_theta"] == target["rope_theta"]


def test_the_draft_has_exactly_the_public_tensors() -> None:
    c = config(DRAFT_DIR)
    h, f, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    wide, narrow = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {
        "fc.weight": (h, len(c["dflash_config"]["target_layer_ids"]) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(c["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.self_attn.q_proj.weight": (wide, h),
            f"layers.{i}.self_attn.k_proj.weight": (narrow, h),
            f"layers.{i}.self_attn.v_proj.weight": (narrow, h),
            f"layers.{i}.self_attn.o_proj.weight": (h, wide),
            f"layers.{i}.self_attn.q_norm.weight": (d,),
            f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (f, h),
            f"layers.{i}.mlp.up_proj.weight": (f, h),
            f"layers.{i}.mlp.down_proj.weight": (h, f),
        }

    weights: Any = mx.load(str(DRAFT_DIR / "model.safetensors"))

    assert {name: weight.shape for name, weight in weights.items()} == shapes
    assert {weight.dtype for weight in weights.values()} == {mx.bfloat16}


def test_the_tokenizer_splits_digits_and_gives_text_back(pair: Any) -> None:
    _, tokenizer = pair
    text = "Mia has 147 apples – ünï\n#### 12"

    tokens = tokenizer.encode(text, add_special_tokens=False)

    assert tokenizer.decode(tokens) == text
    digits = [tokenizer.decode([token]) for token in tokens]
    assert [piece for piece in digits if piece.strip().isdigit()] == list("14712")
    assert tokenizer.eos_token_id == config(TARGET_DIR)["eos_token_id"]
    mask = config(DRAFT_DIR)["dflash_config"]["mask_token_id"]
    assert tokenizer.convert_ids_to_tokens(mask) == "<|mask|>"


def test_the_prefix_leaves_room_in_the_context(pair: Any) -> None:
    _, tokenizer = pair
    prefix = tokenizer.apply_chat_template(few_shot_messages(), tokenize=True)

    assert 400 <= len(prefix) <= 1000
    assert len(prefix) + 100 + MAX_TOKENS < config(TARGET_DIR)["max_position_embeddings"]


def test_plain_greedy_solves_problems_without_a_prefix(pair: Any) -> None:
    model, tokenizer = pair
    problems = make_problems(5150, 4)

    right = 0
    for problem in problems:
        prompt = chat(tokenizer, [{"role": "user", "content": problem.question}])
        reply = tokenizer.decode(plain_greedy(model, prompt, tokenizer.eos_token_id, MAX_TOKENS))
        right += extract_answer(reply) == problem.answer

    assert right >= 3


def test_drafted_equals_plain_behind_worked_pairs_and_accepts_several(pair: Any) -> None:
    model, tokenizer = pair
    draft, draft_config = load_draft(DRAFT_DIR)
    problem, stop = make_problems(5151, 1)[0], tokenizer.eos_token_id
    question = {"role": "user", "content": problem.question}
    prompt = chat(tokenizer, [*few_shot_messages(1), question])

    plain = plain_greedy(model, prompt, stop, MAX_TOKENS)
    drafted = dflash_greedy(model, draft, draft_config, prompt, stop, MAX_TOKENS)

    assert drafted.tokens == plain
    assert extract_answer(tokenizer.decode(plain)) == problem.answer
    assert (len(drafted.tokens) - 1) / drafted.cycles >= 4


def chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    tokens: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokens


def config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values
