"""What a model is reckoned to need, against what it really holds."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from tiny import make_shape, make_target

from dflash_batch.decoder.cycle import Slots, prefill
from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.reckoning import Footprint, footprint


def held(name: str, rows: int) -> tuple[int, int]:
    """Bytes in the arena of a tiny float32 model, and the columns it has."""
    target = make_target(name)
    drafter: Any = NoDrafter()
    slots = Slots(rows, target, drafter)
    tokens = mx.ones((rows, 3), dtype=mx.int32)
    mx.eval(prefill(slots, target, drafter, tokens, mx.full((rows,), 3, dtype=mx.int32)))
    arrays = list(slots.arena.arrays())
    mx.eval(arrays)
    return sum(array.nbytes for array in arrays), slots.lens.columns


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_5"])
@pytest.mark.parametrize("rows", [1, 4])
def test_what_is_reckoned_is_what_an_arena_holds(name: str, rows: int) -> None:
    config = make_shape(name)
    (config.get("text_config") or config)["dtype"] = "float32"
    bytes_held, columns = held(name, rows)
    assert footprint(config, 0).at(rows, columns) == bytes_held


def test_sliding_layers_hold_a_window_and_shared_ones_nothing() -> None:
    config: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "dtype": "bfloat16",
    }
    assert footprint(config, 7) == Footprint(7, 3 * 2 * 2 * 2 * 16, 3 * 2 * 2 * 2 * 8 * 10)
    shared = footprint({**config, "num_kv_shared_layers": 2}, 7)
    assert shared == Footprint(7, 2 * 2 * 2 * 2 * 16, 2 * 2 * 2 * 2 * 8 * 10)
    draft = {**config, "dflash_config": {}, "global_head_dim": None}
    assert footprint(draft, 7) == Footprint(7, 6 * 2 * 2 * 2 * 8, 0)
    pattern = {**config, "layer_types": None, "sliding_window_pattern": 2}
    assert footprint(pattern, 7) == footprint(config, 7)


def test_footprints_of_a_pair_add_up() -> None:
    pair = Footprint(100, 2, 5) + Footprint(10, 1, 0)
    assert pair.at(8, 1000) == 110 + 8 * (3000 + 5)


def test_qwen3_4b_as_known() -> None:
    config = {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
    }
    assert footprint(config, 0).per_token == 147_456  # 144 KiB a token
