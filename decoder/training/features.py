"""A frozen target as draft training sees it: tapped residual streams, embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.targets.base import Target


class Frozen(Protocol):
    """What training asks of a target."""

    def features(self, tokens: mx.array) -> mx.array:
        """The taps of one causal forward over tokens [N, T] from position 0: [N, T, n*h].

        Tap ``t`` is what leaves layer ``t``, from 0: after attention and MLP of that layer, before
        any further norm (DFlash, arXiv 2602.06036).
        """
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Input embeddings [..., h], as a draft reads them."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [..., vocab] of normed hidden states [..., h]."""
        ...


class TappedTarget:
    """Any target the decoder runs, by its own forward. Weights and dtype stay as they are."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self._target = target
        self._taps = tuple(taps)
        self.embed = target.embed
        self.head = target.head

    def features(self, tokens: mx.array) -> mx.array:
        rows, length = tokens.shape
        lens = Lens(rows, step=length)  # as many columns as tokens
        lens.open(length, keep=mx.full((rows,), length, dtype=mx.int32))
        seen = self._target.forward(tokens, self._target.new_arena(lens), self._taps)
        assert seen.features is not None
        return seen.features


class Tapped(NamedTuple):
    """``features`` [N, T, n*h], lowest layer first; ``hidden`` [N, T, h] after the final norm."""

    features: mx.array
    hidden: mx.array


class FrozenTarget:
    """An mlx-lm model with mlx-lm's own caches: the demo's, and the yardstick's, independent of
    the decoder. Its ``model`` holds ``embed_tokens``, ``layers`` and ``norm``, and layers are
    called as ``layer(x, mask, cache)``: the Llama and Qwen3 families.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        assert max(layers) < len(model.model.layers), "a tap lies behind the last layer"
        assert list(layers) == sorted(set(layers)), "taps must ascend"
        self.layers = tuple(layers)
        self._model = model

    def features(self, tokens: mx.array) -> mx.array:
        return self.tap(tokens).features

    def tap(self, tokens: mx.array, cache: list[Any] | None = None) -> Tapped:
        """One causal forward over ``tokens`` [N, T] behind what is in ``cache``."""
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
        rows: mx.array = self._model.model.embed_tokens(tokens)
        return rows

    def head(self, hidden: mx.array) -> mx.array:
        if self._model.args.tie_word_embeddings:
            logits: mx.array = self._model.model.embed_tokens.as_linear(hidden)
        else:
            logits = self._model.lm_head(hidden)
        return logits
