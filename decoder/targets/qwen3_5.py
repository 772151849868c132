"""Qwen3.5 and 3.6 targets, dense and with experts: our layer loop over mlx-lm's own modules.

Three of four layers are GatedDeltaNet (`gdn`), the fourth is gated attention with partial rotary
positions.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_batch.decoder.arena import LayerKV, Lens
from dflash_batch.decoder.attention import as_mask, heads, rotated
from dflash_batch.decoder.delta_choice import Heads, choose, forms
from dflash_batch.decoder.gdn import DeltaLayer
from dflash_batch.decoder.hybrid import HybridArena
from dflash_batch.decoder.targets.base import Forward, check_rope
from dflash_batch.decoder.targets.stack import Stack, side_by_side


class Qwen35Target(Stack):
    """The language model of `qwen3_5` or `qwen3_5_moe`."""

    def __init__(self, model: nn.Module, family: str, context_length: int) -> None:
        text: Any = model.language_model
        super().__init__(text, family, context_length)
        self._deltas = [block.linear_attn for block in self._blocks if block.is_linear]
        self._rule = choose(forms(), Heads.of(self._deltas[0]), self.dtype)
        for block in self._blocks:
            if not block.is_linear:
                check_rope(block.self_attn.rope)

    @property
    def cuttable(self) -> bool:
        return False

    def new_arena(self, lens: Lens) -> HybridArena:
        recurrent = [DeltaLayer(module, lens, self.dtype, self._rule) for module in self._deltas]
        return HybridArena(self.layers - len(recurrent), recurrent, lens)

    def forward(self, tokens: mx.array, arena: HybridArena, taps: tuple[int, ...]) -> Forward:
        h = self.embed(tokens)
        mask = as_mask(arena.lens.causal(), self.dtype)
        caches, deltas = iter(arena.attention.layers), iter(arena.recurrent)
        tapped: dict[int, mx.array] = {}
        for i, block in enumerate(self._blocks):
            x = block.input_layernorm(h)
            if block.is_linear:
                h = h + next(deltas)(x)
            else:
                h = h + gated_attention(block.self_attn, x, mask, next(caches))
            h = h + block.mlp(block.post_attention_layernorm(h))
            if i in taps:
                tapped[i] = h
        return Forward(h, side_by_side(tapped, taps))


def gated_attention(module: Any, x: mx.array, mask: mx.array, cache: LayerKV) -> mx.array:
    """Attention whose output is gated: each head of q_proj holds its query, then its gate."""
    rows, width, _ = x.shape
    both = module.q_proj(x).reshape(rows, width, module.num_attention_heads, -1)
    queries, gate = mx.split(both, 2, axis=-1)
    queries = module.q_norm(queries).transpose(0, 2, 1, 3)
    keys = heads(module.k_proj(x), module.num_key_value_heads, module.k_norm)
    values = heads(module.v_proj(x), module.num_key_value_heads, None)
    out = rotated(module, queries, keys, values, mask, cache)
    gated: mx.array = module.o_proj(out * mx.sigmoid(gate.reshape(rows, width, -1)))
    return gated
