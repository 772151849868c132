"""The decoder: rows wait, are admitted, decode together cycle by cycle, and leave one by one.

`Decoder.step` is the whole life: admit what fits, launch one cycle, read the oldest cycle in
flight, retire what ended. On a GPU the host reads cycle i-1 while cycle i runs; a row that ended
in i-1 then rides along once for nothing, and its tokens are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jinja2
import mlx.core as mx
import numpy as np

from dflash_batch.decoder.acceptance import Coupled, Greedy, Rule
from dflash_batch.decoder.admission import STALL, Admission, Group, Rider
from dflash_batch.decoder.answer import answer
from dflash_batch.decoder.cycle import Ride, Slots, Verdict, cycle, sound, untimed
from dflash_batch.decoder.diagnostics import CycleFacts, Watch
from dflash_batch.decoder.drafters import Drafter, Proposal
from dflash_batch.decoder.echo import Scorer
from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.force import force
from dflash_batch.decoder.logprobs import Shown, show
from dflash_batch.decoder.memory import Budget
from dflash_batch.decoder.policy import (
    Fixed,
    Landed,
    Policy,
    RowOutcome,
    RowView,
    arena_width,
)
from dflash_batch.decoder.prefill import Prefiller, Staged
from dflash_batch.decoder.row import Row
from dflash_batch.decoder.sampling import Sampler
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.text import StopStrings
from dflash_batch.decoder.thinking import Thoughts, thinking_of
from dflash_batch.decoder.tiers import Tiers
from dflash_batch.decoder.types import (
    Completion,
    Load,
    ModelInfo,
    Request,
    Thinking,
)

RIDE = 2
"""Most cycles for which the end of a prompt rides along instead of getting a forward of its own."""

DEFAULT_MAX_TOKENS = 1024
"""Budget of a row that names none, when the context has that much room."""


class _Flight(NamedTuple):
    """A cycle on its way: whose slot was whose when it was launched."""

    rows: list[Row | None]
    rode: frozenset[int]  # slots in which a prompt rode
    tokens: int  # per row, anchor included
    context: int  # visible columns
    verdict: Verdict
    shown: Shown | None  # while some row wants log probabilities
    parts: dict[str, float]  # milliseconds, if they are timed


class Decoder:
    """Decodes rows in batch, each with its own sampling. A row does not depend on its neighbours.

    `sampling` is the rule for batches in which some row samples. With `Coupled` a seed gives the
    same text whatever the drafts; with `Rejection` it does for one draft and block length.
    `policy` chooses how many tokens to draft and how many rows to take, by default all there are;
    it may be exchanged between steps. `tiers` hold prefixes, by default in memory alone.
    `memory` is bytes on the device for all of it, weights included; None: as much as it takes.
    `watch` is told of every cycle and row.
    `depth` is how many cycles may be in flight: 1 hides the host's work behind a GPU, 0 reads
    each cycle at once (better on the CPU backend, where the two compete for the same cores).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        info: ModelInfo,
        tokenizer: Any = None,
        max_batch: int = 16,
        depth: int | None = None,
        sampling: Rule | None = None,
        policy: Policy | None = None,
        memory: int | None = None,
        watch: Watch | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError("max_batch must be at least 1")
        self.info = info
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._gpu = mx.default_device() == mx.gpu
        self._depth = int(self._gpu) if depth is None else depth
        self._greedy, self._sampling = Greedy(), sampling or Coupled()
        prefiller = Prefiller(target, drafter, tiers)
        self._admission = Admission(prefiller, Scorer(target, drafter, prefiller.chunk))
        self._watch = watch
        self._budget = Budget(target, drafter, memory)
        self._slots = Slots(1, target, drafter)
        self._rows: list[Row | None] = [None]  # of each slot
        self._flights: deque[_Flight] = deque()
        self.policy = policy or Fixed(drafter.spec.max_k, trim=not self._gpu)
        self._k = drafter.spec.max_k  # drafts per row of the newest cycle
        self._landed_at = 0.0
        self._uneven = 1  # landings to come whose time is not that of a cycle alone

    @property
    def pair(self) -> tuple[Target, Drafter]:
        """What decodes here, for those who measure it."""
        return self._target, self._drafter

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self._tokenizer

    # Prompts

    def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat by the model's own template, ready for the answer.

        `options` go to the template: enable_thinking, add_generation_prompt, …
        Raises PromptError: tokenizer_missing, chat_template_missing, chat_template_error.
        """
        tokenizer = self._need_tokenizer("messages")
        if not self.info.has_chat_template:
            raise PromptError(
                "the model has no chat template; use /v1/completions with a prompt",
                code="chat_template_missing",
                param="messages",
            )
        try:
            ids = tokenizer.apply_chat_template(
                messages,
                **{"add_generation_prompt": True, **options},
                tokenize=True,
                return_dict=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as e:
            raise PromptError(
                f"the model's chat template refused the messages: {e}",
                code="chat_template_error",
                param="messages",
            ) from e
        return [int(i) for i in ids]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, with the first token the tokenizer sets by itself, if any."""
        return [int(i) for i in self._need_tokenizer("prompt").encode(text)]

    def thinking(self, prompt: Sequence[int], *, continued: bool = False) -> Thinking | None:
        """The thinking block of a chat that was encoded to `prompt`; None: the model has none.

        `continued`: its last message is to be gone on with.
        """
        return thinking_of(self._need_tokenizer("messages"), prompt, continued=continued)

    def _need_tokenizer(self, param: str) -> Any:
        if self._tokenizer is None:
            raise PromptError(
                "the model folder has no tokenizer files; give the prompt as token ids",
                code="tokenizer_missing",
                param=param,
            )
        return self._tokenizer

    def room(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        """The output budget of a prompt, in tokens.

        Raises PromptError: invalid_value, or context_length_exceeded when it does not fit.
        """
        if not prompt:
            raise PromptError("the prompt is empty")
        for token in (max(prompt), min(prompt)):
            if not 0 <= token < self.info.vocab_size:
                raise PromptError(
                    f"token id {token} is outside the vocabulary of {self.info.vocab_size:,}"
                )
        limit = self.info.context_length
        if len(prompt) + (1 if max_tokens is None else max_tokens) > limit:
            budget = "" if max_tokens is None else f" with max_tokens {max_tokens:,}"
            raise PromptError(
                f"prompt has {len(prompt):,} tokens; limit is {limit:,}{budget}",
                code="context_length_exceeded",
            )
        return min(DEFAULT_MAX_TOKENS, limit - len(prompt)) if max_tokens is None else max_tokens

    # Rows in and out

    def add(self, request: Request) -> None:
        """Queue a row for admission. Raises PromptError if it can never run."""
        self.room(request.prompt, request.max_tokens)
        if self._budget.rows(self._budget.columns(_most(request))) == 0:
            raise PromptError(
                f"{_most(request):,} tokens of prompt and output do not fit in memory beside the "
                "model",
                code="out_of_memory",
            )
        eos = frozenset[int]() if request.ignore_eos else self.info.eos_token_ids
        watch = thoughts = None
        if request.stop:
            tokenizer = self._need_tokenizer("stop")
            skip = request.skip_special_tokens
            watch = StopStrings(tokenizer, request.stop, skip_special=skip)
        if request.thinking is not None:
            thoughts = Thoughts(request.thinking, self._need_tokenizer("messages"))
        self._admission.add(
            Row(
                request=request,
                prompt=np.array(request.prompt, dtype=np.int32),
                added=time.perf_counter(),
                stops=eos | request.stop_token_ids,
                watch=watch,
                thoughts=thoughts,
            )
        )

    def cancel(self, uid: int) -> None:
        """Forget a row: it will not be among the completions."""
        for row in (*self._admission, *self._rows):
            if row is not None and row.request.uid == uid:
                row.cancelled = True
        self._admission.drop_cancelled()

    def narrow(self, rows: int) -> None:
        """Take in no more than `rows` at once from here on; those that run go on."""
        self._max_batch = max(1, min(rows, self._max_batch))
        mx.clear_cache()

    def load(self) -> Load:
        """Rows waiting, and rows decoding."""
        return Load(len(self._admission), self._live)

    def unstarted(self) -> list[int]:
        """Uids of the rows that wait for a place, in the order in which they get one."""
        admission = self._admission
        return [row.request.uid for row in admission.ahead(admission.waiting)]

    def step(self) -> list[Completion]:
        """Admit what fits, run one cycle, and return the rows that ended."""
        over = self._admit()
        self._steer()
        if any(row is not None and not row.over for row in self._rows):
            self._flights.append(self._launch())
            while len(self._flights) > self._depth:
                self._land(self._flights.popleft())
        else:
            # Every row has ended: what is still in flight holds only tokens to be dropped.
            self._flights.clear()
        over += self._retire()
        now = time.perf_counter()
        ended = [row for row in over if not row.cancelled]
        for row in ended:
            if row.fault is None:
                self._drafter.learn(row.request.prompt, row.tokens)
        done = [
            answer(
                row,
                self._tokenizer,
                now,
                self.policy.effective(row.cycles, row.plain),
                self.policy.notice or self.info.draft_notice,
            )
            for row in ended
        ]
        if self._watch is not None:
            for completion in done:
                self._watch.job(completion)
        return done

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode requests, taken as room comes free, and give each completion as it ends.

        Rows that were added before take part. Leaving the loop early forgets all rows. Raises
        PromptError at a request that can never run.
        """
        source = iter(requests)
        more = True
        try:
            while more or any(self.load()):
                while more and len(self._admission) < self._max_batch:
                    request = next(source, None)
                    more = request is not None
                    if request is not None:
                        self.add(request)
                yield from self.step()
        finally:
            for row in (*self._admission, *self._rows):
                if row is not None:
                    self.cancel(row.request.uid)

    def close(self) -> None:
        """Forget all rows and give the memory back."""
        self._admission.clear()
        self._flights.clear()
        self.policy.close()
        if self._watch is not None:
            self._watch.close()
        self._slots, self._rows = Slots(1, self._target, self._drafter), [None]
        mx.clear_cache()

    # One cycle

    def _steer(self) -> None:
        """Let rows with a thinking budget go on, and close the thinking where it is spent.

        The device stops such a row where its budget may end; from there the host leads.
        """
        for slot, row in enumerate(self._rows):
            if row is None or row.over or row.thoughts is None:
                continue
            if missing := row.thoughts.missing:
                self._force(slot, row, missing)
            elif row.reach != row.reachable:
                self._slots.allow(slot, row.reachable - row.reach)
                row.reach = row.reachable

    def _force(self, slot: int, row: Row, tokens: Sequence[int]) -> None:
        self._disturb()
        pair, anchor = self.pair, row.tokens[-1]
        logits = force(self._slots, slot, row.committed, anchor, tokens, *pair)
        kept = row.take(tokens)
        if row.request.logprobs is not None:
            row.show(show(logits, mx.array([tokens], dtype=mx.int32)), 0, 0, kept)
        self._place(slot, row, row.committed, anchor=row.tokens[-1])

    def _launch(self) -> _Flight:
        live = [row for row in self._rows if row is not None and not row.over]
        for row in live:
            row.width = max(row.width, len(live))
        self._slots.lens.bound = max(row.committed for row in live) + sum(
            flight.tokens for flight in self._flights
        )
        context = self._context()
        k = self._block(live, context)
        ride, rode = self._ride(k + 1)
        rule = self._rule(self._slots.sampler)
        watch = self._watch
        if watch is not None:
            watch.begin()
        timer = untimed if watch is None else watch.part
        verdict, logits = cycle(self._slots, self._target, self._drafter, k, rule, ride, timer)
        shown = show(logits, verdict.chosen) if _asked(live) else None
        mx.async_eval(
            *(*verdict, *(shown or ())),
            *(self._slots.lens.offset, self._slots.anchor, self._slots.remaining),
        )
        parts = {} if watch is None else watch.parts()
        return _Flight(list(self._rows), rode, k + 1, context, verdict, shown, parts)

    def _block(self, live: list[Row], context: int) -> int:
        """Drafts per row for the next cycle."""
        views = [RowView(row.request.uid, row.left) for row in live if not row.tail]
        if views:
            self._k = self.policy.choose(views, len(self._rows), context)
            return self._k
        longest = max(len(row.tail) for row in live)
        return self._drafter.spec.max_k if self._gpu else min(longest - 1, self._drafter.spec.max_k)

    def _ride(self, width: int) -> tuple[Ride | None, frozenset[int]]:
        """The next piece of each prompt that rides, and in which slots; none is left of it then."""
        tails = [row.tail if row is not None and not row.over else [] for row in self._rows]
        rode = frozenset(slot for slot, tail in enumerate(tails) if tail)
        if not rode:
            return None, rode
        tokens = np.zeros((len(tails), width), dtype=np.int32)
        lengths, ends = np.zeros((2, len(tails)), dtype=np.int32)
        for slot in rode:
            piece = tails[slot][:width]
            tokens[slot, : len(piece)] = piece
            lengths[slot], ends[slot] = len(piece), len(piece) == len(tails[slot])
            del tails[slot][:width]
        return Ride(mx.array(tokens), mx.array(lengths), mx.array(ends)), rode

    def _rule(self, sampler: Sampler) -> Rule:
        return self._greedy if sampler.plain else self._sampling

    def _context(self) -> int:
        """Columns a cycle sees, in the arena's steps."""
        lens = self._slots.lens
        return -(-(lens.bound + 1) // lens.step) * lens.step

    def _land(self, flight: _Flight) -> None:
        chosen, first, emitted, accepted, width, drafts, fit = map(np.array, flight.verdict)
        seconds = self._lap()
        outcomes = []
        for slot, row in enumerate(flight.rows):
            if row is None or row.over:
                continue
            if not fit[slot]:
                row.fail()
                continue
            # Where a row had fewer drafts than there was room for, the rest counts as refused.
            room = min(flight.tokens - 1, row.left)
            begin = int(first[slot])
            kept = row.take(chosen[slot, begin : begin + emitted[slot]].tolist())
            if flight.shown is not None:
                row.show(flight.shown, slot, begin, kept)
            if slot in flight.rode:
                row.first = self._landed_at
                continue
            outcomes.append(RowOutcome(row.request.uid, room, int(accepted[slot])))
            row.cycles += 1
            row.plain += flight.tokens == 1
            row.drafted += int(width[slot]) - 1
            row.accepted += min(kept, int(accepted[slot]))
            if row.request.trace:
                row.emitted_per_cycle.append(kept)
                row.drafted_per_cycle.append(tuple(drafts[slot, : width[slot] - 1].tolist()))
        self.policy.landed(
            Landed(len(flight.rows), flight.tokens, flight.context, seconds, outcomes)
        )
        if self._watch is not None:
            self._watch.cycle(
                CycleFacts(
                    width=len(flight.rows),
                    live=len(outcomes),
                    riding=len(flight.rode),
                    block=flight.tokens,
                    context=flight.context,
                    accepted=[outcome.accepted for outcome in outcomes],
                    emitted=int(emitted.sum()),
                    parts_ms=flight.parts,
                )
            )

    def _lap(self) -> float | None:
        """Seconds since the last landing, if nothing but a cycle ran in them.

        The host waits for each cycle anyway, so this is a cycle's time without another wait.
        """
        before, self._landed_at = self._landed_at, time.perf_counter()
        if self._uneven:
            self._uneven -= 1
            return None
        return self._landed_at - before

    def _disturb(self) -> None:
        """Other work is queued: it shows in the landings in flight, and in the next one."""
        self._uneven = len(self._flights) + 1

    def _retire(self) -> list[Row]:
        """Take out the rows that ended, and narrow the arena when it has become too wide."""
        over = [row for row in self._rows if row is not None and row.over]
        ill = any(row.fault is not None for row in over)
        for slot, row in enumerate(self._rows):
            if row is not None and row.over:
                self._rows[slot] = None
                self._slots.place(slot, length=0, anchor=0, remaining=0)
                self._slots.sampler.clear(slot)
        live = self._live
        if not live:
            self._slots, self._rows = Slots(1, self._target, self._drafter), [None]
        elif ill:
            # A masked NaN still spoils a sum: the slot's next row must not find it there.
            self._resize(len(self._rows))
        elif arena_width(live) < len(self._rows) and not (self._admission.coming or self._free()):
            self._resize(arena_width(live))
        return over

    # Admission

    @property
    def _live(self) -> int:
        return sum(row is not None for row in self._rows)

    def _admit(self) -> list[Row]:
        """Bring waiting rows in; return those that ended with their first token."""
        over: list[Row] = []
        until: float | None = None
        while until is None or time.perf_counter() < until:
            if self._live:
                until = until or time.perf_counter() + STALL
                self._board(self._riders())
            free = self._free()
            if not (free or self._admission.coming):
                break
            self._disturb()
            group = self._admission.advance(free, until)
            if group is None:
                break
            over += self._seat(group)
        return over

    def _riders(self) -> list[Rider]:
        """Waiting rows that need no forward of their own."""
        free = self._free()
        return list(self._admission.riders(free, RIDE * (self._k + 1), self._may_ride))

    def _may_ride(self, row: Row) -> bool:
        # What rides is given, not drafted: a penalty must not count it as text, and a rule must
        # not draw the token behind it from what would be left of a draft.
        request = row.request
        return self._sampling.position_wise and not (request.sampling.penalised or request.echo)

    def _seat(self, group: Group) -> list[Row]:
        """Give a group its first tokens and slots; return the rows that ended with them."""
        rows, started, staged = group
        first, shown = self._first(rows, staged)
        fit = np.array(sound(staged.logits[:, None], mx.ones((len(rows), 1), dtype=mx.bool_)))
        now = time.perf_counter()
        for i, row in enumerate(rows):
            row.started, row.first = started, now
            if not fit[i]:
                row.fail()
            elif row.left == 0:  # only the prompt was of interest
                row.reason = "length"
            else:
                row.take([first[i]])
                if shown is not None:
                    row.show(shown, i, 0, 1)
        live = [(row, i) for i, row in enumerate(rows) if not row.over]
        source = staged.slots
        for slot, (row, i) in zip(self._room(len(live)), live, strict=True):
            length = len(row.prompt)
            self._slots.arena.load(slot, source.arena.snapshot(i, length))
            self._slots.draft.load(slot, source.draft.snapshot(i, length))
            self._place(slot, row, length, anchor=row.tokens[-1])
        return [row for row in rows if row.over]

    def _board(self, riders: list[Rider]) -> None:
        """Give rows a slot in which the rest of their prompt rides."""
        for slot, (row, start) in zip(self._room(len(riders)), riders, strict=True):
            row.started = time.perf_counter()
            row.tail = row.prompt[start.length :].tolist()
            start.load(self._slots, slot)
            self._place(slot, row, start.length, anchor=0)

    def _place(self, slot: int, row: Row, length: int, anchor: int) -> None:
        row.reach = row.reachable
        remaining = row.reach - len(row.tokens)
        self._slots.place(slot, length=length, anchor=anchor, remaining=remaining)
        self._slots.sampler.place(slot, row.request.sampling, row.request.prompt, row.tokens)
        self._rows[slot] = row

    def _first(self, group: list[Row], staged: Staged) -> tuple[list[int], Shown | None]:
        """The first token of each row: a block without drafts, behind the prompt's last token."""
        sampler = staged.slots.sampler
        for i, row in enumerate(group):
            sampler.place(i, row.request.sampling, row.request.prompt, ())
        none = mx.zeros((len(group), 0), dtype=mx.int32)
        rule = self._rule(sampler)
        judged = rule.judge(
            staged.logits[:, None],
            rule.draft(Proposal(none), sampler, staged.slots.lens.offset - 1),
            mx.ones((len(group),), dtype=mx.int32),
            sampler,
            staged.slots.lens.offset - 1,
        )
        shown = show(staged.logits[:, None], judged.chosen) if _asked(group) else None
        return [int(token) for token in np.array(judged.chosen[:, 0])], shown

    def _free(self) -> int:
        """How many rows to admit now."""
        taken = self._live + self._admission.coming
        ready = max(0, min(self._max_batch - taken, self._admission.waiting))
        more = self.policy.admit_more(taken, ready, self._context()) if ready else 0
        ahead = self._admission.ahead(more) if self._budget.limit is not None else []
        while ahead and not self._fit(ahead):
            ahead.pop()
            more -= 1
        return more

    def _fit(self, more: list[Row]) -> bool:
        """Whether memory has room for all there are and for `more` rows, fully written."""
        rows = [row for row in (*self._rows, *self._admission.group, *more) if row is not None]
        columns = self._budget.columns(max(_most(row.request) for row in rows))
        most = self._budget.rows(columns)
        return most is None or min(arena_width(len(rows)), self._max_batch) <= most

    def _room(self, count: int) -> list[int]:
        """As many empty slots, in a wider arena if need be."""
        if not count:
            return []
        need = count + self._live
        if need > len(self._rows):
            self._resize(min(arena_width(need), self._max_batch))
        return [slot for slot, row in enumerate(self._rows) if row is None][:count]

    def _resize(self, width: int) -> None:
        """Give the arena `width` rows: the live ones first, the rest idle."""
        self._disturb()
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        self._slots.select(live + (live or [0])[:1] * (width - len(live)))
        self._rows = [self._rows[slot] for slot in live] + [None] * (width - len(live))
        for slot in range(len(live), width):
            self._slots.place(slot, length=0, anchor=0, remaining=0)
            self._slots.sampler.clear(slot)


def _most(request: Request) -> int:
    """Tokens of a row once it has written all it may."""
    return len(request.prompt) + request.max_tokens


def _asked(rows: Sequence[Row]) -> bool:
    return any(row.request.logprobs is not None for row in rows)
