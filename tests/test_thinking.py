"""Thinking blocks: where they end, what they may cost, and that drafts change neither."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import OracleDrafter, Scripted, finish, greedy, make_info, make_model, request
from tiny import as_target as target_of

from dflash_batch.decoder.drafters import NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.thinking import Place, Thoughts, thinking_of
from dflash_batch.decoder.types import Completion, LoadSpec, Request, Sampling, Thinking

VECTORS = Path(__file__).parent / "vectors" / "dflash-qwen3-tiny"

START, END, BLANK, END2 = 1, 2, 3, 4


class Letters:
    """One token, one letter; the lowest are the markers, a blank, and a second half of an end."""

    has_thinking = True
    think_start_tokens = (START,)
    think_end_tokens = (END,)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<>"
        names = {START: special[:1], END: special[1:], BLANK: "\n", END2: "%"}
        return "".join(names.get(i, chr(ord("A") + i)) for i in ids)

    def encode(self, text: str) -> list[int]:
        marks = {"<": START, ">": END, "\n": BLANK, "%": END2}
        return [marks[letter] if letter in marks else ord(letter) - ord("A") for letter in text]


TOKENIZER = Letters()
encode = TOKENIZER.encode


def follow(block: Thinking, text: str) -> tuple[Thoughts, str]:
    """The follower after a text, and what it took for the answer."""
    thoughts = Thoughts(block, TOKENIZER)
    answer = [token for spoken in encode(text) for token in thoughts.push(spoken)]
    return thoughts, TOKENIZER.decode(answer)


@pytest.mark.parametrize(
    ("is_open", "text", "place", "answer"),
    [
        (False, "", Place.BEFORE, ""),
        (False, "\n\n", Place.BEFORE, ""),
        (False, "JK", Place.AFTER, "JK"),
        (False, "\nJK", Place.AFTER, "\nJK"),
        (False, "<JK", Place.INSIDE, ""),
        (False, "\n<JK>L\nM", Place.AFTER, "L\nM"),
        (False, "<JK>L<M>N", Place.AFTER, "L<M>N"),
        (False, "J<K>L", Place.AFTER, "J<K>L"),
        (True, "JK", Place.INSIDE, ""),
        (True, "J<K>L", Place.AFTER, "L"),
        (True, ">L", Place.AFTER, "L"),
    ],
)
def test_a_block_counts_where_an_output_begins(
    is_open: bool, text: str, place: Place, answer: str
) -> None:
    thoughts, said = follow(Thinking((START,), (END,), open=is_open), text)
    assert (thoughts.place, said) == (place, answer)


def test_markers_of_several_tokens_are_matched_whole() -> None:
    block = Thinking((START, 9), (END, END2))
    assert follow(block, "<JK>LM>%N")[1] == "N"
    assert follow(block, "<KL")[1] == "<KL"
    assert follow(block, "<")[1] == ""
    assert follow(block, "\n<J>")[0].place is Place.INSIDE


@given(st.lists(st.sampled_from([START, END, BLANK, END2, 9, 10]), max_size=12), st.booleans())
def test_no_token_is_lost_or_taken_twice(tokens: list[int], is_open: bool) -> None:
    thoughts = Thoughts(Thinking((START, 9), (END, END2), open=is_open), TOKENIZER)
    answer = [token for spoken in tokens for token in thoughts.push(spoken)]
    if thoughts.place is Place.AFTER:
        assert answer == tokens[thoughts.answer :]
    else:
        assert answer == []
    if thoughts.answer:
        assert tokens[thoughts.end : thoughts.answer] == [END, END2]
        assert not _holds(tokens[thoughts.begin : thoughts.end], [END, END2])


def _holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


@given(
    st.lists(st.sampled_from([START, END, BLANK, END2, 9, 10]), max_size=12),
    st.booleans(),
    st.integers(1, 5),
)
def test_the_reach_never_passes_the_place_where_the_budget_is_spent(
    tokens: list[int], is_open: bool, budget: int
) -> None:
    """Whatever comes next, a device that stops at the reach has not thought too much."""
    thoughts = Thoughts(Thinking((START, 9), (END, END2), open=is_open, budget=budget), TOKENIZER)
    reach = thoughts.reach
    for n, token in enumerate(tokens, 1):
        thoughts.push(token)
        if thoughts.place is Place.AFTER:
            assert thoughts.reach is None
            return
        assert reach is not None
        assert thoughts.reach is not None
        assert reach <= thoughts.reach
        reach = thoughts.reach
        if thoughts.place is Place.INSIDE:
            assert (n - thoughts.begin < budget) == (not thoughts.missing)
            if thoughts.missing:
                assert not _holds(tokens[thoughts.begin : n], [END, END2])
                forced = tokens[:n] + list(thoughts.missing)
                assert forced[-2:] == [END, END2]
                return


@pytest.mark.parametrize(
    ("prompt", "continued", "is_open"),
    [
        ("JK", False, False),
        ("JK<", False, True),
        ("JK<\n\n", False, True),
        ("JK<\n\n>\n\n", False, False),
        ("J<K", False, False),  # somebody wrote about markers
        ("J<K", True, True),
        ("J<K>L", True, False),
        ("<J>K<", False, True),
    ],
)
def test_a_prompt_may_end_inside_a_block(prompt: str, continued: bool, is_open: bool) -> None:
    found = thinking_of(TOKENIZER, encode(prompt), continued=continued)
    assert found == Thinking((START,), (END,), open=is_open)


# In the decoder

PROMPTS = [[5, 9, 11], [6, 9, 13, 8, 9], [7, 30, 12, 10]]
COUNT = 24


def reference(model: Any, prompt: list[int], block: Thinking, count: int = COUNT) -> list[int]:
    """One token after the other, the end put in where the budget of an open block is spent."""
    text: list[int] = []
    begin = 0 if block.open else None
    while len(text) < count:
        if begin is None and tuple(text) == block.start:
            begin = len(text)
        inside = begin is not None and not _holds(text[begin:], list(block.end))
        if inside and begin is not None and len(text) - begin == block.budget:
            text += block.end
        else:
            text += greedy(model, prompt + text, 1)
    return text[:count]


def decoder_for(model: Any, name: str, drafter: Any, **options: Any) -> Decoder:
    target = target_of(model, name)
    info = make_info(target, drafter.spec.kind, drafter.spec.max_k + 1)
    return Decoder(target, drafter, info=info, tokenizer=TOKENIZER, **options)


@functools.cache
def case(name: str) -> tuple[Any, list[Thinking], list[list[int]]]:
    """A model, a block for each prompt, and the texts with these.

    An open block, one the row opens itself, and one that ends by itself before its budget.
    """
    model = make_model(name)
    first, second, third = (greedy(model, prompt, COUNT) for prompt in PROMPTS)
    absent = [i for i in range(5, 48) if i not in first + second + third]
    blocks = [
        Thinking((START,), tuple(absent[:2]), open=True, budget=5),
        Thinking((second[0],), (absent[2],), budget=7),
        Thinking((START,), (third[3],), open=True, budget=third.index(third[3]) + 2),
    ]
    return model, blocks, [reference(model, p, b) for p, b in zip(PROMPTS, blocks, strict=True)]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize(("drafts", "depth"), [(0, 0), (5, 0), (5, 1), (0, 1)])
def test_a_spent_budget_closes_the_block_at_its_token(name: str, drafts: int, depth: int) -> None:
    model, own, texts = case(name)
    drafter: Any = NoDrafter()
    if drafts:
        whole = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
        drafter = OracleDrafter(whole, block=drafts + 1, wrong=0.3, seed=1)
    decoder = decoder_for(model, name, drafter, max_batch=2, depth=depth)
    for uid, (prompt, block) in enumerate(zip(PROMPTS, own, strict=True)):
        decoder.add(request(uid, prompt, COUNT, thinking=block))
    done = finish(decoder)

    assert [list(done[uid].token_ids) for uid in range(3)] == texts
    assert [done[uid].finish_reason for uid in range(3)] == ["length"] * 3
    assert done[0].reasoning_tokens == 5 + 2
    assert done[1].reasoning_tokens == 1 + 7 + 1
    assert done[2].reasoning_tokens == texts[2].index(own[2].end[0]) + 1


def test_a_real_draft_goes_on_from_what_was_put_in() -> None:
    spec = LoadSpec(str(VECTORS / "target"), draft=str(VECTORS / "draft-b8"), dtype="float32")
    with_draft = load_decoder(spec)
    target, drafter = with_draft.pair
    block = Thinking((START,), (40, 41), open=True, budget=6)
    texts = []
    for draft in (drafter, NoDrafter()):
        decoder = Decoder(target, draft, info=with_draft.info, tokenizer=TOKENIZER)
        decoder.add(request(0, [5, 9, 11], 30, thinking=block, ignore_eos=True))
        texts.append(finish(decoder)[0].token_ids)
    assert texts[0] == texts[1]
    assert texts[0][6:8] == (40, 41)


def test_forced_tokens_have_their_log_probabilities() -> None:
    model, own, _ = case("qwen3")
    decoder = decoder_for(model, "qwen3", NoDrafter())
    decoder.add(request(0, PROMPTS[0], COUNT, thinking=own[0], logprobs=3))
    done = finish(decoder)[0]
    assert done.logprobs is not None
    assert [entry.chosen.token for entry in done.logprobs] == list(done.token_ids)
    for place, entry in enumerate(done.logprobs):
        likeliest = entry.chosen.logprob == entry.top[0].logprob
        assert likeliest == (place not in (5, 6)), "only what was forced is not the likeliest"


def test_a_budget_beyond_max_tokens_changes_nothing() -> None:
    model, own, _ = case("qwen3")
    decoder = decoder_for(model, "qwen3", NoDrafter())
    block = Thinking((START,), own[0].end, open=True, budget=1000)
    decoder.add(request(0, PROMPTS[0], COUNT, thinking=block))
    done = finish(decoder)[0]
    assert list(done.token_ids) == greedy(model, PROMPTS[0], COUNT)
    assert (done.text, done.finish_reason, done.reasoning_tokens) == ("", "length", COUNT)


class Script:
    """A target's words, fixed beforehand: what matters here is how they are read."""

    def __init__(self, text: str) -> None:
        self.text = encode(text)

    def say(self, **options: Any) -> Completion:
        """What becomes of a row to whose prompt the target says this."""
        model = make_model("qwen3")
        drafter = OracleDrafter([[5, 9, *self.text]], block=4, wrong=0.2, seed=2)
        target = Scripted(target_of(model, "qwen3"), 2, self.text)
        info = make_info(target_of(model, "qwen3"), "oracle", 4)
        decoder = Decoder(target, drafter, info=info, tokenizer=TOKENIZER)
        decoder.add(Request(uid=0, prompt=(5, 9), max_tokens=len(self.text), **options))
        return finish(decoder)[0]


OPEN, CLOSED = Thinking((START,), (END,), open=True), Thinking((START,), (END,))


@pytest.mark.parametrize(
    ("says", "options", "text", "reasoning", "reason"),
    [
        ("JK>\n\nLM", {"thinking": OPEN}, "LM", "JK", "length"),
        ("<\nJK\n>\n\nLM", {"thinking": CLOSED}, "LM", "JK", "length"),
        ("LM", {"thinking": CLOSED}, "LM", None, "length"),
        ("\nLM", {"thinking": CLOSED}, "\nLM", None, "length"),
        ("JK", {"thinking": OPEN}, "", "JK", "length"),
        ("JKV", {"thinking": OPEN, "stop_token_ids": frozenset(encode("V"))}, "", "JK", "stop"),
        # stop strings are for the answer, and blanks before it are not of it
        ("JSK>LSM", {"thinking": OPEN, "stop": ("S",)}, "L", "JSK", "stop"),
        ("\n<JSK>LSM", {"thinking": CLOSED, "stop": ("S",)}, "L", "JSK", "stop"),
        ("J\nK>\n\nL\n\nM", {"thinking": OPEN, "stop": ("\n\n",)}, "L", "J\nK", "stop"),
        ("\n\nL\n\nM", {"thinking": CLOSED, "stop": ("\n\n",)}, "", None, "stop"),
        ("LSM", {"thinking": CLOSED, "stop": ("S",)}, "L", None, "stop"),
        ("JSK>L", {"stop": ("S",)}, "J", None, "stop"),
        # min_tokens: only then are stop strings looked for
        ("LSMSN", {"stop": ("S",), "min_tokens": 3}, "LSM", None, "stop"),
        ("SM>LSNSO", {"thinking": OPEN, "stop": ("S",), "min_tokens": 5}, "LSN", "SM", "stop"),
        ("J>L", {"skip_special_tokens": False}, "J>L", None, "length"),
        ("J>L", {}, "JL", None, "length"),
    ],
)
def test_what_is_answer_and_what_is_thought(
    says: str, options: dict[str, Any], text: str, reasoning: str | None, reason: str
) -> None:
    done = Script(says).say(**options)
    assert (done.text, done.reasoning, done.finish_reason) == (text, reasoning, reason)


def test_forced_tokens_count_as_output_for_penalties() -> None:
    model, own, _ = case("qwen3")
    texts: list[list[int]] = []
    for drafts in (0, 3):
        drafter: Any = NoDrafter()
        if drafts:
            drafter = OracleDrafter([PROMPTS[0] + texts[0]], block=drafts + 1, wrong=0.3, seed=1)
        decoder = decoder_for(model, "qwen3", drafter)
        settings = Sampling(presence_penalty=2.0, repetition_penalty=1.5)
        decoder.add(request(0, PROMPTS[0], COUNT, thinking=own[0], sampling=settings))
        texts.append(list(finish(decoder)[0].token_ids))
        counts = np.bincount(np.array(texts[-1]), minlength=48)
        assert texts[-1][5:7] == list(own[0].end)
        assert counts[list(own[0].end)].tolist() == [1, 1]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("depth", [0, 1])
def test_budgets_hold_for_prompts_that_ride(depth: int) -> None:
    """Behind a held prefix the end of a prompt goes through the cycles of other rows."""
    model, own, _ = case("qwen3")
    shared = [int(i) for i in np.random.default_rng(3).integers(5, 48, 30)]
    prompts = [[5 + i, 9, *shared, 7, 8 + i] if i == 0 else [*shared, 7 + i] for i in range(6)]
    block = [Thinking((START,), own[0].end, open=True, budget=1 + i % 3) for i in range(6)]
    texts = [reference(model, p, b, 9) for p, b in zip(prompts, block, strict=True)]
    decoder = decoder_for(model, "qwen3", NoDrafter(), max_batch=3, depth=depth)
    for uid, (prompt, thinking) in enumerate(zip(prompts, block, strict=True)):
        decoder.add(request(uid, prompt, 9, thinking=thinking, logprobs=1))
    done = finish(decoder)
    assert [list(done[uid].token_ids) for uid in range(6)] == texts
    assert sum(done[uid].cached_tokens > 0 for uid in range(6)) >= 4
