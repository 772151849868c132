"""Qwen3.5 and 3.6 targets, dense and with experts: our layer loop over mlx-lm's own modules.

Three of four layers are GatedDeltaNet (`gdn`), the fourth is gated attention with partial rotary
positions.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_batch.decoder import delta_rule
from dflash_batch.decoder.arena import Lens
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
        self._rule = delta_rule.choose()
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
        mask = arena.lens.causal()
        caches, deltas = iter(arena.attention.layers), iter(arena.recurrent)
        tapped: dict[int, mx.array] = {}
        for i, block in enumerate(self._blocks):
            x = block.input_layernorm(h)
            h = h + (next(deltas)(x) if block.is_linear else block.self_attn(x, mask, next(caches)))
            h = h + block.mlp(block.post_attention_layernorm(h))
            if i in taps:
                tapped[i] = h
        return Forward(h, side_by_side(tapped, taps))
