"""Gemma 4 text targets: our layer loop over mlx-lm's own modules.

What differs from a dense stack: scaled embeddings, sliding and full layers in turn, late layers
that read the keys and values of an earlier one, an extra input per layer and token (small
models), and soft-capped logits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.attention import as_mask
from dflash_batch.decoder.targets.base import Forward, check_rope
from dflash_batch.decoder.targets.stack import Stack, side_by_side
from dflash_batch.decoder.window import WindowArena

KeysValues = tuple[mx.array, mx.array]


class Gemma4Target(Stack):
    """`gemma4_text`, alone or as the language model of the multimodal `gemma4`.

    `head` is the head before soft-capping: a draft says itself whether its logits are capped.
    """

    def __init__(self, model: nn.Module, family: str, context_length: int) -> None:
        text: Any = getattr(model, "language_model", model)
        super().__init__(text, family, context_length)
        self._softcap: float | None = text.args.final_logit_softcapping
        self._sliding = [block.layer_type == "sliding_attention" for block in self._blocks]
        self._owners = sum(bool(block.self_attn.has_kv) for block in self._blocks)
        for block in self._blocks:
            check_rope(block.self_attn.rope)

    @property
    def cuttable(self) -> bool:
        return False

    def new_arena(self, lens: Lens) -> WindowArena:
        """One layer for each that has keys and values of its own; they come first."""
        return WindowArena(self._sliding[: self._owners], self._model.window_size, lens)

    def forward(self, tokens: mx.array, arena: WindowArena, taps: tuple[int, ...]) -> Forward:
        arena.open()
        h = self.embed(tokens)
        extra = self._extra(tokens, h)
        full, near = (as_mask(m.causal(), self.dtype) for m in (arena.lens, arena.window))
        shared: dict[int, KeysValues] = {}  # what a layer with its own wrote, for later layers
        tapped: dict[int, mx.array] = {}
        for i, block in enumerate(self._blocks):
            h, shared[i], _ = block(
                h,
                near if self._sliding[i] else full,
                arena.layers[i] if i < self._owners else None,
                per_layer_input=None if extra is None else extra[:, :, i],
                shared_kv=shared.get(self._model.previous_kvs[i]),
                offset=arena.lens.offset,
            )
            if i in taps:
                tapped[i] = h
        return Forward(h, side_by_side(tapped, taps))

    def _extra(self, tokens: mx.array, h: mx.array) -> mx.array | None:
        """The extra input of each token and layer, [R, T, layers, p], if the model has any."""
        if not self._model.hidden_size_per_layer_input:
            return None
        own = self._model._get_per_layer_inputs(tokens)
        extra: mx.array = self._model._project_per_layer_inputs(h, own)
        return extra

    def logits(self, hidden: mx.array) -> mx.array:
        out = super().logits(hidden)
        if self._softcap is not None:
            out = logit_softcap(self._softcap, out)
        return out

    def embed(self, tokens: mx.array) -> mx.array:
        x: mx.array = super().embed(tokens) * self._model.embed_scale
        return x
