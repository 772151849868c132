"""The DFlash draft network as training sees it: many blocks at once, each with its own context.

Written from the formulas of DFlash (arXiv 2602.06036): single-shot block diffusion, keys and values
of the context made from target features. Attention is plain matmul and softmax, so every backend
has its gradient. All layers are full and non-causal; sliding layers are not trained here. It
computes in the dtype of its parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_batch.decoder import draft_config
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.loading import read_config
from dflash_batch.decoder.training.files import save_text, save_weights


@dataclass(frozen=True)
class DraftConfig:
    """Shapes of a v1 draft and its pairing with a target."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        assert self.num_attention_heads % self.num_key_value_heads == 0
        assert max(self.target_layer_ids) < self.num_target_layers
        assert 0 <= self.mask_token_id < self.vocab_size

    @classmethod
    def for_target(
        cls,
        target: dict[str, Any],
        *,
        layers: int,
        taps: Sequence[int],
        mask_token_id: int,
        block_size: int = 16,
        intermediate_size: int | None = None,
    ) -> DraftConfig:
        """A draft shaped like the target whose ``config.json`` is given, with ``layers`` layers."""
        text = target.get("text_config") or target  # of a multimodal checkpoint
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        return cls(
            hidden_size=hidden,
            # A target of experts alone does not say how wide a dense layer would be.
            intermediate_size=intermediate_size or text.get("intermediate_size") or 3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            vocab_size=text.get("vocab_size") or target["vocab_size"],
            num_target_layers=text["num_hidden_layers"],
            target_layer_ids=tuple(taps),
            mask_token_id=mask_token_id,
            block_size=block_size,
            rope_theta=_rope_theta(text),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            max_position_embeddings=text.get("max_position_embeddings") or 2048,
        )

    @classmethod
    def load(cls, folder: Path) -> DraftConfig:
        """The shape of a public draft. Raises LoadError that names what cannot be trained here."""
        read = draft_config.DraftConfig.parse(read_config(folder))
        odd = {
            "sliding layers": any(read.windows),
            "layers that are causal inside the block": any(read.causal),
            "rope scaling": read.rope_scaling is not None,
            "DFlash 2 parts": read.second is not None,
            "attention biases": read.attention_bias,
            "soft-capped logits": read.softcap is not None,
            "scaled embeddings or logits": (read.embedding_scale, read.output_multiplier) != (1, 1),
        }
        if any(odd.values()):
            names = ", ".join(name for name, present in odd.items() if present)
            raise LoadError(f"{folder}: a draft with {names} cannot be trained further yet")
        return cls(
            hidden_size=read.hidden_size,
            intermediate_size=read.intermediate_size,
            num_hidden_layers=read.num_layers,
            num_attention_heads=read.num_heads,
            num_key_value_heads=read.num_kv_heads,
            head_dim=read.head_dim,
            vocab_size=read.vocab_size,
            num_target_layers=read.num_target_layers,
            target_layer_ids=read.target_layer_ids,
            mask_token_id=read.mask_token_id,
            block_size=read.block_size,
            rope_theta=read.rope_theta,
            rms_norm_eps=read.rms_norm_eps,
            max_position_embeddings=read.max_position_embeddings,
        )

    def public(self) -> dict[str, Any]:
        """``config.json`` in the public v1 layout; the block size stands at both places in use."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": self.block_size,
            "dflash_config": {
                "block_size": self.block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


class Draft(nn.Module):
    """Draft layers only; embedding and head are the target's. Parameters have the public names."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = nn.RMSNorm(h, eps=eps)
        self.layers = [_Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(h, eps=eps)

    def __call__(self, blocks: mx.array, anchors: mx.array, features: mx.array) -> mx.array:
        """Normed hidden states of all block rows.

        ``blocks`` [N, A, V, h]: embedded blocks; ``anchors`` int [N, A]: position of each block's
        first row; ``features`` [N, T, n*h]: taps of positions 0..T-1. Returns [N, A, V, h].
        """
        context = self.hidden_norm(self.fc(features))
        own = anchors[..., None] + mx.arange(blocks.shape[2])
        visible = context_mask(anchors, features.shape[1])
        stream = blocks
        for layer in self.layers:
            stream = layer(stream, context, own, visible)
        hidden: mx.array = self.norm(stream)
        return hidden


def context_mask(anchors: mx.array, length: int) -> mx.array:
    """Bool [N, A, T]: context position ``p`` is visible to a block iff ``p < anchor``, strictly.

    The anchor's own feature does not exist yet when a block is drafted (DFlash, arXiv 2602.06036).
    """
    return mx.arange(length)[None, None, :] < anchors[..., None]


def rotate(x: mx.array, positions: mx.array, base: float) -> mx.array:
    """Half-split rotary embedding of ``x`` [..., T, heads, D] at integer ``positions`` [..., T]."""
    half = x.shape[-1] // 2
    frequencies = mx.power(base, -mx.arange(half) / half)
    angles = positions[..., None, None].astype(mx.float32) * frequencies
    cosine, sine = mx.cos(angles), mx.sin(angles)
    left, right = x[..., :half], x[..., half:]
    turned = mx.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)
    return turned.astype(x.dtype)


def initialise(draft: Draft, norm_scale: mx.array) -> None:
    """Start values: small steps into the residual stream, and the target's own final norm.

    The stream then begins near the embeddings, and the frozen head reads what it is used to.
    """
    small = (2 * len(draft.layers)) ** -0.5
    for layer in draft.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight = projection.weight * small
    draft.norm.weight = norm_scale.astype(mx.float32)


def save_draft(draft: Draft, config: DraftConfig, folder: Path) -> None:
    """Write ``config.json`` and bfloat16 ``model.safetensors`` in the public layout.

    Each file is there whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.astype(mx.bfloat16) for k, v in dict(tree_flatten(draft.parameters())).items()}
    save_weights(weights, folder / "model.safetensors", {"format": "mlx"})
    save_text(json.dumps(config.public(), indent=2) + "\n", folder / "config.json")


def load_draft(folder: Path) -> tuple[Draft, DraftConfig]:
    """A saved draft in float32."""
    config = DraftConfig.load(folder)
    draft = Draft(config)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    draft.load_weights([(name, w.astype(mx.float32)) for name, w in weights.items()])
    return draft, config


def _rope_theta(text: dict[str, Any]) -> float:
    """The base of a target's rotary positions, wherever its config has it; of the full layers."""
    nested = text.get("rope_parameters") or {}
    nested = nested.get("full_attention", nested)
    return float(text.get("rope_theta") or nested.get("rope_theta") or 10000.0)


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(h, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(h, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=eps)

    def __call__(
        self, x: mx.array, context: mx.array, own: mx.array, visible: mx.array
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), context, own, visible)
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, d, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim, self._base = d, config.rope_theta
        self.q_proj = nn.Linear(h, self._heads * d, bias=False)
        self.k_proj = nn.Linear(h, self._kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, self._kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self._heads * d, h, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=eps)
        self.k_norm = nn.RMSNorm(d, eps=eps)

    def __call__(
        self, y: mx.array, context: mx.array, own: mx.array, visible: mx.array
    ) -> mx.array:
        """``y`` [N, A, V, h], ``context`` [N, T, h], ``own`` [N, A, V], ``visible`` [N, A, T]."""
        n, a, v, _ = y.shape
        t, d, kv = context.shape[1], self._head_dim, self._kv_heads
        group = self._heads // kv
        query = rotate(self.q_norm(self.q_proj(y).reshape(n, a, v, -1, d)), own, self._base)
        block_key = rotate(self.k_norm(self.k_proj(y).reshape(n, a, v, kv, d)), own, self._base)
        block_value = self.v_proj(y).reshape(n, a, v, kv, d)
        places = mx.broadcast_to(mx.arange(t), (n, t))
        key = rotate(self.k_norm(self.k_proj(context).reshape(n, t, kv, d)), places, self._base)
        value = self.v_proj(context).reshape(n, t, kv, d)

        # Rows of one KV head side by side: [N, K, A, group*V, D].
        query = query.reshape(n, a, v, kv, group, d).transpose(0, 3, 1, 4, 2, 5)
        query = query.reshape(n, kv, a, group * v, d) * d**-0.5
        key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
        block_key, block_value = (
            block_key.transpose(0, 3, 1, 2, 4),
            block_value.transpose(0, 3, 1, 2, 4),
        )
        to_context = query.reshape(n, kv, -1, d) @ key.swapaxes(-1, -2)
        to_context = to_context.reshape(n, kv, a, group * v, t)
        hidden = mx.array(-mx.inf, to_context.dtype)
        to_context = mx.where(visible[:, None, :, None, :], to_context, hidden)
        to_block = query @ block_key.swapaxes(-1, -2)
        scores = mx.concatenate([to_context, to_block], axis=-1)
        share = mx.softmax(scores, axis=-1, precise=True)
        mixed = share[..., :t].reshape(n, kv, -1, t) @ value
        mixed = mixed.reshape(n, kv, a, group * v, d) + share[..., t:] @ block_value
        mixed = mixed.reshape(n, kv, a, group, v, d).transpose(0, 2, 4, 1, 3, 5)
        out: mx.array = self.o_proj(mixed.reshape(n, a, v, -1))
        return out


class _Mlp(nn.Module):
    def __init__(self, h: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(h, wide, bias=False)
        self.up_proj = nn.Linear(h, wide, bias=False)
        self.down_proj = nn.Linear(wide, h, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
