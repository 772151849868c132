"""Pure attention targets, `llama`, `qwen3` and `qwen3_moe`: our layer loop over mlx-lm's modules.

The loop is ours so that taps are read without patching and the cache can be an arena.
`tests/test_targets.py` holds it bit-equal to calling the model.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dflash_batch.decoder.arena import Arena, Lens
from dflash_batch.decoder.attention import as_mask, self_attention
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.targets.base import Forward, check_rope
from dflash_batch.decoder.targets.stack import Stack, side_by_side


class DenseTarget(Stack):
    """Pre-norm blocks of attention (full or sliding) and an MLP or experts."""

    def __init__(self, model: nn.Module, family: str, context_length: int) -> None:
        super().__init__(model, family, context_length)
        self._window: int | None = getattr(model.args, "sliding_window", None)
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
        full = as_mask(arena.lens.causal(), self.dtype)
        near = full
        if any(self._sliding):
            near = as_mask(arena.lens.causal(self._window), self.dtype)
        tapped: dict[int, mx.array] = {}
        for i, (block, cache) in enumerate(zip(self._blocks, arena.layers, strict=True)):
            mask = near if self._sliding[i] else full
            h = h + self_attention(block.self_attn, block.input_layernorm(h), mask, cache)
            h = h + block.mlp(block.post_attention_layernorm(h))
            if i in taps:
                tapped[i] = h
        return Forward(h, side_by_side(tapped, taps))
