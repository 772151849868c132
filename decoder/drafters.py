"""Drafters: who proposes the tokens that the target verifies.

A drafter works on all rows at once and owns nothing but its own state. The engine owns
verification, acceptance, lengths and the target's cache; it decides how many tokens to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from dflash_batch.decoder.arena import Lens


@dataclass(frozen=True)
class DrafterSpec:
    """What is known of a drafter once it is loaded."""

    kind: str  # "none", "dflash", "ngram", "dflash+ngram"
    taps: tuple[int, ...] = ()  # target layers whose output it reads, in this order
    max_k: int = 0  # most drafts a cycle
    bytes_per_token: int = 0  # of its own state, for admission


class Proposal(NamedTuple):
    """What a drafter proposes for the positions after the anchor."""

    tokens: mx.array  # int32 [R, k]: the most likely ones
    logits: mx.array | None = None  # [R, k, V], where the drafter has them: rows that sample draw
    meant: mx.array | None = None  # int32 [R]: how many of them are meant; None: all


class DrafterState(Protocol):
    """A drafter's memory of some rows. It lives on the rows' `Lens` and moves with them."""

    def snapshot(self, row: int, length: int) -> Any:
        """The state of a row after its first `length` tokens. Immutable; has `first(length)`."""
        ...

    def load(self, row: int, snapshot: Any) -> None:
        """Put a snapshot into a row."""
        ...

    def select(self, rows: mx.array) -> None:
        """Keep the rows named by `rows` (int32 [R']), in that order."""
        ...


class Drafter(Protocol):
    """Proposes drafts. All calls build graphs on the device and wait for nothing.

    At the start of a cycle the state has seen each row's committed tokens, 0 … N-1, and the
    anchor sits at N.
    """

    spec: DrafterSpec

    def new_state(self, lens: Lens) -> DrafterState:
        """Empty state for the rows of `lens`."""
        ...

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        """k drafts for the positions after `anchor` (int32 [R]).

        `width` int32 [R] is each row's own block length, 1 … k+1: drafts from `width - 1` on are
        ignored, and must not influence the others. The committed part of the state stays as it is.
        """
        ...

    def commit(
        self, state: Any, tokens: mx.array, features: mx.array | None, keep: mx.array
    ) -> None:
        """Take in the tokens [R, T] just run by the target, with its features [R, T, n·h].

        Called before the rows' `Lens` advances by `keep` (int32 [R]), on the columns of
        `Lens.open(T)`: what lies beyond `keep` is rejected and will be overwritten.
        """
        ...

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A row has ended; other rows of its job may say the same."""
        ...


class Nothing:
    """The state of a drafter that remembers nothing."""

    length = 0

    def first(self, length: int) -> Nothing:
        return self

    def snapshot(self, row: int, length: int) -> Nothing:
        return self

    def load(self, row: int, snapshot: Any) -> None:
        pass

    def select(self, rows: mx.array) -> None:
        pass


class NoDrafter:
    """Plain decoding: proposes nothing, so a cycle is one token."""

    spec = DrafterSpec("none")

    def new_state(self, lens: Lens) -> Nothing:
        return Nothing()

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        none = mx.zeros((anchor.shape[0], k), dtype=mx.int32)
        return Proposal(none, meant=mx.zeros((anchor.shape[0],), dtype=mx.int32))

    def commit(
        self, state: Any, tokens: mx.array, features: mx.array | None, keep: mx.array
    ) -> None:
        pass

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        pass
