"""Pure attention targets, `llama`, `qwen3` and `qwen3_moe`: our layer loop over mlx-lm's modules.

The loop is ours so that taps are read without patching and the cache can be an arena.
`tests/test_targets.py` holds it bit-equal to calling the model.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_batch.decoder.arena import Arena, Lens
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.targets.base import Forward, check_rope


class DenseTarget:
    """Pre-norm blocks of attention (full or sliding) and an MLP or experts."""

    def __init__(self, model: nn.Module, family: str, context_length: int) -> None:
        args: Any = model.args
        self.family = family
        self.context_length = context_length
        self._model: Any = model.model
        self._blocks: list[Any] = self._model.layers
        self._lm_head = None if args.tie_word_embeddings else model.lm_head
        self.layers = len(self._blocks)
        self.hidden_size: int = args.hidden_size
        self.vocab_size: int = args.vocab_size
        self.dtype: mx.Dtype = self._model.norm.weight.dtype
        self._window: int | None = getattr(args, "sliding_window", None)
        self._sliding = [bool(getattr(block, "use_sliding", False)) for block in self._blocks]
        if any(self._sliding) and not self._window:
            raise LoadError("the target has sliding layers but no sliding_window")
        for block in self._blocks:
            check_rope(block.self_attn.rope)

    @property
    def cuttable(self) -> bool:
        return True

    def new_arena(self, lens: Lens) -> Arena:
        return Arena(self.layers, lens)

    def forward(self, tokens: mx.array, arena: Arena, taps: tuple[int, ...]) -> Forward:
        h = self.embed(tokens)
        full = arena.lens.causal()
        near = arena.lens.causal(self._window) if any(self._sliding) else full
        tapped: dict[int, mx.array] = {}
        for i, (block, cache) in enumerate(zip(self._blocks, arena.layers, strict=True)):
            h = block(h, near if self._sliding[i] else full, cache)
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
