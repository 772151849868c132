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
from dflash_batch.decoder.cycle import Slots, Verdict, cycle
from dflash_batch.decoder.drafters import Drafter, Proposal
from dflash_batch.decoder.errors import PromptError
from dflash_batch.decoder.logprobs import Shown, show
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
from dflash_batch.decoder.text import Detokenizer, StopStrings, cut
from dflash_batch.decoder.types import (
    Candidate,
    Completion,
    Load,
    ModelInfo,
    Request,
    TokenLogprob,
)

LOOK_AHEAD = 32
"""Waiting rows compared to find a shared prefix."""

DEFAULT_MAX_TOKENS = 1024
"""Budget of a row that names none, when the context has that much room."""


class _Flight(NamedTuple):
    """A cycle on its way: whose slot was whose when it was launched."""

    rows: list[Row | None]
    tokens: int  # per row, anchor included
    context: int  # visible columns
    verdict: Verdict
    shown: Shown | None  # while some row wants log probabilities


class Decoder:
    """Decodes rows in batch, each with its own sampling. A row does not depend on its neighbours.

    `sampling` is the rule for batches in which some row samples. With `Coupled` a seed gives the
    same text whatever the drafts; with `Rejection` it does for one draft and block length.
    `policy` chooses how many tokens to draft and how many rows to take, by default all there are;
    it may be exchanged between steps.
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
        self._waiting: deque[Row] = deque()
        self._prefiller = Prefiller(target, drafter)
        self._slots = Slots(1, target, drafter)
        self._rows: list[Row | None] = [None]  # of each slot
        self._flights: deque[_Flight] = deque()
        self.policy = policy or Fixed(drafter.spec.max_k, trim=not self._gpu)
        self._landed_at = 0.0
        self._uneven = 1  # landings to come whose time is not that of a cycle alone

    @property
    def pair(self) -> tuple[Target, Drafter]:
        """What decodes here, for those who measure it."""
        return self._target, self._drafter

    # Prompts

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a chat by the model's own template, ready for the answer.

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
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
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
        if len(prompt) + (max_tokens or 1) > limit:
            budget = "" if max_tokens is None else f" with max_tokens {max_tokens:,}"
            raise PromptError(
                f"prompt has {len(prompt):,} tokens; limit is {limit:,}{budget}",
                code="context_length_exceeded",
            )
        return max_tokens or min(DEFAULT_MAX_TOKENS, limit - len(prompt))

    # Rows in and out

    def add(self, request: Request) -> None:
        """Queue a row for admission. Raises PromptError if it can never run."""
        self.room(request.prompt, request.max_tokens)
        eos = frozenset[int]() if request.ignore_eos else self.info.eos_token_ids
        watch = StopStrings(self._need_tokenizer("stop"), request.stop) if request.stop else None
        self._waiting.append(
            Row(
                request=request,
                prompt=np.array(request.prompt, dtype=np.int32),
                added=time.perf_counter(),
                stops=eos | request.stop_token_ids,
                watch=watch,
            )
        )

    def cancel(self, uid: int) -> None:
        """Forget a row: it will not be among the completions."""
        for row in (*self._waiting, *self._rows):
            if row is not None and row.request.uid == uid:
                row.cancelled = True
        self._waiting = deque(row for row in self._waiting if not row.cancelled)

    def load(self) -> Load:
        """Rows waiting, and rows decoding."""
        return Load(len(self._waiting), sum(row is not None for row in self._rows))

    def step(self) -> list[Completion]:
        """Admit what fits, run one cycle, and return the rows that ended."""
        over = self._admit()
        if any(row is not None and not row.over for row in self._rows):
            self._flights.append(self._launch())
            while len(self._flights) > self._depth:
                self._land(self._flights.popleft())
        else:
            # Every row has ended: what is still in flight holds only tokens to be dropped.
            self._flights.clear()
        over += self._retire()
        now = time.perf_counter()
        return [self._completion(row, now) for row in over if not row.cancelled]

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode requests, taken as room comes free, and give each completion as it ends.

        Rows that were added before take part. Leaving the loop early forgets all rows. Raises
        PromptError at a request that can never run.
        """
        source = iter(requests)
        more = True
        try:
            while more or any(self.load()):
                while more and len(self._waiting) < self._max_batch:
                    request = next(source, None)
                    more = request is not None
                    if request is not None:
                        self.add(request)
                yield from self.step()
        finally:
            for row in (*self._waiting, *self._rows):
                if row is not None:
                    self.cancel(row.request.uid)

    def close(self) -> None:
        """Forget all rows and give the memory back."""
        self._waiting.clear()
        self._flights.clear()
        self._prefiller.forget()
        self.policy.close()
        self._slots, self._rows = Slots(1, self._target, self._drafter), [None]
        mx.clear_cache()

    # One cycle

    def _launch(self) -> _Flight:
        live = [row for row in self._rows if row is not None and not row.over]
        for row in live:
            row.width = max(row.width, len(live))
        self._slots.lens.bound = max(row.committed for row in live) + sum(
            flight.tokens for flight in self._flights
        )
        context = self._context()
        views = [RowView(row.request.uid, row.left) for row in live]
        k = self.policy.choose(views, len(self._rows), context)
        rule = self._rule(self._slots.sampler)
        verdict, logits = cycle(self._slots, self._target, self._drafter, k, rule)
        shown = show(logits, verdict.chosen) if _asked(live) else None
        mx.async_eval(
            *(*verdict, *(shown or ())),
            *(self._slots.lens.offset, self._slots.anchor, self._slots.remaining),
        )
        return _Flight(list(self._rows), k + 1, context, verdict, shown)

    def _rule(self, sampler: Sampler) -> Rule:
        return self._greedy if sampler.plain else self._sampling

    def _context(self) -> int:
        """Columns a cycle sees, in the arena's steps."""
        lens = self._slots.lens
        return -(-(lens.bound + 1) // lens.step) * lens.step

    def _land(self, flight: _Flight) -> None:
        chosen, keep, accepted, width, drafts = (np.array(a) for a in flight.verdict)
        seconds = self._lap()
        outcomes = []
        for slot, row in enumerate(flight.rows):
            if row is None or row.over:
                continue
            outcomes.append(RowOutcome(row.request.uid, int(width[slot]) - 1, int(accepted[slot])))
            kept = row.take(chosen[slot, : keep[slot]].tolist())
            if flight.shown is not None:
                row.show(flight.shown, slot, kept)
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
        for slot, row in enumerate(self._rows):
            if row is not None and row.over:
                self._rows[slot] = None
                self._slots.place(slot, length=0, anchor=0, remaining=0)
                self._slots.sampler.clear(slot)
        live = sum(row is not None for row in self._rows)
        if not live:
            self._slots, self._rows = Slots(1, self._target, self._drafter), [None]
        elif arena_width(live) < len(self._rows) and not self._free():
            self._resize(arena_width(live))
        return over

    def _completion(self, row: Row, now: float) -> Completion:
        request = row.request
        return Completion(
            uid=request.uid,
            token_ids=tuple(row.tokens),
            text=self._text(row),
            finish_reason=row.reason or "stop",
            prompt_tokens=len(request.prompt),
            prefill_tokens=row.computed,
            cached_tokens=len(request.prompt) - row.computed,
            cycles=row.cycles,
            spec=self.policy.effective(row.cycles, row.plain),
            draft_tokens=row.drafted,
            accepted_tokens=row.accepted,
            batch_width=row.width,
            wait_ms=1e3 * (row.started - row.added),
            prefill_ms=1e3 * (row.first - row.started),
            ttft_ms=1e3 * (row.first - row.added),
            decode_ms=1e3 * (now - row.first),
            seed=request.sampling.seed if request.sampling.random else None,
            logprobs=None if request.logprobs is None else self._logprobs(row),
            emitted_per_cycle=tuple(row.emitted_per_cycle) if request.trace else None,
            drafted_per_cycle=tuple(row.drafted_per_cycle) if request.trace else None,
        )

    def _text(self, row: Row) -> str:
        if self._tokenizer is None:
            return ""
        # Decoded whole at the end: pieces joined can differ at their seams for some tokenizers.
        ids = row.tokens[:-1] if row.tokens[-1] in row.stops else row.tokens
        return cut(self._tokenizer.decode(ids, skip_special_tokens=True), row.request.stop)

    def _logprobs(self, row: Row) -> tuple[TokenLogprob, ...]:
        pieces = Detokenizer(self._tokenizer) if self._tokenizer is not None else None
        offset, logprobs = 0, []
        for token, (own, top) in zip(row.tokens, row.logprobs, strict=True):
            others = tuple(Candidate(other, self._piece(other), log) for other, log in top)
            chosen = Candidate(token, self._piece(token), own)
            logprobs.append(TokenLogprob(chosen, others, offset))
            offset += len(pieces.push(token)) if pieces is not None else 0
        return tuple(logprobs)

    def _piece(self, token: int) -> str:
        """A token as text; by its number where there is no tokenizer."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        piece: str = self._tokenizer.decode([token])
        return piece

    # Admission

    def _admit(self) -> list[Row]:
        """Prefill waiting rows into free slots; return those that ended with their first token."""
        over = []
        while free := self._free():
            self._disturb()
            at_hand = [row.prompt for row in list(self._waiting)[:LOOK_AHEAD]]
            group = [self._waiting.popleft() for _ in range(self._prefiller.group(at_hand, free))]
            started = time.perf_counter()
            staged = self._prefiller.run(at_hand[: len(group)], at_hand[len(group) :])
            first, shown = self._first(group, staged)
            now = time.perf_counter()
            for i, row in enumerate(group):
                row.started, row.first, row.computed = started, now, staged.computed[i]
                row.take([first[i]])
                if shown is not None:
                    row.show(shown, i, 1)
            over += [row for row in group if row.over]
            self._seat([(row, i) for i, row in enumerate(group) if not row.over], staged.slots)
        return over

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
        """How many waiting rows to admit now."""
        live = sum(row is not None for row in self._rows)
        ready = min(self._max_batch - live, len(self._waiting))
        return self.policy.admit_more(live, ready, self._context()) if ready else 0

    def _seat(self, staged: list[tuple[Row, int]], source: Slots) -> None:
        """Copy staged rows into free slots and make them live."""
        need = len(staged) + sum(row is not None for row in self._rows)
        if need > len(self._rows):
            self._resize(min(arena_width(need), self._max_batch))
        empty = [slot for slot, row in enumerate(self._rows) if row is None]
        for slot, (row, i) in zip(empty, staged, strict=False):
            length = len(row.prompt)
            self._slots.arena.load(slot, source.arena.snapshot(i, length))
            self._slots.draft.load(slot, source.draft.snapshot(i, length))
            self._slots.place(slot, length=length, anchor=row.tokens[-1], remaining=row.left)
            self._slots.sampler.place(slot, row.request.sampling, row.request.prompt, row.tokens)
            self._rows[slot] = row

    def _resize(self, width: int) -> None:
        """Give the arena `width` rows: the live ones first, the rest idle."""
        self._disturb()
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        self._slots.select(live + [0] * (width - len(live)))
        self._rows = [self._rows[slot] for slot in live] + [None] * (width - len(live))
        for slot in range(len(live), width):
            self._slots.place(slot, length=0, anchor=0, remaining=0)
            self._slots.sampler.clear(slot)


def _asked(rows: Sequence[Row]) -> bool:
    return any(row.request.logprobs is not None for row in rows)
