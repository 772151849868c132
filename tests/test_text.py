"""Detokenising and stop strings, with a byte-level tokenizer that splits characters."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dflash_batch.decoder.text import Detokenizer, StopStrings, cut


class Bytes:
    """One token a byte: every character beyond ASCII is several tokens."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


texts = st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30)


@given(texts)
def test_pieces_joined_are_the_whole_and_no_piece_breaks_a_character(text: str) -> None:
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.push(token) for token in text.encode()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(texts, st.lists(texts.filter(bool), min_size=1, max_size=4))
def test_a_stop_string_is_seen_at_the_token_that_completes_it(text: str, stops: list[str]) -> None:
    watch = StopStrings(Bytes(), stops)
    data = text.encode()
    hit = next((n for n, token in enumerate(data, 1) if watch.push(token)), None)

    # The reference: the shortest prefix, in whole characters, that holds a stop string.
    expected = None
    for n in range(len(text) + 1):
        if any(stop in text[:n] for stop in stops):
            expected = len(text[:n].encode())
            break
    assert hit == expected


def test_cut_takes_the_stop_string_that_begins_first() -> None:
    assert cut("a b c d", ["c", "b"]) == "a "
    assert cut("abc", ["x"]) == "abc"
    assert cut("abc", []) == "abc"
    assert cut("abc", ["abc"]) == ""
