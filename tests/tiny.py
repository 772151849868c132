"""Tiny random models of real architectures, and an oracle drafter, for the decoder's tests."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from dflash_batch.decoder.drafters import DrafterSpec, Proposal
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.loading import FAMILIES
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.types import Completion, ModelInfo, Request

VOCAB = 48


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

QWEN3_MOE: dict[str, Any] = {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [1]}

GEMMA: dict[str, Any] = {
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
}

QWEN35: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3-8bit": {"intermediate_size": 64},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe-4bit": {**QWEN3_MOE, "intermediate_size": 64},
    "gemma4_text": GEMMA,
    "gemma4": {
        **GEMMA,
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_text-experts": {
        **GEMMA,
        **EXPERTS,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "qwen3_5": QWEN35,
    "qwen3_5_moe-4bit": {
        **QWEN35,
        **EXPERTS,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 32,
    },
}
"""Every model: its family and what sets it apart, and what its shape has beyond `SHAPE`."""

MODELS = tuple(SHAPES)

WRAPPED = ("gemma4", "qwen3_5", "qwen3_5_moe")
"""Families whose language model is a part of a multimodal one."""


def make_shape(name: str) -> dict[str, Any]:
    """The `config.json` of a model."""
    family = name.partition("-")[0]
    shape = {"model_type": family, **SHAPE, **SHAPES[name]}
    if family in WRAPPED:
        return {"model_type": family, "vocab_size": VOCAB, "text_config": shape}
    return shape


def bits_of(name: str) -> int | None:
    """What a model is quantised to."""
    return int(name[-4]) if name.endswith("bit") else None


def make_model(name: str, seed: int = 0) -> Any:
    """A random float32 model whose greedy text wanders (scaled up so that argmax is decided)."""
    module = importlib.import_module(f"mlx_lm.models.{name.partition('-')[0]}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(make_shape(name)))
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.4, model.parameters()))
    if bits := bits_of(name):
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    return model


def make_target(name: str, seed: int = 0) -> Target:
    return as_target(make_model(name, seed), name)


def as_target(model: Any, name: str) -> Target:
    family = name.partition("-")[0]
    return FAMILIES[family](model, family, 512)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Plain greedy decoding, one token after the other, on mlx-lm's own caches: the reference."""
    cache = make_prompt_cache(model)
    text, new = list(prompt), list(prompt)
    for _ in range(count):
        new = np.array(mx.argmax(model(mx.array([new]), cache=cache)[:, -1], axis=-1)).tolist()
        text += new
    return text[len(prompt) :]


def make_info(target: Target, draft: str | None, block: int) -> ModelInfo:
    return ModelInfo(
        target="tiny",
        family=target.family,
        draft=draft,
        draft_notice=None,
        block=block,
        dtype="float32",
        context_length=target.context_length,
        vocab_size=target.vocab_size,
        eos_token_ids=frozenset(),
        has_tokenizer=False,
        has_chat_template=False,
    )


def make_decoder(target: Target, drafter: Any, **options: Any) -> Decoder:
    info = make_info(target, drafter.spec.kind, drafter.spec.max_k + 1)
    return Decoder(target, drafter, info=info, **options)


def finish(decoder: Decoder, most: int = 10_000) -> dict[int, Completion]:
    """Step until nothing is left."""
    done: dict[int, Completion] = {}
    for _ in range(most):
        if not any(decoder.load()):
            return done
        done |= {c.uid: c for c in decoder.step()}
    raise AssertionError("the decoder did not finish")


def request(uid: int, prompt: list[int], max_tokens: int, **options: Any) -> Request:
    return Request(uid=uid, prompt=tuple(prompt), max_tokens=max_tokens, **options)


class Scripted:
    """A target that says the same text behind every prompt of a length."""

    def __init__(self, target: Any, prompt: int, text: list[int]) -> None:
        self._target, self._prompt, self._text = target, prompt, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, tokens: Any, arena: Any, taps: Any) -> Any:
        self._index = arena.lens.index
        return self._target.forward(tokens, arena, taps)

    def logits(self, hidden: Any) -> Any:
        index = self._index
        if hidden.shape[1] != index.shape[1]:  # the last token of a prompt
            index = mx.full((hidden.shape[0], 1), self._prompt - 1)
        script = mx.array([*self._text, 0])
        says = script[mx.clip(index - self._prompt + 1, 0, len(self._text))]
        return mx.where(mx.arange(VOCAB) == says[..., None], 9.0, 0.0)


class OracleDrafter:
    """Knows each row's true continuation, and is wrong at seeded random places.

    A row is known by its prompt's first two tokens, its place by the number of tokens committed.
    With `wrong` = 0 every draft is right, with 1 every draft is wrong. It checks the engine's
    promises as it goes: the tokens it is given must be the true text at the row's own position.
    """

    def __init__(self, texts: list[list[int]], block: int, wrong: float, seed: int) -> None:
        self.spec = DrafterSpec("oracle", taps=(1,), max_k=block - 1)
        self.texts = {tuple(text[:2]): text for text in texts}
        assert len(self.texts) == len(texts), "prompts must differ in their first two tokens"
        self.random = np.random.default_rng(seed)
        self.wrong = wrong

    def new_state(self, lens: Any) -> OracleState:
        return OracleState(lens)

    def propose(self, state: OracleState, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        drafts = np.zeros((state.lens.rows, k), dtype=np.int32)
        widths, anchors = np.array(width), np.array(anchor)
        for row, length in enumerate(np.array(state.lens.offset).tolist()):
            text = self.texts.get(tuple(state.seen.get(row, [])[:2]))
            if length == 0 or text is None:
                continue
            assert state.seen[row][:length] == text[:length], "committed what is not the text"
            if widths[row] > 1:
                assert anchors[row] == text[length]
            ahead = text[length + 1 : length + 1 + k]
            drafts[row, : len(ahead)] = ahead
        misses = self.random.random(drafts.shape) < self.wrong
        return Proposal(mx.array(np.where(misses, (drafts + 1) % VOCAB, drafts).astype(np.int32)))

    def commit(
        self, state: OracleState, tokens: mx.array, features: mx.array | None, keep: mx.array
    ) -> None:
        assert features is not None
        assert features.shape[:2] == tokens.shape
        offsets, counts, ids = np.array(state.lens.offset), np.array(keep), np.array(tokens)
        for row in range(state.lens.rows):
            seen = state.seen.setdefault(row, [])
            del seen[int(offsets[row]) :]
            seen.extend(ids[row, : counts[row]].tolist())

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        pass


class OracleState:
    """The committed tokens of each row."""

    def __init__(self, lens: Any) -> None:
        self.lens = lens
        self.seen: dict[int, list[int]] = {}

    def snapshot(self, row: int, length: int) -> OracleSnapshot:
        return OracleSnapshot(self.seen.get(row, [])[:length])

    def load(self, row: int, snapshot: OracleSnapshot) -> None:
        self.seen[row] = list(snapshot.tokens)

    def select(self, rows: mx.array) -> None:
        self.seen = {
            new: list(self.seen.get(old, [])) for new, old in enumerate(np.array(rows).tolist())
        }


class OracleSnapshot:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def first(self, length: int) -> OracleSnapshot:
        return OracleSnapshot(self.tokens[:length])
