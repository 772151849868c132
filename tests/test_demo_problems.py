"""The demo's word problems: reproducible, right, apart from the training data, valid rows."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_batch.decoder.demo.problems import (
    DEMO_SHOTS,
    FEW_SHOT_SEED,
    MAX_TOKENS,
    demo_answers,
    demo_rows,
    extract_answer,
    few_shot_messages,
    make_problems,
)

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@given(seed=st.integers(0, 2**32), count=st.integers(0, 12))
@settings(deadline=None, max_examples=30)
def test_problems_are_determined_by_their_arguments(seed: int, count: int) -> None:
    first = make_problems(seed, count)

    assert first == make_problems(seed, count)
    assert len({problem.question for problem in first}) == count
    assert first == make_problems(seed, count + 3)[:count]


def test_every_equation_is_right_and_the_last_gives_the_answer() -> None:
    sign = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: a / b,
    }

    for problem in make_problems(3, 2000, "train"):
        steps = EQUATION.findall(problem.reasoning)
        assert steps
        assert len(steps) == len(problem.chain)
        assert all(sign[op](int(a), int(b)) == int(c) for a, op, b, c in steps)
        assert int(steps[-1][3]) == problem.answer == extract_answer(problem.reply)
        assert problem.answer > 0


def test_no_chain_of_the_demo_is_in_the_training_split() -> None:
    training = {problem.chain for problem in make_problems(0, 20_000, "train")}
    shown = make_problems(FEW_SHOT_SEED, 8)
    asked = make_problems(2026, 500)

    assert all(problem.split == "held_out" for problem in shown + asked)
    assert not training & {problem.chain for problem in shown + asked}


def test_the_prefix_is_fixed_and_alternates() -> None:
    messages = few_shot_messages()

    assert messages == few_shot_messages()
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 8]
    assert len(few_shot_messages(2)) == 5


def test_rows_are_batch_lines_that_share_the_prefix() -> None:
    rows = demo_rows(40)

    assert rows == demo_rows(40)
    assert len({row["custom_id"] for row in rows}) == 40
    for row in rows:
        assert (row["method"], row["url"]) == ("POST", "/v1/chat/completions")
        assert row["body"]["max_tokens"] == MAX_TOKENS
        *prefix, question = row["body"]["messages"]
        assert prefix == few_shot_messages(DEMO_SHOTS)
        assert question["role"] == "user"
    assert len({row["body"]["messages"][-1]["content"] for row in rows}) == 40


def test_the_answer_key_fits_the_rows() -> None:
    answers = demo_answers(40)

    assert list(answers) == [row["custom_id"] for row in demo_rows(40)]
    assert demo_answers(10) == {key: answers[key] for key in list(answers)[:10]}


def test_no_demo_row_asks_for_a_chain_that_the_prefix_shows() -> None:
    questions = {problem.question: problem.chain for problem in make_problems(2026, 200)}
    shown = {problem.chain for problem in make_problems(FEW_SHOT_SEED, 8)}

    for row in demo_rows(64):
        assert questions[row["body"]["messages"][-1]["content"]] not in shown


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 2 + 2 = 4.\n#### 4", 4),
        ("#### 1\nno, wait\n#### 12", 12),
        ("####7<|im_end|>", 7),
        ("#### -3", -3),
        ("#### 1,024", 1024),
        ("the answer is 4", None),
        ("####", None),
        ("", None),
    ],
)
def test_the_answer_is_what_stands_behind_the_last_mark(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


@given(st.text(), st.integers(-999, 99999))
@settings(deadline=None)
def test_any_text_may_come_before_the_mark(before: str, answer: int) -> None:
    assert extract_answer(f"{before}\n#### {answer}") == answer
