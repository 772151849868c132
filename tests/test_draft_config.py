"""Draft configurations: public spellings are read, what is not implemented is refused by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

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


def test_an_extension_that_is_switched_off_is_no_obstacle() -> None:
    assert parse(use_swa=False, draft_vocab_size=None).block_size == 8
