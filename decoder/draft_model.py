"""The DFlash draft: a small block-diffusion transformer, batched over rows.

Formulas: arXiv 2602.06036 (DFlash), §3. One forward turns `[anchor, MASK, …, MASK]` into drafts
for every masked position. Keys and values of committed positions come from the target's hidden
states; the block's own are written to the same arena right of them and never committed:

    column      0 … N-1             N … N+V-1            N+V …
    holds       context keys        block keys           whatever a longer block left
    full layer  seen by all rows    seen by all rows     hidden
    causal      Δ < window          0 ≤ Δ < window       hidden
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from dflash_batch.decoder.arena import Arena, LayerKV, Lens, Snapshot
from dflash_batch.decoder.attention import as_mask, attend
from dflash_batch.decoder.draft_config import DraftConfig
from dflash_batch.decoder.drafters import DrafterSpec, Proposal
from dflash_batch.decoder.targets.base import Target

TOGETHER = 16
"""Plain cycles whose features a draft takes in at once."""


class DraftAttention(nn.Module):
    """Attention of block queries over context keys and block keys."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.scale = dim**-0.5
        self.q_proj = nn.Linear(h, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(h, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(h, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, h, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            dim,
            base=config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def write(self, x: mx.array, cache: LayerKV) -> tuple[mx.array, mx.array]:
        """Keys and values of x [R, T, h] into the arena at each row's own columns."""
        rows, width, _ = x.shape
        keys = self.k_norm(self.k_proj(x).reshape(rows, width, self.kv_heads, -1))
        keys = self.rope(keys.transpose(0, 2, 1, 3), offset=cache.offset)
        values = self.v_proj(x).reshape(rows, width, self.kv_heads, -1).transpose(0, 2, 1, 3)
        return cache.update_and_fetch(keys, values)

    def __call__(self, x: mx.array, mask: mx.array, cache: LayerKV) -> mx.array:
        rows, width, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(rows, width, self.heads, -1))
        queries = self.rope(queries.transpose(0, 2, 1, 3), offset=cache.offset)
        keys, values = self.write(x, cache)
        out = attend(queries, keys, values, self.scale, mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, width, -1))


class DraftMLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(h, f, bias=False)
        self.up_proj = nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(h, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=eps)

    def __call__(self, x: mx.array, mask: mx.array, cache: LayerKV) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModel(nn.Module):
    """The parameters of a draft checkpoint, under their public names."""

    def __init__(
        self, config: DraftConfig, layer: Callable[[DraftConfig], nn.Module] = DraftLayer
    ) -> None:
        super().__init__()
        h, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(taps * h, h, bias=False)
        self.hidden_norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.layers = [layer(config) for _ in range(config.num_layers)]
        self.norm = nn.RMSNorm(h, eps=config.rms_norm_eps)

    def fuse(self, features: mx.array) -> mx.array:
        """Target features [R, T, n·h] to context vectors [R, T, h], shared by all layers."""
        fused: mx.array = self.hidden_norm(self.fc(features))
        return fused


class Drafted(NamedTuple):
    """What one forward of a draft says of the k masked positions of each row."""

    hidden: mx.array  # [R, k, h], after the final norm
    logits: mx.array  # [R, k, vocab]


class DraftContext(Arena):
    """A draft's keys and values of committed positions.

    In plain cycles a draft only has its context kept current: features of TOGETHER cycles are
    taken in at once, since reading its weights for one token per row costs as much.
    """

    def __init__(self, model: DraftModel, lens: Lens) -> None:
        super().__init__(len(model.layers), lens)
        self.plain = False  # this cycle drafts nothing
        self._model = model
        self._held: list[mx.array] = []  # features of plain cycles, [R, 1, n·h] each
        self._since = lens.offset  # where each row stood before them

    def take(self, features: mx.array) -> None:
        """Features [R, T, n·h] of the columns that `Lens.open(T)` names."""
        if not self.plain:
            self.catch_up()
            self._write(features)
            return
        if not self._held:
            self._since = self.lens.offset
        self._held.append(features)
        if len(self._held) == TOGETHER:
            self.catch_up()
        self.plain = False

    def catch_up(self) -> None:
        """Take in what is held. A live row went on by one token in each plain cycle."""
        if not self._held:
            return
        features, self._held = mx.concatenate(self._held, axis=1), []
        lens = self.lens
        now = lens.offset, lens.index
        lens.offset = self._since
        ahead = self._since[:, None] + mx.arange(features.shape[1], dtype=mx.int32)[None]
        # A row that ended stands still: what is held of it lies beyond its end, of no meaning.
        lens.index = mx.minimum(ahead, lens.columns - 1)
        self._write(features)
        lens.offset, lens.index = now
        mx.async_eval(*self.arrays())  # or the graph would grow as long as nothing is drafted

    def snapshot(self, row: int, length: int) -> Snapshot:
        self.catch_up()
        return super().snapshot(row, length)

    def load(self, row: int, snapshot: Snapshot) -> None:
        self.catch_up()
        super().load(row, snapshot)

    def select(self, rows: mx.array) -> None:
        self.catch_up()
        super().select(rows)

    def _write(self, features: mx.array) -> None:
        context = self._model.fuse(features)
        for layer, cache in zip(self._model.layers, self.layers, strict=True):
            layer.self_attn.write(context, cache)


class DFlashDrafter:
    """A `Drafter` that proposes a whole block in one forward."""

    def __init__(self, model: DraftModel, config: DraftConfig, target: Target, block: int) -> None:
        self.model = model
        self.config = config
        self.target = target
        dtype: mx.Dtype = model.norm.weight.dtype
        self.spec = DrafterSpec(
            kind="dflash",
            taps=config.target_layer_ids,
            max_k=block - 1,
            bytes_per_token=2
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * dtype.size,
        )

    def new_state(self, lens: Lens) -> DraftContext:
        return DraftContext(self.model, lens)

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        state.plain = k == 0
        if k == 0:
            return Proposal(mx.zeros((anchor.shape[0], 0), dtype=mx.int32))
        return self.choose(anchor, self.draft(state, anchor, width, k))

    def choose(self, anchor: mx.array, drafted: Drafted) -> Proposal:
        """The drafts of one forward: greedy ones, and the logits to draw others from."""
        return Proposal(mx.argmax(drafted.logits, axis=-1).astype(mx.int32), drafted.logits)

    def draft(self, state: DraftContext, anchor: mx.array, width: mx.array, k: int) -> Drafted:
        """One forward of the draft: same-position prediction, row j for block offset j."""
        state.catch_up()
        config, lens = self.config, state.lens
        lens.open(k + 1)
        masks = mx.full((anchor.shape[0], k), config.mask_token_id, dtype=mx.int32)
        block = mx.concatenate([anchor[:, None], masks], axis=1)
        x = self.target.embed(block)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        kinds = {
            kind: as_mask(self._mask(lens, width, *kind), x.dtype)
            for kind in set(zip(config.windows, config.causal, strict=True))
        }
        for i, (layer, cache) in enumerate(zip(self.model.layers, state.layers, strict=True)):
            x = layer(x, kinds[config.windows[i], config.causal[i]], cache)
        hidden = self.model.norm(x[:, 1:])
        logits = self.target.head(hidden)
        if config.output_multiplier != 1.0:
            logits = logits * config.output_multiplier
        if config.softcap is not None:
            logits = mx.tanh(logits / config.softcap) * config.softcap
        return Drafted(hidden, logits)

    def commit(
        self, state: Any, tokens: mx.array, features: mx.array | None, keep: mx.array
    ) -> None:
        assert features is not None
        state.take(features)

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        pass

    @staticmethod
    def _mask(lens: Lens, width: mx.array, window: int | None, causal: bool) -> mx.array:
        """Bool [R, 1, T, S] of the drawing above, each row with its own block length."""
        column = mx.arange(lens.columns, dtype=mx.int32)
        own = lens.index[:, None, :, None]
        if causal:
            mask = column <= own
        else:
            end = (lens.offset + width)[:, None, None, None]
            mask = mx.broadcast_to(column < end, (*own.shape[:3], lens.columns))
        if window is not None:
            mask = mask & (column > own - window)
            if not causal:
                mask = mask & (column < own + window)
        return mask
