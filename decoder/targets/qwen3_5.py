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


class Qwen35Target:
    """The language model of `qwen3_5` or `qwen3_5_moe`."""

    def __init__(self, model: nn.Module, family: str, context_length: int) -> None:
        text: Any = model.language_model
        args = text.args
        self.family = family
        self.context_length = context_length
        self._model: Any = text.model
        self._blocks: list[Any] = self._model.layers
        self._lm_head = None if args.tie_word_embeddings else text.lm_head
        self.layers = len(self._blocks)
        self.hidden_size: int = args.hidden_size
        self.vocab_size: int = args.vocab_size
        self.dtype: mx.Dtype = self._model.norm.weight.dtype
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
        features = mx.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
        return Forward(h, features)

    def logits(self, hidden: mx.array) -> mx.array:
        return self.head(self._model.norm(hidden))

    def embed(self, tokens: mx.array) -> mx.array:
        x: mx.array = self._model.embed_tokens(tokens)
        return x

    def head(self, hidden: mx.array) -> mx.array:
        if self._lm_head is not None:
            out: mx.array = self._lm_head(hidden)
        else:
            out = self._model.embed_tokens.as_linear(hidden)
        return out
