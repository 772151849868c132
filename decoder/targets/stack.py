"""What the targets share: a stack of blocks between mlx-lm's embedding and its head."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class Stack:
    """The dimensions, embedding, final norm and head of a text model, as mlx-lm holds them.

    `text` has `args`, `model` (embed_tokens, layers, norm) and, unless tied, `lm_head`.
    """

    def __init__(self, text: Any, family: str, context_length: int) -> None:
        self.family = family
        self.context_length = context_length
        self._model: Any = text.model
        self._blocks: list[Any] = self._model.layers
        self._lm_head = None if text.args.tie_word_embeddings else text.lm_head
        self.layers = len(self._blocks)
        self.hidden_size: int = text.args.hidden_size
        self.vocab_size: int = text.args.vocab_size
        self.dtype: mx.Dtype = self._model.norm.weight.dtype

    def logits(self, hidden: mx.array) -> mx.array:
        return self.head(self._model.norm(hidden))

    @property
    def norm_scale(self) -> mx.array:
        """The weights [h] of the final norm, which `head` expects to have been applied."""
        weight: mx.array = self._model.norm.weight
        return weight

    def embed(self, tokens: mx.array) -> mx.array:
        x: mx.array = self._model.embed_tokens(tokens)
        return x

    def head(self, hidden: mx.array) -> mx.array:
        if self._lm_head is not None:
            out: mx.array = self._lm_head(hidden)
        else:
            out = self._model.embed_tokens.as_linear(hidden)
        return out


def side_by_side(tapped: dict[int, mx.array], taps: tuple[int, ...]) -> mx.array | None:
    """Features [R, T, n·h] of the tapped layers in the order of `taps`; None without taps."""
    return mx.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
