"""A target whose law can be written down: the next token depends on the last one alone.

With the exact law of short texts, by numpy, to hold samples against.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.arena import Arena, Lens
from dflash_batch.decoder.drafters import DrafterSpec, NoDrafter, Proposal
from dflash_batch.decoder.targets.base import Forward
from dflash_batch.decoder.types import Sampling

Floats = npt.NDArray[np.float64]

VOCAB = 4


def make_logits(seed: int, scale: float = 1.5) -> Floats:
    """Random logits [V, V] of the next token by the last."""
    return np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * scale


class MarkovTarget:
    """A `Target` without layers: a token is its own hidden state."""

    family = "markov"
    layers = 0
    hidden_size = VOCAB
    vocab_size = VOCAB
    context_length = 512
    dtype = mx.float32
    cuttable = True

    def __init__(self, logits: Floats) -> None:
        self._logits = mx.array(logits.astype(np.float32))

    def new_arena(self, lens: Lens) -> Arena:
        return Arena(0, lens)

    def forward(self, tokens: mx.array, arena: Arena, taps: tuple[int, ...]) -> Forward:
        return Forward(self.embed(tokens), None)

    def logits(self, hidden: mx.array) -> mx.array:
        return (hidden[..., None] * self._logits).sum(axis=-2)

    def embed(self, tokens: mx.array) -> mx.array:
        return (tokens[..., None] == mx.arange(VOCAB)).astype(mx.float32)

    def head(self, hidden: mx.array) -> mx.array:
        return self.logits(hidden)


class MarkovDrafter(NoDrafter):
    """Drafts a block at once, each position by a table of its own: logits [k, V, V] by the anchor.

    Without `sure` it hands back logits; with it, tokens alone.
    """

    def __init__(self, tables: Floats, sure: bool = False) -> None:
        self.spec = DrafterSpec("markov", max_k=len(tables))
        self._tables = mx.array(tables.astype(np.float32))
        self._sure = sure

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        logits = self._tables[:k, anchor].swapaxes(0, 1)
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        return Proposal(tokens, None if self._sure else logits)


def good_tables(logits: Floats, k: int) -> Floats:
    """The target's own law of each position by the anchor, what lies between left open."""
    step = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return np.log([np.linalg.matrix_power(step, j + 1) for j in range(k)])


def bad_tables(seed: int, k: int) -> Floats:
    """Anything."""
    return np.random.default_rng(seed).normal(size=(k, VOCAB, VOCAB)) * 2


def next_law(logits: Floats, prompt: list[int], output: list[int], s: Sampling) -> Floats:
    """The law of one token after a text, [V], the steps written out one by one."""
    z = logits[[*prompt, *output][-1]].copy()
    for token, bias in s.logit_bias:
        z[token] += bias
    for token in range(VOCAB):
        times = output.count(token)
        if token in prompt or times:
            r = s.repetition_penalty
            z[token] = z[token] / r if z[token] > 0 else z[token] * r
        z[token] -= s.frequency_penalty * times + s.presence_penalty * (times > 0)
    if not s.random:
        sure: Floats = np.eye(VOCAB)[z.argmax()]
        return sure
    p: Floats = np.exp(z / s.temperature)
    p /= p.sum()
    p[p < s.min_p * p.max()] = 0
    order = np.argsort(-p)
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    before = 0.0
    for token in order:
        before, mine = before + p[token], before
        if mine >= s.top_p:
            p[token] = 0
    p /= p.sum()
    return p


def text_law(logits: Floats, prompt: list[int], length: int, s: Sampling) -> Floats:
    """The law of all texts of a length, [V^length], in lexical order."""
    law = []
    for text in product(range(VOCAB), repeat=length):
        p = 1.0
        for n, token in enumerate(text):
            p *= next_law(logits, prompt, list(text[:n]), s)[token]
        law.append(p)
    return np.array(law)


def fits(counts: npt.NDArray[np.int64], law: Floats) -> float:
    """How many standard deviations χ² lies above what the law leads one to expect.

    Cells that expect fewer than five are taken together; what cannot be must not have been.
    """
    assert not counts[law == 0].any()
    expected = law * counts.sum()
    rare = expected < 5
    got = np.array([*counts[~rare], counts[rare].sum()], dtype=np.float64)
    due = np.array([*expected[~rare], expected[rare].sum()])
    got, due = got[due > 0], due[due > 0]
    chi2, freedom = ((got - due) ** 2 / due).sum(), len(due) - 1
    return float((chi2 - freedom) / np.sqrt(2 * freedom))
