"""A frozen target as draft training sees it: tapped residual streams, embedding and head.

Works for mlx-lm models whose ``model`` holds ``embed_tokens``, ``layers`` and ``norm`` and whose
layers are called as ``layer(x, mask, cache)``: the Llama and Qwen3 families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask


class Tapped(NamedTuple):
    """``features`` [N, T, n*h], lowest layer first; ``hidden`` [N, T, h] after the final norm."""

    features: mx.array
    hidden: mx.array


class FrozenTarget:
    """Reads a target without training it. The model's dtype is kept."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        assert max(layers) < len(model.model.layers), "a tap lies behind the last layer"
        assert list(layers) == sorted(set(layers)), "taps must ascend"
        self.layers = tuple(layers)
        self._model = model

    def tap(self, tokens: mx.array, cache: list[Any] | None = None) -> Tapped:
        """One causal forward over ``tokens`` [N, T]; tap ``t`` is what leaves layer ``t``, from 0.

        DFlash (arXiv 2602.06036): after attention and MLP of that layer, before any further norm.
        """
        inner = self._model.model
        stream = inner.embed_tokens(tokens)
        states = cache if cache is not None else [None] * len(inner.layers)
        mask = create_attention_mask(stream, states[0])
        kept: list[mx.array] = []
        for index, (layer, state) in enumerate(zip(inner.layers, states, strict=True)):
            stream = layer(stream, mask, state)
            if index in self.layers:
                kept.append(stream)
        return Tapped(mx.concatenate(kept, axis=-1), inner.norm(stream))

    def embed(self, tokens: mx.array) -> mx.array:
        """Token embeddings [..., h]."""
        rows: mx.array = self._model.model.embed_tokens(tokens)
        return rows

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab] of normed hidden states [..., h]."""
        if self._model.args.tie_word_embeddings:
            logits: mx.array = self._model.model.embed_tokens.as_linear(hidden)
        else:
            logits = self._model.lm_head(hidden)
        return logits
