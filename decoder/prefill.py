"""Prefill: prompts in, staged rows and logits out, each edge of their trie computed once.

Before a group runs, the branch points on its way are run by themselves and held (`tiers`), where
that saves tokens at all; the prompts then go on behind them, together. A prompt with several
copies runs once, and its row is copied.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.arena import column_step
from dflash_batch.decoder.cycle import Slots, prefill
from dflash_batch.decoder.drafters import Drafter
from dflash_batch.decoder.prefix import Held, Origin, Start, Tokens, saving
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.tiers import Tiers, memory
from dflash_batch.decoder.trie import Leaf, Trie

T = TypeVar("T")

MOST_ROWS = 8
"""Most prompts of one prefill forward."""

CHUNK = 512
"""Most tokens per row of one prefill forward."""

LEAST = 64
"""Fewest tokens of a row that are worth a forward of their own, while others wait."""

LONG = 256
"""Tokens from which on a row fills a forward by itself."""

WORTH = 16
"""Fewest tokens, over all prompts, for which a branch point is held: below, a forward costs more.

Also what a prompt must share with another to be counted as of one subtree.
"""


class Staged(NamedTuple):
    """Prompts that have been run: row i of `slots` is prompt i, not live yet."""

    slots: Slots
    logits: mx.array  # [n, V]: the target's, after each prompt
    origins: list[Origin]  # a newly held prefix is counted on the first


class Copies(NamedTuple):
    """A prompt that runs, for so many rows, and whether more of them are still to come."""

    tokens: Tokens
    rows: int
    more: bool


class Prefiller:
    """Groups waiting prompts behind the prefixes they share, and runs them."""

    def __init__(self, target: Target, drafter: Drafter, tiers: Tiers | None = None) -> None:
        self._target = target
        self._drafter = drafter
        self.tiers = tiers or Tiers(target.cuttable)
        self.rate: float | None = None  # prompt tokens a second, lately
        self.most_tokens: int | None = None  # of one forward, all rows together, if it is limited

    def group(self, trie: Trie[T], after: Tokens | None, most: int) -> list[tuple[Leaf[T], int]]:
        """Which waiting prompts to run together, and how many rows of each; at most `most` rows.

        All that the prefixes held for the first serve about as well as any would.
        """
        group: list[tuple[Leaf[T], int]] = []
        planned: list[Tokens] = []
        for leaf in trie.order(after, WORTH):
            self.tiers.fetch(leaf.tokens)
            depths = self.depths(leaf.tokens, trie, planned)
            if not group:
                planned = [leaf.tokens[:depth] for depth in depths]
            elif depths or (trie.newest(leaf) and self._alone(leaf.tokens)):
                break
            count = min(len(leaf.items), most)
            group.append((leaf, count))
            most -= count
            if not most or len(group) == MOST_ROWS:
                break
        return group

    def _alone(self, prompt: Tokens) -> bool:
        """Whether a prompt is better run later: the next to come may share what would be run now.

        Prompts come in sorted, so the newest is where siblings are to be expected. One so long
        gains nothing from company.
        """
        return len(prompt) - self.tiers.start(prompt).length >= LONG

    def rides(self, leaf: Leaf[T], trie: Trie[T], most: int) -> Start | None:
        """Where a prompt starts, if no more than `most` tokens are left of it from there.

        None also if it has copies, or if others share so much more of it that this should be held
        first.
        """
        start = self.tiers.start(leaf.tokens)
        left = len(leaf.tokens) - start.length
        if not start.length or not 0 < left <= most or len(leaf.items) > 1:
            return None
        return None if self.depths(leaf.tokens, trie) else start

    def depths(self, prompt: Tokens, trie: Trie[T], planned: Sequence[Tokens] = ()) -> list[int]:
        """Where to hold what comes before, on the way to a waiting prompt; shallowest first.

        A branch point saves its edge for each other prompt behind it:

            held ──── edge ──── branch ─┬─ prompt
                                        └─ …            saved: edge · (leaves - 1)

        What can be cut holds all points on its way, so there the deepest is enough.
        """
        cuttable = self._target.cuttable
        at = self.tiers.start(prompt).length
        at = max([at, *(saving(prompt, prefix, cuttable) for prefix in planned)])
        found: list[int] = []
        for depth, leaves in trie.branches(prompt):
            if at < depth <= self.tiers.longest and (leaves - 1) * (depth - at) >= WORTH:
                found.append(depth)
                at = depth
        return found[-1:] if cuttable else found

    def run(self, group: Sequence[Copies], depths: Sequence[int]) -> Generator[None, None, Staged]:
        """Prefill a group; yields between two chunks.

        `depths` are what is to be held of the first prompt, as `depths` says.
        """
        prompts = [copies.tokens for copies in group]
        before, cost = self.tiers.start(prompts[0]), 0
        for depth in depths:
            cost += yield from self._hold(prompts[0][:depth])
            yield
        starts = [self.tiers.start(prompt) for prompt in prompts]
        self.tiers.use(starts)
        slots = Slots(len(prompts), self._target, self._drafter)
        logits = yield from self._forward(slots, starts, prompts)
        for row, copies in enumerate(group):
            # A prompt that had copies may have more of them, not here yet.
            again = copies.more or copies.rows > 1
            if again and starts[row].length < len(copies.tokens):
                self._keep(slots, row, copies.tokens, starts[row].ssd, logits[row])
        origins = self._origins(
            group, [before, *starts[1:]], cost + len(prompts[0]) - starts[0].length
        )
        if any(copies.rows > 1 for copies in group):
            rows = [row for row, copies in enumerate(group) for _ in range(copies.rows)]
            slots.select(rows)
            logits = logits[mx.array(rows)]
        return Staged(slots, logits, origins)

    def close(self) -> None:
        """Give the held prefixes back."""
        self.tiers.close()

    def origin(self, prompt: Tokens, start: Start) -> Origin:
        """Where the tokens of a prompt come from that is taken up at `start`."""
        made = 0.0 if start.held is None else start.held.made
        miss = self.tiers.why_not(prompt, start)
        left = len(prompt) - start.length
        return Origin(left, start.length - start.ssd, start.ssd, made, miss)

    def _origins(
        self, group: Sequence[Copies], starts: Sequence[Start], first: int
    ) -> list[Origin]:
        """Of each row. The first computed what is held for all; copies computed nothing."""
        origins: list[Origin] = []
        for copies, start in zip(group, starts, strict=True):
            origin = self.origin(copies.tokens, start)
            if not origins:
                origin = origin._replace(computed=first)
            origins += [origin, *[origin._replace(computed=0)] * (copies.rows - 1)]
        return origins

    def _hold(self, prefix: Tokens) -> Generator[None, None, int]:
        """Run a prefix by itself and hold it; return how many tokens that were."""
        start = self.tiers.start(prefix)
        self.tiers.use([start])
        slots = Slots(1, self._target, self._drafter)
        logits = yield from self._forward(slots, [start], [prefix])
        if bool(mx.isfinite(logits).all()):  # what is not sound is nobody's but the row's own
            self._keep(slots, 0, prefix, start.ssd)
        return len(prefix) - start.length

    def _keep(
        self, slots: Slots, row: int, tokens: Tokens, ssd: int, logits: mx.array | None = None
    ) -> None:
        target = slots.arena.snapshot(row, len(tokens))
        draft = slots.draft.snapshot(row, len(tokens))
        mx.eval(target.arrays(), *([] if logits is None else [logits]))
        size = memory(target) + memory(draft)
        self.tiers.add(Held(tokens, target, draft, size, ssd, logits))

    def _forward(
        self, slots: Slots, starts: Sequence[Start], prompts: Sequence[Tokens]
    ) -> Generator[None, None, mx.array]:
        """Run the rest of each prompt behind its start, in ragged chunks; return the logits.

        Yields between two chunks.

        row 0   [held ········][rest ·····]
        row 1   [held ····][rest ·········|···]
                                 one chunk
        """
        bases = [start.length for start in starts]
        rests = [prompt[base:] for prompt, base in zip(prompts, bases, strict=True)]
        for row, start in enumerate(starts):
            start.load(slots, row)
        slots.lens.offset = mx.array(bases, dtype=mx.int32)
        logits = self._known(starts, rests)
        longest, done = max(map(len, rests)), 0
        while done < longest:
            chunk = min(self.chunk(len(rests)), longest - done)
            width = _padded(chunk)
            tokens = np.zeros((len(rests), width), dtype=np.int32)
            count = np.zeros(len(rests), dtype=np.int32)
            for row, rest in enumerate(rests):
                piece = rest[done : done + chunk]
                tokens[row, : len(piece)] = piece
                count[row] = len(piece)
            slots.lens.bound = max(
                base + min(done, len(rest)) for base, rest in zip(bases, rests, strict=True)
            )
            after = prefill(slots, self._target, self._drafter, mx.array(tokens), mx.array(count))
            ran = mx.array(count > 0)[:, None]
            logits = after if logits is None else mx.where(ran, after, logits)
            before = time.perf_counter()
            mx.eval(logits, slots.lens.offset, *slots.arena.arrays())
            self._ran(int(count.sum()), time.perf_counter() - before)
            done += chunk
            if done < longest:
                yield
        assert logits is not None
        return logits

    def _ran(self, tokens: int, seconds: float) -> None:
        """Note how long a chunk took."""
        rate = tokens / seconds
        self.rate = rate if self.rate is None else 0.7 * self.rate + 0.3 * rate
        self.tiers.computed(tokens, seconds)

    def _known(self, starts: Sequence[Start], rests: Sequence[Tokens]) -> mx.array | None:
        """Logits [n, V] where some prompt has nothing left to run: those held with it."""
        whole = [
            start.held.logits if start.held is not None and not len(rest) else None
            for start, rest in zip(starts, rests, strict=True)
        ]
        like = next((logits for logits in whole if logits is not None), None)
        if like is None:
            return None
        return mx.stack([mx.zeros_like(like) if logits is None else logits for logits in whole])

    def chunk(self, rows: int) -> int:
        """Most tokens per row of the next forward."""
        if self.most_tokens is None:
            return CHUNK
        return min(CHUNK, max(LEAST, self.most_tokens // rows // LEAST * LEAST))


def _padded(width: int) -> int:
    """A few chunk shapes on a GPU; exact ones on the CPU, where padding is computed."""
    if column_step() < 256:
        return width
    return -(-width // 64) * 64 if width > 64 else max(16, 1 << (width - 1).bit_length())
