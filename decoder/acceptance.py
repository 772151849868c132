"""Which drafts stand, on the device, for all rows at once.

A rule says which tokens to draft and which of them the target lets stand:

    block       anchor  x1  x2  x3        accepted a = 2
    chosen        p0    p1  p2  p3        x1 and x2 stand, x3 does not
    emitted       p0    p1  p2            a + 1 tokens: the accepted drafts and one of the target's

Greedy: x stands if it is the target's most likely token.

Coupled: at every position the target draws its token with noise that belongs to the position, and
x stands if it is that token. The draft is drawn with the same noise, so the two agree often: with
probability ≥ (1 - d) / (1 + d), d the total variation distance of draft and target (arXiv
2408.07978). The text is what plain sampling with the same seed gives, whatever was drafted and
however long the blocks were.

Rejection: x ~ q stands with probability min(1, p(x) / q(x)); after the first that does not, a token
is drawn from max(p - q, 0), normalised (arXiv 2211.17192, 2302.01318). More drafts stand, 1 - d of
them, and the law of the text is the target's as well, but which text a seed gives depends on where
blocks began and ended.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import mlx.core as mx

from dflash_batch.decoder.drafters import Proposal
from dflash_batch.decoder.sampling import Purpose, Sampler


class Drafts(NamedTuple):
    """Tokens to be verified."""

    tokens: mx.array  # int32 [R, k]
    scores: mx.array | None = None  # [R, k, V]: what they were drawn by, if they were


class Judged(NamedTuple):
    """What the target says to a block."""

    chosen: mx.array  # int32 [R, k+1]: the text, as far as drafts stand and one token further
    stands: mx.array  # bool [R, k], of meaning as far as the drafts before stand


class Rule(Protocol):
    """`anchor` int32 [R] is the position of the anchor; drafts are for the positions after it.

    A rule is `position_wise` if what is chosen at a position does not depend on which drafts stood.
    """

    position_wise: bool

    def draft(self, proposal: Proposal, sampler: Sampler, anchor: mx.array) -> Drafts:
        """The tokens to be verified."""
        ...

    def judge(
        self, logits: mx.array, drafts: Drafts, width: mx.array, sampler: Sampler, anchor: mx.array
    ) -> Judged:
        """By the target's logits [R, k+1, V] after the anchor and after each draft.

        `width` int32 [R] is the row's own block length: drafts from `width - 1` on are not its.
        """
        ...


class Greedy:
    """For rows that all take the most likely token of the target's own logits."""

    position_wise = True

    def draft(self, proposal: Proposal, sampler: Sampler, anchor: mx.array) -> Drafts:
        return Drafts(proposal.tokens)

    def judge(
        self, logits: mx.array, drafts: Drafts, width: mx.array, sampler: Sampler, anchor: mx.array
    ) -> Judged:
        chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
        return Judged(chosen, drafts.tokens == chosen[:, :-1])


class Coupled:
    """Drafts and target draw with the same noise; the text does not depend on the drafts."""

    position_wise = True

    def draft(self, proposal: Proposal, sampler: Sampler, anchor: mx.array) -> Drafts:
        return _drawn(proposal, sampler, anchor, Purpose.CHOICE)

    def judge(
        self, logits: mx.array, drafts: Drafts, width: mx.array, sampler: Sampler, anchor: mx.array
    ) -> Judged:
        after = _after(anchor, logits.shape[1])
        scores = sampler.scores(logits, drafts.tokens, position=after)
        chosen = sampler.draw(scores, after, Purpose.CHOICE)
        return Judged(chosen, drafts.tokens == chosen[:, :-1])


class Rejection:
    """Drafts are drawn on their own and stand as often as the target's law allows."""

    position_wise = False

    def draft(self, proposal: Proposal, sampler: Sampler, anchor: mx.array) -> Drafts:
        return _drawn(proposal, sampler, anchor, Purpose.DRAFT)

    def judge(
        self, logits: mx.array, drafts: Drafts, width: mx.array, sampler: Sampler, anchor: mx.array
    ) -> Judged:
        k = drafts.tokens.shape[1]
        if not k:  # one token of the target, with nothing to reject
            return Coupled().judge(logits, drafts, width, sampler, anchor)
        after = _after(anchor, k + 1)
        scores = sampler.scores(logits, drafts.tokens, position=after)
        p = sampler.probabilities(scores)
        own = mx.arange(k)[None] < (width - 1)[:, None]
        # Where the row has no draft there is nothing to subtract; a draft that was not drawn
        # was certain.
        if drafts.scores is None:
            q = (drafts.tokens[..., None] == mx.arange(p.shape[-1])).astype(p.dtype)
        else:
            q = sampler.probabilities(drafts.scores)
        q = mx.concatenate([mx.where(own[..., None], q, 0.0), mx.zeros_like(p[:, :1])], axis=1)

        stands = accepts(
            p[:, :k], q[:, :k], drafts.tokens, sampler.uniform(_after(anchor, k), Purpose.ACCEPT)
        )
        at = mx.cumprod((stands & own).astype(mx.int32), axis=1).sum(axis=1)[:, None]
        rest = residual(*(mx.take_along_axis(law, at[..., None], axis=1) for law in (p, q)))
        last = sampler.draw(mx.log(rest), anchor[:, None] + 1 + at, Purpose.CHOICE)
        padded = mx.concatenate([drafts.tokens, last], axis=1)
        return Judged(mx.where(mx.arange(k + 1)[None] == at, last, padded), stands)


def accepts(p: mx.array, q: mx.array, drafts: mx.array, uniform: mx.array) -> mx.array:
    """Bool [R, k]: u · q(x) < p(x), for laws [R, k, V], drafts and uniform numbers [R, k]."""
    at = drafts[..., None]
    p, q = (mx.take_along_axis(law, at, axis=-1)[..., 0] for law in (p, q))
    return uniform * q < p


def residual(p: mx.array, q: mx.array) -> mx.array:
    """max(p - q, 0) / Σ over the last axis, or p where that is empty."""
    more = mx.maximum(p - q, 0.0)
    total = more.sum(axis=-1, keepdims=True)
    return mx.where(total > 0, more / mx.maximum(total, 1e-38), p)


class Accepted(NamedTuple):
    """Per row, int32 [R]."""

    keep: mx.array  # tokens emitted, which is also tokens committed (the anchor + keep-1 drafts)
    drafts: mx.array  # drafts that stand


def accept(stands: mx.array, width: mx.array, remaining: mx.array) -> Accepted:
    """The longest prefix of drafts that stand, plus one token of the target.

    stands bool [R, k]; width int32 [R]: the row's own block length; remaining int32 [R]: tokens
    it may still emit, 0 for an idle row, which then keeps nothing.
    """
    own = mx.arange(stands.shape[1], dtype=mx.int32)[None] < (width - 1)[:, None]
    accepted = mx.cumprod((stands & own).astype(mx.int32), axis=1).sum(axis=1).astype(mx.int32)
    return Accepted(mx.minimum(accepted + 1, remaining), accepted)


def _drawn(proposal: Proposal, sampler: Sampler, anchor: mx.array, purpose: Purpose) -> Drafts:
    """Drafts by the drafter's logits after the row's own processing; as they are without logits."""
    if proposal.logits is None or not proposal.tokens.shape[1]:
        return Drafts(proposal.tokens)
    after = _after(anchor, proposal.logits.shape[1])
    scores = sampler.scores(proposal.logits, position=after)
    tokens = sampler.draw(scores, after, purpose)
    return Drafts(tokens, scores)


def _after(anchor: mx.array, count: int) -> mx.array:
    """int32 [R, count]: the positions after the anchor's."""
    return anchor[:, None] + 1 + mx.arange(count, dtype=mx.int32)[None]
