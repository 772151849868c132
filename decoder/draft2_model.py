"""DFlash 2: the draft with convolutions over the block and a selector over its candidates.

Around each attention and each MLP stands a grouped causal convolution whose kernel depends on the
input; it sees block rows only, with zeros left of the anchor. Drafts are then chosen one after the
other among the k best of each position, a low-rank term saying how well they follow each other:
k - 1 dependent steps, all in one graph on the device.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from dflash_batch.decoder.arena import LayerKV
from dflash_batch.decoder.draft_config import DraftConfig, SecondGeneration
from dflash_batch.decoder.draft_model import DFlashDrafter, Drafted, DraftLayer, DraftModel
from dflash_batch.decoder.drafters import Proposal


def _second(config: DraftConfig) -> SecondGeneration:
    assert config.second is not None
    return config.second


class DynamicConv(nn.Module):
    """Convolutions before (side 0) and after (side 1) a sub-block, kernels from its input.

    conv(a; side)_t[ch] = Σ_o (base[side, o, ch] + κ[t, side, o, ch // group]) · a_{t-o}[ch]
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        second = _second(config)
        self.taps, self.group = second.conv_kernel_size, second.conv_group_size
        h = config.hidden_size
        self.base_kernel = mx.zeros((2, self.taps, h))
        self.kernel_projection = nn.Linear(h, 2 * self.taps * (h // self.group), bias=False)

    def kernels(self, y: mx.array) -> mx.array:
        """Kernels [R, T, 2, taps, h] of both sides from the sub-block's input y [R, T, h]."""
        rows, width, h = y.shape
        dynamic = self.kernel_projection(y).reshape(rows, width, 2, self.taps, h // self.group)
        return self.base_kernel + mx.repeat(dynamic, self.group, axis=-1)

    def __call__(self, a: mx.array, kernel: mx.array) -> mx.array:
        """Convolve a [R, T, h] with the kernel [R, T, taps, h] of its side."""
        out = kernel[:, :, 0] * a
        for o in range(1, self.taps):
            shifted = mx.pad(a, [(0, 0), (o, 0), (0, 0)])[:, : a.shape[1]]
            out = out + kernel[:, :, o] * shifted
        return out


class Draft2Layer(DraftLayer):
    """A draft layer with a `DynamicConv` around its attention and one around its MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def __call__(self, x: mx.array, mask: mx.array, cache: LayerKV) -> mx.array:
        y = self.input_layernorm(x)
        kernel = self.attention_conv.kernels(y)
        o = self.self_attn(self.attention_conv(y, kernel[:, :, 0]), mask, cache)
        x = x + self.attention_conv(o, kernel[:, :, 1])
        y = self.post_attention_layernorm(x)
        kernel = self.mlp_conv.kernels(y)
        o = self.mlp(self.mlp_conv(y, kernel[:, :, 0]))
        return x + self.mlp_conv(o, kernel[:, :, 1])


class CandidateSelector(nn.Module):
    """Scores how well a candidate follows the token before it: Σ_r A[prev] · (P d) · C[cand]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        second = _second(config)
        rank = second.selector_rank
        self.top_k = second.selector_top_k
        self.predecessor_codebook = mx.zeros((config.vocab_size, rank))
        self.successor_codebook = mx.zeros((config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def __call__(self, anchor: mx.array, hidden: mx.array, logits: mx.array) -> mx.array:
        """Greedy drafts int32 [R, k] for anchor [R], hidden [R, k, h], logits [R, k, vocab]."""
        top_k = min(self.top_k, logits.shape[-1])
        ids = mx.argpartition(-logits, top_k - 1, axis=-1)[..., :top_k]
        unary = mx.take_along_axis(logits, ids, axis=-1)
        successors = self.successor_codebook[ids]
        projected = self.hidden_projection(hidden)
        chosen, previous = [], anchor
        for j in range(logits.shape[1]):
            follows = self.predecessor_codebook[previous] * projected[:, j]
            scores = unary[:, j] + (successors[:, j] @ follows[:, :, None])[..., 0]
            best = mx.argmax(scores, axis=-1, keepdims=True)
            previous = mx.take_along_axis(ids[:, j], best, axis=-1)[:, 0]
            chosen.append(previous)
        return mx.stack(chosen, axis=1).astype(mx.int32)


class Draft2Model(DraftModel):
    """The parameters of a DFlash 2 checkpoint, under their public names."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, Draft2Layer)
        self.candidate_selector = CandidateSelector(config)


class DFlash2Drafter(DFlashDrafter):
    """A DFlash drafter whose drafts are chosen by the selector.

    Each choice depends on the one before, so there are no logits to draw from position by
    position: a row that samples is offered the most likely drafts as well.
    """

    def choose(self, anchor: mx.array, drafted: Drafted) -> Proposal:
        selector = self.model.candidate_selector
        return Proposal(selector(anchor, drafted.hidden, drafted.logits))
