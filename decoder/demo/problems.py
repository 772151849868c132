"""Worded arithmetic problems: what the demo target was trained on, and what the demo asks.

Pure Python, seeded, no MLX. A problem is a short story whose answer needs one to six small sums.
Its *chain* is the list of equations in its worked answer. A hash of the chain says which split it
is in, so no chain of a demo problem occurs in the training data, whatever the names and wording.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Split = Literal["train", "held_out"]

SYSTEM = "You solve short word problems step by step and end with #### and the answer."
DEMO_SEED = 2026
FEW_SHOT_SEED = 8
MAX_TOKENS = 128

_FEW_SHOT = 8
DEMO_SHOTS = 4
"""Worked pairs in front of each demo row: enough for a prefix worth sharing, and quick on a CPU."""
_LIMIT = 150  # no amount in a story is larger
_HELD_OUT_ONE_IN = 8
_EQUATION = re.compile(r"\d+ [-+*/] \d+ = \d+")
_ANSWER = re.compile(r"####\s*(-?\d[\d,]*)")

_PEOPLE = (
    ("Mia", "she"), ("Ben", "he"), ("Ana", "she"), ("Tom", "he"), ("Lena", "she"), ("Max", "he"),
    ("Ida", "she"), ("Leo", "he"), ("Nora", "she"), ("Sam", "he"), ("Ella", "she"), ("Finn", "he"),
    ("Ruth", "she"), ("Omar", "he"), ("Kim", "she"), ("Raj", "he"), ("Zoe", "she"), ("Paul", "he"),
    ("Sara", "she"), ("Ali", "he"), ("Vera", "she"), ("Hugo", "he"), ("Amy", "she"), ("Carl", "he"),
)  # fmt: skip
_THINGS = (
    "apples", "pears", "marbles", "stickers", "books", "pencils", "coins", "shells", "cards",
    "buttons", "cookies", "flowers", "stamps", "beads", "eggs", "lemons", "cups", "balloons",
    "plums", "toys", "candles", "stones", "ribbons", "tickets",
)  # fmt: skip
_PACKS = ("bags", "boxes", "baskets", "jars", "packs", "trays")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow")


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer without the final line, and the number asked for."""

    question: str
    reasoning: str
    answer: int

    @property
    def reply(self) -> str:
        """The whole text that the target is trained to give."""
        return f"{self.reasoning}\n#### {self.answer}"

    @property
    def chain(self) -> tuple[str, ...]:
        """The equations of the worked answer, in order."""
        return tuple(_EQUATION.findall(self.reasoning))

    @property
    def split(self) -> Split:
        """The side of the train/held-out border on which the chain's hash falls."""
        digest = hashlib.sha256(";".join(self.chain).encode()).digest()
        return "held_out" if digest[0] % _HELD_OUT_ONE_IN == 0 else "train"


def make_problems(seed: int, count: int, split: Split = "held_out") -> list[Problem]:
    """``count`` problems of one split, with distinct questions; the same for the same arguments."""
    found: dict[str, Problem] = {}
    for problem in _stream(Random(seed)):
        if len(found) >= count:
            break
        if problem.split == split:
            found.setdefault(problem.question, problem)
    return list(found.values())


def few_shot_messages(count: int = _FEW_SHOT) -> list[dict[str, str]]:
    """The demo's fixed prefix: a system message, then ``count`` worked pairs."""
    messages = [{"role": "system", "content": SYSTEM}]
    for problem in make_problems(FEW_SHOT_SEED, count):
        messages.append({"role": "user", "content": problem.question})
        messages.append({"role": "assistant", "content": problem.reply})
    return messages


def demo_rows(count: int = 64, seed: int = DEMO_SEED) -> list[dict[str, Any]]:
    """``count`` request lines in the OpenAI batch form; all share the few-shot prefix."""
    prefix = few_shot_messages(DEMO_SHOTS)
    return [
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "demo",
                "messages": [*prefix, {"role": "user", "content": problem.question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            },
        }
        for custom_id, problem in _demo_problems(count, seed).items()
    ]


def demo_answers(count: int = 64, seed: int = DEMO_SEED) -> dict[str, int]:
    """The key to ``demo_rows`` with the same arguments: custom_id to the right number."""
    return {custom_id: problem.answer for custom_id, problem in _demo_problems(count, seed).items()}


def extract_answer(text: str) -> int | None:
    """The number behind the last ``####``, or None if the text does not end in that form."""
    found = _ANSWER.findall(text)
    return int(found[-1].replace(",", "")) if found else None


def _demo_problems(count: int, seed: int) -> dict[str, Problem]:
    """Held-out problems whose chains are not among the worked pairs, by custom_id."""
    shown = {problem.chain for problem in make_problems(FEW_SHOT_SEED, _FEW_SHOT)}
    fresh = [p for p in make_problems(seed, 2 * count + 16) if p.chain not in shown]
    return {f"demo-{i:04d}": problem for i, problem in enumerate(fresh[:count])}


def _stream(rng: Random) -> Iterator[Problem]:
    while True:
        shape = rng.choice(_SHAPES)
        problem = shape(rng)
        if problem is not None:
            yield problem


# A shape draws one story, or None where its numbers did not work out.


def _heap(rng: Random) -> Problem | None:
    """A heap of things that grows and shrinks: an opening, one or two events, a question."""
    name, pronoun = rng.choice(_PEOPLE)
    heap = _Heap(rng, name, pronoun, rng.choice(_THINGS))
    rng.choice((heap.has, heap.has, heap.has_packs, heap.has_two_kinds))()
    for _ in range(rng.choice((1, 2, 2))):
        event = rng.choice(
            (heap.gain, heap.gain, heap.lose, heap.lose, heap.gain_packs, heap.give_each)
        )
        event()
    if rng.random() < 0.2 and not heap.stuck:
        heap.share()
    else:
        heap.ask()
    return heap.problem()


def _change(rng: Random) -> Problem | None:
    """A price times a number, taken from a bank note."""
    name, _ = rng.choice(_PEOPLE)
    thing = rng.choice(_THINGS)
    many, price, note = rng.randint(2, 9), rng.randint(2, 9), rng.choice((20, 50, 100))
    cost = many * price
    if cost >= note:
        return None
    return Problem(
        f"{name} buys {many} {thing} for {price} dollars each and pays with {note} dollars. "
        f"How many dollars does {name} get back?",
        f"The {thing} cost {many} * {price} = {cost} dollars. "
        f"The change is {note} - {cost} = {note - cost} dollars.",
        note - cost,
    )


def _two_prices(rng: Random) -> Problem | None:
    """Two goods at two prices, and their sum."""
    name, _ = rng.choice(_PEOPLE)
    one, two = rng.sample(_THINGS, 2)
    many, price, more, dear = (rng.randint(2, 9) for _ in range(4))
    left, right = many * price, more * dear
    return Problem(
        f"{name} buys {many} {one} for {price} dollars each and {more} {two} for {dear} dollars "
        f"each. How many dollars does {name} pay?",
        f"The {one} cost {many} * {price} = {left} dollars. The {two} cost {more} * {dear} = "
        f"{right} dollars. Together that is {left} + {right} = {left + right} dollars.",
        left + right,
    )


def _compare(rng: Random) -> Problem | None:
    """Two people, one with more or fewer, and their sum."""
    (name, _), (other, _) = rng.sample(_PEOPLE, 2)
    thing = rng.choice(_THINGS)
    own, gap = rng.randint(8, 60), rng.randint(2, 30)
    word, sign = rng.choice((("more", "+"), ("fewer", "-")))
    theirs = own + gap if sign == "+" else own - gap
    if theirs < 1:
        return None
    return Problem(
        f"{name} has {own} {thing}. {other} has {gap} {word} than {name}. "
        f"How many {thing} do they have together?",
        f"{other} has {own} {sign} {gap} = {theirs} {thing}. "
        f"Together they have {own} + {theirs} = {own + theirs} {thing}.",
        own + theirs,
    )


def _pages(rng: Random) -> Problem | None:
    """So much a day for some days, out of a whole."""
    name, _ = rng.choice(_PEOPLE)
    daily, days = rng.randint(2, 12), rng.randint(2, 9)
    read = daily * days
    whole = read + rng.randint(2, 50)
    return Problem(
        f"{name} reads {daily} pages a day for {days} days. The book has {whole} pages. "
        f"How many pages are left?",
        f"In {days} days {name} reads {days} * {daily} = {read} pages. "
        f"That leaves {whole} - {read} = {whole - read} pages.",
        whole - read,
    )


_SHAPES: tuple[Callable[[Random], Problem | None], ...] = (
    *(_heap,) * 6,
    _change,
    _two_prices,
    _compare,
    _pages,
)


class _Heap:
    """A story in the making: sentences so far, and the amount that they lead to."""

    def __init__(self, rng: Random, name: str, pronoun: str, thing: str) -> None:
        self.rng, self.name, self.pronoun, self.thing = rng, name, pronoun, thing
        self.story: list[str] = []
        self.work: list[str] = []
        self.amount = 0
        self.stuck = False  # an event did not fit the amount

    def has(self) -> None:
        self.amount = self.rng.randint(5, 60)
        self._say(f"{self.name} has {self.amount} {self.thing}.")
        self._show(f"{self.name} starts with {self.amount} {self.thing}.")

    def has_packs(self) -> None:
        packs, many, each = self._packs()
        self.amount = many * each
        self._say(f"{self.name} has {many} {packs} with {each} {self.thing} in each.")
        self._show(f"At first there are {many} * {each} = {self.amount} {self.thing}.")

    def has_two_kinds(self) -> None:
        one, two = self.rng.sample(_COLOURS, 2)
        many, more = self.rng.randint(3, 40), self.rng.randint(3, 40)
        self.amount = many + more
        self._say(f"{self.name} has {many} {one} {self.thing} and {more} {two} {self.thing}.")
        self._show(f"At first there are {many} + {more} = {self.amount} {self.thing}.")

    def gain(self) -> None:
        more = self.rng.randint(2, 40)
        self._say(
            self.rng.choice(
                (
                    f"Then {self.pronoun} buys {more} more.",
                    f"A friend gives {self.name} {more} more {self.thing}.",
                    f"{self.name} finds {more} more {self.thing}.",
                )
            )
        )
        self._step("Adding these gives", "+", more)

    def lose(self) -> None:
        less = self.rng.randint(2, 30)
        self._say(
            self.rng.choice(
                (
                    f"Then {self.pronoun} gives {less} away.",
                    f"{self.name} sells {less} of the {self.thing}.",
                    f"{self.name} loses {less} {self.thing}.",
                )
            )
        )
        self._step("Taking these away leaves", "-", less)

    def gain_packs(self) -> None:
        packs, many, each = self._packs()
        self._say(f"{self.name} buys {many} {packs} of {each} {self.thing}.")
        self._show(f"The {packs} hold {many} * {each} = {many * each} {self.thing}.")
        self._step("Adding these gives", "+", many * each)

    def give_each(self) -> None:
        many, each = self.rng.randint(2, 6), self.rng.randint(2, 6)
        self._say(f"Then {self.pronoun} gives {each} to each of {many} friends.")
        self._show(f"The friends get {many} * {each} = {many * each} {self.thing}.")
        self._step("Taking these away leaves", "-", many * each)

    def share(self) -> None:
        fitting = [n for n in range(2, 7) if self.amount % n == 0 and self.amount // n > 1]
        if not fitting:
            self.stuck = True
            return
        people = self.rng.choice(fitting)
        self._say(f"The rest is shared equally by {people} children. How many does each child get?")
        self._step("Each child gets", "/", people)

    def ask(self) -> None:
        self._say(
            self.rng.choice(
                (
                    f"How many {self.thing} does {self.name} have now?",
                    f"How many {self.thing} does {self.name} have in the end?",
                )
            )
        )

    def problem(self) -> Problem | None:
        if self.stuck:
            return None
        return Problem(" ".join(self.story), " ".join(self.work), self.amount)

    def _packs(self) -> tuple[str, int, int]:
        return self.rng.choice(_PACKS), self.rng.randint(2, 9), self.rng.randint(2, 9)

    def _step(self, words: str, sign: str, operand: int) -> None:
        before = self.amount
        after = {"+": before + operand, "-": before - operand, "/": before // operand}[sign]
        self.stuck = self.stuck or not 0 < after <= _LIMIT
        self.amount = after
        self._show(f"{words} {before} {sign} {operand} = {after} {self.thing}.")

    def _say(self, sentence: str) -> None:
        self.story.append(sentence)

    def _show(self, sentence: str) -> None:
        self.work.append(sentence)
