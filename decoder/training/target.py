"""Pretrains the tiny Qwen3 target on packed chats, and finds what it would itself reply.

The network is mlx-lm's own Qwen3, so the checkpoint loads there as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3
from numpy.typing import NDArray

from dflash_batch.decoder.training.corpus import Packer, Rows
from dflash_batch.decoder.training.fit import Batch, FitSettings, Report, compiled, fit


def target_config(vocab_size: int, end_id: int, pad_id: int, **shape: Any) -> dict[str, Any]:
    """``config.json`` of the demo target; ``shape`` replaces sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": end_id,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "pad_token_id": pad_id,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": vocab_size,
    } | shape


def build_target(config: dict[str, Any]) -> nn.Module:
    """A fresh mlx-lm Qwen3 model in float32."""
    model: nn.Module = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    return model


def train_target(
    model: nn.Module,
    batches: Iterator[Batch],
    settings: FitSettings,
    report: Report = print,
    check: Callable[[int], str] | None = None,
) -> list[float]:
    """Next-token training on reply tokens; a batch is (tokens [N, T], supervised [N, T])."""

    def loss(tokens: mx.array, supervised: mx.array) -> mx.array:
        logits = model(tokens[:, :-1])
        weight = supervised[:, 1:].astype(mx.float32)
        each = nn.losses.cross_entropy(logits, tokens[:, 1:])
        return (each * weight).sum() / mx.maximum(weight.sum(), 1.0)

    return fit(model, loss, batches, settings, report, check)


def chat_batches(packer: Packer, short: tuple[int, int], long: tuple[int, int]) -> Iterator[Batch]:
    """Three batches of short rows, then one of long rows, for ever; sizes are (rows, length)."""
    while True:
        for size in (short, short, short, long):
            rows = packer.rows(*size)
            yield mx.array(rows.tokens), mx.array(rows.supervised)


def round_to_bfloat16(model: nn.Module) -> None:
    """Round the weights to what the checkpoint can hold, and go on in float32."""
    model.update(tree_map(lambda w: w.astype(mx.bfloat16).astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())


def own_replies(
    model: nn.Module, rows: Rows, end_id: int, rounds: int = 16, batch: int = 2048
) -> tuple[Rows, NDArray[np.bool_]]:
    """The target's greedy replies, and which rows are settled.

    Each round replaces every reply token by the argmax behind the present guess (Jacobi iteration).
    A guess that no longer changes is the greedy reply, since each token then is the argmax behind
    the tokens before it. Started from a reference that the target mostly agrees with, few rounds
    suffice, and all forwards have one shape. A reply is cut at its first end token; one without is
    not settled.
    """
    guess, settled = rows.tokens.copy(), np.zeros(len(rows.tokens), np.bool_)
    reply_start = rows.supervised.argmax(axis=1)[:, None]
    behind = np.arange(guess.shape[1])[None, :] >= reply_start
    argmax = compiled(lambda tokens: mx.argmax(model(tokens), axis=-1))
    for first in range(0, len(guess), batch):
        part = slice(first, first + batch)
        for _ in range(rounds):
            best = np.array(argmax(mx.array(guess[part])), dtype=np.int32)
            best = np.pad(best[:, :-1], ((0, 0), (1, 0)))
            replies = _until_end(guess[part], behind[part], end_id)
            changed = (best != guess[part]) & replies
            if not changed.any():
                break
            guess[part] = np.where(behind[part], best, guess[part])
        settled[part] = ~changed.any(axis=1)
    supervised = _until_end(guess, behind, end_id)
    ended = ((guess == end_id) & supervised).any(axis=1)
    return Rows(np.where(behind & ~supervised, 0, guess), supervised), settled & ended


def _until_end(
    tokens: NDArray[np.int32], behind: NDArray[np.bool_], end_id: int
) -> NDArray[np.bool_]:
    """True from a reply's start to its first end token, which is included."""
    ends = (tokens == end_id) & behind
    ends_before = np.cumsum(ends, axis=1) - ends
    inside: NDArray[np.bool_] = behind & (ends_before == 0)
    return inside


def save_target(model: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and bfloat16 ``model.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.astype(mx.bfloat16) for k, v in dict(tree_flatten(model.parameters())).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    generation = {
        "do_sample": False,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
