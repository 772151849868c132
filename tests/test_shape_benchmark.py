"""`benchmarks/shape.py` on its tiny shapes: the pairs it makes decode."""

from __future__ import annotations

import pytest
from benchmarks.shape import SHAPES, Drawn, info, make, ours

from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.policy import Fixed


@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_a_shape_is_decoded_with_its_draft(name: str) -> None:
    _, target, drafter = make(SHAPES[name])
    assert target.family == SHAPES[name].family
    decoder = Decoder(target, drafter, info=info(target), max_batch=2, policy=Fixed(15, trim=False))
    decoder._greedy = Drawn(1.0)
    assert ours(decoder, [[1, 2, 3], [4, 5]], tokens=16).total > 0  # it counts the tokens itself
