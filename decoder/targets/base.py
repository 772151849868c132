"""What the engine and the drafters ask of a target model."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from dflash_batch.decoder.arena import Lens, RowState
from dflash_batch.decoder.errors import LoadError


class Forward(NamedTuple):
    """What one forward of a target leaves behind."""

    hidden: mx.array  # [R, T, h]: residual stream leaving the last layer, before the final norm
    features: mx.array | None  # [R, T, n·h]: the taps' residual streams side by side, if asked


class Target(Protocol):
    """A target model that decodes many rows of different lengths in one forward."""

    family: str
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    dtype: mx.Dtype

    @property
    def cuttable(self) -> bool:
        """Whether a snapshot of a row also holds those of all its prefixes."""
        ...

    def new_arena(self, lens: Lens) -> RowState:
        """Empty memory for the rows of `lens`."""
        ...

    def forward(self, tokens: mx.array, arena: Any, taps: tuple[int, ...]) -> Forward:
        """Run tokens int32 [R, T] at the columns of `arena.lens` (after `Lens.open(T)`).

        `arena` is one of `new_arena`: it is written to, and nothing is committed. `taps` are
        0-based layers whose output residual stream is wanted, in this order.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Final norm and head on rows of `Forward.hidden`: [..., h] -> [..., vocab]."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Scaled input embeddings, [..., h]; a draft reads the target's own."""
        ...

    def head(self, hidden: mx.array) -> mx.array:
        """The head alone on an already normalised hidden state; a draft shares it."""
        ...


def check_rope(rope: Any) -> None:
    """Raises LoadError for positions that depend on more than a row's own.

    Dynamic NTK scaling takes its base from the longest row, so it cannot serve rows of different
    lengths, and a row's answer would depend on its neighbours.
    """
    if type(rope).__name__ == "DynamicNTKScalingRoPE":
        raise LoadError(
            "the target uses dynamic NTK rope scaling, which depends on the length of the whole "
            "batch; it is not supported"
        )
