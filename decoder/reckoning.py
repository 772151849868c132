"""What a model needs in memory, reckoned from its config and the size of its files. No mlx.

    memory = weights + rows · (tokens of context · bytes per token + bytes per row)

Per token are keys and values of layers that keep all of them; per row is what has a size of its
own: windows of sliding layers and states of recurrent ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Footprint:
    """Bytes of one model. Footprints of a pair add up."""

    weights: int
    per_token: int
    per_row: int

    def at(self, rows: int, context: int) -> int:
        """Bytes with `rows` rows of `context` tokens each; what a forward needs comes on top."""
        return self.weights + rows * (context * self.per_token + self.per_row)

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            self.weights + other.weights,
            self.per_token + other.per_token,
            self.per_row + other.per_row,
        )


def footprint(config: dict[str, Any], weights: int) -> Footprint:
    """Of a `config.json` (a target's or a draft's) and the bytes of its weights.

    A quantised model keeps its keys and values in the dtype of what is not quantised.
    """
    text: dict[str, Any] = config.get("text_config") or config
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or "bfloat16"
    size = _SIZES.get(str(named), 2)
    kinds = _layer_kinds(text)
    heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
    dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
    wide = int(text.get("num_global_key_value_heads") or heads) * int(
        text.get("global_head_dim") or dim
    )
    full, sliding = kinds.count("full_attention"), kinds.count("sliding_attention")
    window = int(text.get("sliding_window") or 0)
    recurrent = kinds.count("linear_attention") * (_recurrent(text, size))
    return Footprint(
        weights=weights,
        per_token=2 * size * full * wide,
        per_row=2 * size * sliding * heads * dim * window + recurrent,
    )


def _layer_kinds(text: dict[str, Any]) -> list[str]:
    """The kind of each layer that keeps something of its own."""
    layers = int(text["num_hidden_layers"])
    if "dflash_config" in text:
        return ["full_attention"] * layers  # a draft's windows are masks: it keeps all of a row
    kinds: Iterable[str] = text.get("layer_types") or ()
    if not kinds and (every := text.get("full_attention_interval")):
        own = (
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
        )
        kinds = list(own)
    if not kinds and (every := text.get("sliding_window_pattern")):
        kinds = [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
        ]
    shared = int(text.get("num_kv_shared_layers") or 0)
    return list(kinds or ["full_attention"] * layers)[: layers - shared]


def _recurrent(text: dict[str, Any], size: int) -> int:
    """Bytes of a GatedDeltaNet layer and row: its float32 state, and the convolution's window."""
    keys = int(text.get("linear_num_key_heads", 0)) * int(text.get("linear_key_head_dim", 0))
    heads, dim = (
        int(text.get("linear_num_value_heads", 0)),
        int(text.get("linear_value_head_dim", 0)),
    )
    state = 4 * heads * dim * int(text.get("linear_key_head_dim", 0))
    taps = int(text.get("linear_conv_kernel_dim", 1)) - 1
    return state + size * taps * (2 * keys + heads * dim)
