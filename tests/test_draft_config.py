"""Draft configurations: public spellings are read, what is not implemented is refused by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import pytest

from dflash_batch.decoder.draft_config import DraftConfig, default_taps
from dflash_batch.decoder.errors import LoadError

BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "num_target_layers": 6,
    "rope_theta": 10000.0,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 3]},
}


def parse(**changes: Any) -> DraftConfig:
    config = {**BASE, **changes}
    return DraftConfig.parse({k: v for k, v in config.items() if v != "absent"})


def test_the_older_spelling() -> None:
    config = parse()
    assert config.block_size == 8
    assert config.mask_token_id == 63
    assert config.target_layer_ids == (1, 3)
    assert config.rope_theta == 10000.0
    assert config.windows == (None, None, None)
    assert config.causal == (False, False, False)


def test_the_newer_spelling() -> None:
    config = parse(
        rope_theta="absent",
        block_size="absent",
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
        dflash_config={
            "block_size": 4,
            "mask_token_id": 2,
            "target_layer_ids": [0],
            "input_embedding_scale": 1.5,
            "output_multiplier": 0.8,
        },
        final_logit_softcapping=30.0,
    )
    assert (config.block_size, config.rope_theta, config.softcap) == (4, 5e5, 30.0)
    assert (config.embedding_scale, config.output_multiplier) == (1.5, 0.8)
    assert config.rope_scaling is None


def test_sliding_layers_are_causal_inside_the_block_unless_the_config_says_otherwise() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    plain = parse(layer_types=kinds, sliding_window=12)
    assert plain.windows == (12, 12, None)
    assert plain.causal == (True, True, False)
    assert parse(layer_types=kinds, sliding_window=12, is_causal=False).causal == (False,) * 3
    nested = {**BASE["dflash_config"], "causal": True}
    assert parse(dflash_config=nested).causal == (True,) * 3


def test_default_taps_spread_over_the_target() -> None:
    assert default_taps(1, 36) == (18,)
    assert default_taps(5, 36) == (1, 9, 17, 25, 33)
    assert default_taps(8, 40) == (1, 6, 11, 16, 22, 27, 32, 37)
    without = {"mask_token_id": 63}
    assert parse(dflash_config=without, num_target_layers=36).target_layer_ids == (1, 17, 33)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "no conv_group_size"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"dflash_config": {**BASE["dflash_config"], "selector_rank": 8}}, "selector_rank"),
        (
            {"dflash_config": {**BASE["dflash_config"], "projector_type": "domino"}},
            "projector_type",
        ),
        ({"dflash_config": {**BASE["dflash_config"], "novelty": 1}}, "novelty"),
        ({"draft_vocab_size": 32}, "draft_vocab_size"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"target_hidden_size": 64}, "target_hidden_size"),
        ({"rope_theta": "absent"}, "rope_theta"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "mrope"),
        (
            {
                "rope_theta": "absent",
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            "rope_parameters differ",
        ),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "Qwen3DSparkModel"),
        ({"architectures": "absent", "speculators_model_type": "dflash"}, "speculators_model_type"),
        ({"aux_hidden_state_layer_ids": [2, 4]}, "aux_hidden_state_layer_ids"),
        ({"dflash_config": {**BASE["dflash_config"], "markov_rank": 256}}, "markov_rank"),
        ({"selector_vocab_size": 32}, "selector_vocab_size"),
        ({"use_swa": True, "swa_window_size": 128}, "swa_window_size, use_swa"),
        ({"dflash_config": {**BASE["dflash_config"], "attention_mode": "x"}}, "attention_mode"),
        ({"hidden_size": "absent"}, "hidden_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        parse(**changes)


def test_the_second_generation() -> None:
    more = {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 16,
    }
    nested = {**BASE["dflash_config"], **more}
    second = parse(architectures=["DFlash2DraftModel"], dflash_config=nested).second
    assert second is not None
    assert asdict(second) == more
    assert parse().second is None


def test_an_extension_that_repeats_another_key_is_no_obstacle() -> None:
    assert parse(draft_vocab_size=64, target_hidden_size=32, selector_vocab_size=64).block_size == 8
    nested = {**BASE["dflash_config"], "use_swa": False, "selector_vocab_size": 64}
    assert parse(dflash_config=nested).block_size == 8


@pytest.mark.parametrize("where", ["top", "nested"])
@pytest.mark.parametrize("key", ["is_causal", "causal"])
def test_causality_is_read_wherever_it_stands(where: str, key: str) -> None:
    kinds = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 12}
    nested = {**BASE["dflash_config"], **({key: False} if where == "nested" else {})}
    top = {key: False} if where == "top" else {}
    assert parse(**kinds, **top, dflash_config=nested).causal == (False,) * 3


def test_rope_parameters_that_are_the_same_for_all_kinds_of_layers() -> None:
    one = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    both = {"full_attention": one, "sliding_attention": dict(one)}
    config = parse(rope_theta="absent", rope_parameters=both)
    assert (config.rope_theta, config.rope_scaling) == (1e7, None)


class Generation(NamedTuple):
    """A public draft: what its config.json holds that matters, and how it must be read."""

    name: str
    shape: tuple[int, int, int, tuple[int, int, int]]  # h, F, L, (H, K, D)
    target_layers: int
    taps: tuple[int, ...]
    mask: int
    block: int
    sliding: int  # layers, the first ones
    vocab: int
    theta: float
    more: dict[str, Any]
    causal: tuple[bool, ...]


MIXED = {"sliding_window": 2048}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
FULL5, MOSTLY5 = (False,) * 5, (True,) * 4 + (False,)
QWEN = (32, 8, 128)
GENERATIONS = (
    Generation("Qwen3-4B-DFlash-b16", (2560, 9728, 5, QWEN), 36, (1, 9, 17, 25, 33),
               151669, 16, 0, 151936, 1e6, {}, FULL5),
    Generation("Qwen3-8B-DFlash-b16", (4096, 12288, 5, QWEN), 36, (1, 9, 17, 25, 33),
               151669, 16, 0, 151936, 1e6, {}, FULL5),
    Generation("Qwen3.5-4B-DFlash", (2560, 9728, 5, QWEN), 32, (1, 8, 15, 22, 29),
               248070, 16, 0, 248320, 1e7, {}, FULL5),
    Generation("Qwen3.5-35B-A3B-DFlash", (2048, 6144, 8, (32, 4, 128)), 40, (1, 10, 19, 28, 37),
               248070, 16, 0, 248320, 1e7, {}, (False,) * 8),
    Generation("Qwen3.6-27B-DFlash", (5120, 17408, 5, QWEN), 64, (1, 16, 31, 46, 61),
               248070, 16, 4, 248320, 1e7, MIXED, MOSTLY5),
    Generation("gemma-4-31b-it-DFlash", (5376, 10752, 5, (64, 8, 128)), 60,
               (1, 12, 23, 35, 46, 57), 4, 16, 4, 262144, 1e6,
               {**MIXED, "final_logit_softcapping": 30.0}, MOSTLY5),
    Generation("Qwen3.8-27B-DFlash2", (5120, 17408, 5, QWEN), 64, (5, 19, 33, 47, 61),
               248070, 8, 5, 248320, 1e7, {**MIXED, "is_causal": False, **SECOND}, FULL5),
)  # fmt: skip


@pytest.mark.parametrize("draft", GENERATIONS, ids=lambda draft: draft.name)
@pytest.mark.parametrize("newer", [False, True], ids=["older keys", "newer keys"])
def test_every_generation_of_public_drafts_is_read(draft: Generation, newer: bool) -> None:
    """With block size and rope where older files have them, and where newer ones do."""
    hidden, inner, layers, (heads, kv_heads, dim) = draft.shape
    second = {k: v for k, v in draft.more.items() if k in SECOND}
    sliding = ["sliding_attention"] * draft.sliding + ["full_attention"] * (layers - draft.sliding)
    config: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": draft.vocab,
        "num_target_layers": draft.target_layers,
        "layer_types": sliding,
        "use_sliding_window": bool(draft.sliding),
        "max_window_layers": layers,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "dflash_config": {
            "mask_token_id": draft.mask,
            "target_layer_ids": list(draft.taps),
            **second,
        },
        **{k: v for k, v in draft.more.items() if k not in SECOND},
    }
    if newer:
        config["rope_parameters"] = {"rope_theta": draft.theta, "rope_type": "default"}
        config["dflash_config"]["block_size"] = draft.block
    else:
        config |= {"rope_theta": draft.theta, "rope_scaling": None, "block_size": draft.block}

    got = DraftConfig.parse(config)

    assert (got.hidden_size, got.intermediate_size, got.num_layers) == (hidden, inner, layers)
    assert (got.num_heads, got.num_kv_heads, got.head_dim) == (heads, kv_heads, dim)
    assert (got.target_layer_ids, got.num_target_layers) == (draft.taps, draft.target_layers)
    assert (got.mask_token_id, got.block_size) == (draft.mask, draft.block)
    assert (got.rope_theta, got.rope_scaling, got.vocab_size) == (draft.theta, None, draft.vocab)
    assert got.windows == (2048,) * draft.sliding + (None,) * (layers - draft.sliding)
    assert got.causal == draft.causal
    assert got.softcap == draft.more.get("final_logit_softcapping")
    assert (got.second is not None) == bool(second)


def test_an_extension_that_is_switched_off_is_no_obstacle() -> None:
    assert parse(use_swa=False, draft_vocab_size=None).block_size == 8
