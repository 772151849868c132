"""Trains a draft for a target, from the target's own replies to a user's prompts.

`python -m dflash_batch.decoder.training.train` reads an `Order` as one line of JSON from stdin and
writes JSON lines: phases, progress, then the result, or what stopped it. It stops early, with a
checkpoint, on SIGINT or SIGTERM and when stdin ends before it does (whoever asked is gone); the
same order then goes on.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash_batch.decoder import demo, registry
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import TrainingError
from dflash_batch.decoder.loading import CACHE_LIMIT, find, load_decoder, load_dflash, read_config
from dflash_batch.decoder.targets.stack import Stack
from dflash_batch.decoder.training.batches import LENGTHS, Batches, padded
from dflash_batch.decoder.training.card import model_card
from dflash_batch.decoder.training.choices import default_rate, default_taps, free_token
from dflash_batch.decoder.training.draft import (
    Draft,
    DraftConfig,
    initialise,
    load_draft,
    save_draft,
)
from dflash_batch.decoder.training.features import TappedTarget
from dflash_batch.decoder.training.files import save_text
from dflash_batch.decoder.training.fit import FitSettings, Fitting, compiled
from dflash_batch.decoder.training.measure import tokens_per_cycle
from dflash_batch.decoder.training.objective import draft_loss
from dflash_batch.decoder.training.order import Clock, Order
from dflash_batch.decoder.training.replies import Wish, replies
from dflash_batch.decoder.training.service import Say, Wanted, serve
from dflash_batch.decoder.training.texts import Prompt, PromptFile, Text, without_loop
from dflash_batch.decoder.training.work import Work
from dflash_batch.decoder.types import LoadSpec

PASSES = 8
"""Passes over the texts when neither steps nor time are given."""

TEXT_SHARE = 0.4
"""Most of a time budget that goes into the texts."""

HELD_OUT = 64
"""Most texts held out to measure on; at most one in twenty."""

ROOM = 64
"""A prompt leaves at least so much of the longest row to its reply."""

CHECK_S = 30.0
"""τ is measured at each tenth of the run, but not more often than this."""

SHOW_S = 5.0
"""The loss is shown this often."""

AHEAD = 4
"""Steps that may be in flight."""


def train(order: Order, say: Say, wanted: Wanted) -> dict[str, Any]:
    """Go on with a run or begin one. Returns the result, or where it stopped (`"stopped"`).

    Raises LoadError, PromptError and TrainingError.
    """
    clock = Clock(order.time_budget_s)
    # A step takes the same large buffers as the one before: MLX's own limit suits that, not the
    # one that loading sets for serving.
    roomy = mx.set_cache_limit(CACHE_LIMIT)
    spec = LoadSpec(order.target, draft="none", dtype=order.dtype, spec="off")
    decoder = load_decoder(spec, lambda phase, share: say({"phase": phase, "share": share}))
    mx.set_cache_limit(roomy)
    prompts = PromptFile(Path(order.prompts))
    work = Work(Path(order.out), order.fixed(prompts.digest))
    say({"phase": "reading the prompts", "share": None})
    longest = min(LENGTHS[-1] - ROOM, decoder.info.context_length - 2)
    asked, refused = prompts.read(decoder, longest)
    for reason, count in refused.items():
        say({"note": f"{count:,} prompts are left out: {reason}"})
    if len(asked) < 2:
        raise TrainingError("at least two prompts are needed: some are held out to measure on")

    if work.text_seconds is not None:
        clock.add(work.text_seconds)
    else:
        _collect(order, decoder, asked, work, clock, say, wanted)
    if work.text_seconds is None:
        return _stopped(order, "texts", len(work.texts.texts), len(asked) * order.samples)
    return Run(order, decoder, work, prompts.digest, clock).go(say, wanted)


def _collect(
    order: Order,
    decoder: Decoder,
    asked: Sequence[Prompt],
    work: Work,
    clock: Clock,
    say: Say,
    wanted: Wanted,
) -> None:
    """The target's replies, until all are there or their share of the time is used up."""
    target, _ = decoder.pair
    all_of_them, shown = len(asked) * order.samples, 0.0
    until = clock.at(TEXT_SHARE)
    wish = Wish(order.max_tokens, order.width, order.seed, order.samples, until)
    eos = decoder.info.eos_token_ids

    def more() -> bool:
        return wanted() and time.monotonic() < until

    tokens, began = 0, time.monotonic()
    for texts in replies(target, asked, eos, wish, work.texts.done, more):
        work.texts.add(texts)
        tokens += sum(len(text.reply) for text in texts)
        if time.monotonic() - shown > 2.0:
            shown = time.monotonic()
            share = len(work.texts.texts) / all_of_them
            say({"phase": "texts", "share": share, "tokens_per_s": tokens / (shown - began)})
    if not wanted():
        return
    if not work.texts.texts:
        raise TrainingError("no reply ended within its share of the time; give it more")
    if len(work.texts.texts) < all_of_them:
        say({"note": f"{len(work.texts.texts):,} of {all_of_them:,} texts: time is up for them"})
    decoder.close()
    work.text_seconds = clock.seconds


class Run:
    """Training on texts that are all there."""

    def __init__(
        self, order: Order, decoder: Decoder, work: Work, digest: str, clock: Clock
    ) -> None:
        self._order, self._work, self._clock = order, work, clock
        self._target, _ = decoder.pair
        self._digest = digest
        texts = [_uncoiled(text, order.max_tokens) for text in work.texts.texts]
        texts.sort(key=lambda text: (text.sample, text.name))  # not the order they ended in
        names = sorted({text.name for text in texts})
        count = min(HELD_OUT, max(1, len(names) // 20))
        chosen = np.random.default_rng(order.seed).permutation(names)[:count].tolist()
        self._held = [text for text in texts if text.name in set(chosen) and not text.sample]
        used = [text for text in texts if text.name not in set(chosen) and len(text.reply) > 1]
        self._held = [text for text in self._held if len(text.reply) > 1]
        if not used or not self._held:
            raise TrainingError("too few replies are longer than one token to train on")
        self._texts = texts
        self._batches = Batches(used, order.batch_tokens, order.seed)
        self._draft, self.config = self._make(decoder)
        self._frozen = TappedTarget(self._target, self.config.target_layer_ids)
        self._lr = order.lr or default_rate(self.config.hidden_size, order.init is not None)
        plain = order.steps is None and order.time_budget_s is None
        self._steps = order.steps or (PASSES * self._batches.per_epoch if plain else None)
        settings = FitSettings(
            steps=self._steps or 0, peak_rate=self._lr, warm_up=0.03, weight_decay=0.0
        )
        self._rate = settings.rate
        loss = draft_loss(self._draft, self._frozen, self.config)
        self._fitting = Fitting(self._draft, loss, settings, _compute(self._target.dtype))
        self._progress = work.load(self._fitting)
        mx.eval(self._fitting.arrays())
        self._features = compiled(self._frozen.features)
        if self._progress.step:
            clock.add(self._progress.seconds - (work.text_seconds or 0.0))

    def go(self, say: Say, wanted: Wanted) -> dict[str, Any]:
        """Train until steps or time are used up, or nobody wants more."""
        progress, order = self._progress, self._order
        self._introduce(say)
        if order.init and progress.first_tau is None:
            progress.first_tau = self.tau()
            say({"step": progress.step, "tau": progress.first_tau})
        saved = shown = checked = time.monotonic()
        losses: deque[mx.array] = deque()
        recent: list[float] = []
        tenth, at_show = int(10 * self._share()), progress.step
        while (share := self._share()) < 1.0:
            if not wanted():
                break
            batch = self._batches.at(progress.step)
            tokens = mx.array(batch.tokens)
            given = [tokens, *map(mx.array, batch[1:]), self._features(tokens)]
            losses.append(self._fitting.step(self._rate(share), *given))
            progress.step += 1
            while len(losses) > AHEAD or (losses and self._share() >= 1.0):
                recent.append(float(losses.popleft()))
            now = time.monotonic()
            if now - shown > SHOW_S and recent:
                speed = (progress.step - at_show) / (now - shown)
                self._show(say, recent, speed)
                shown, at_show = now, progress.step
            if tenth < int(10 * share) and now - checked > CHECK_S:
                tenth = int(10 * share)
                progress.tau = self.tau()
                say({"step": progress.step, "tau": progress.tau})
                checked = time.monotonic()
            if now - saved > order.checkpoint_s:
                self._keep(say)
                saved = time.monotonic()
        recent += [float(loss) for loss in losses]
        if recent:
            self._show(say, recent, 0.0)
        if share < 1.0:
            self._keep(say)
            return _stopped(order, "training", progress.step, self._steps)
        return self._finish(say)

    def tau(self) -> float:
        """Tokens per cycle on the held-out texts."""
        length = max(min(text.length, LENGTHS[-1]) for text in self._held)
        length = next(size for size in LENGTHS if size >= length)
        rows = padded(self._held, length)
        widest = int(rows.supervised.sum(axis=1).max())
        logits = 2 * widest * self.config.block_size * self.config.vocab_size
        batch = max(1, min(16, (2 << 30) // logits))
        with self._fitting.rounded():
            return tokens_per_cycle(self._draft, self._frozen, self.config, rows, batch)

    def _make(self, decoder: Decoder) -> tuple[Draft, DraftConfig]:
        order, target = self._order, self._target
        if order.init is not None:
            folder = find(str(demo.DRAFT_DIR) if order.init == registry.DEMO else order.init)
            load_dflash(folder, target, None)  # refuses what does not fit the target
            draft, config = load_draft(folder)
            for name, asked, own in (
                ("layers", order.layers, config.num_hidden_layers),
                ("block", order.block, config.block_size),
            ):
                if asked not in (None, own):
                    raise TrainingError(f"{folder} has {name} {own}; it cannot become {asked}")
            return draft, config
        mask = order.mask_token
        if mask is None:
            mask = free_token(decoder.tokenizer, decoder.info, self._texts)
        if not 0 <= mask < target.vocab_size:
            raise TrainingError(f"mask token {mask} is outside the vocabulary")
        name = str(demo.TARGET_DIR) if order.target == registry.DEMO else order.target
        config = DraftConfig.for_target(
            read_config(find(name)),
            layers=order.layers or max(1, min(5, target.layers // 2)),
            taps=default_taps(target.layers),
            mask_token_id=mask,
            block_size=order.block or 16,
        )
        mx.random.seed(order.seed)
        draft = Draft(config)
        assert isinstance(target, Stack), "every family is one"
        initialise(draft, target.norm_scale)
        return draft, config

    def _share(self) -> float:
        """How much of the run is done, by steps or by the clock, whichever is further."""
        by_steps = self._progress.step / self._steps if self._steps else 0.0
        texts = self._work.text_seconds or 0.0
        by_clock = (self._clock.seconds - texts) / max(self._clock.budget - texts, 1.0)
        return max(by_steps, by_clock if math.isfinite(by_clock) else 0.0)

    def _introduce(self, say: Say) -> None:
        tokens = sum(len(text.reply) for text in self._texts)
        shapes = ", ".join(f"{rows}x{length}" for rows, length in self._batches.shapes)
        say(
            {
                "phase": "training",
                "share": self._share(),
                "note": f"{len(self._texts):,} texts, {tokens:,} reply tokens, "
                f"{self._batches.per_epoch:,} steps a pass in shapes {shapes}",
            }
        )

    def _show(self, say: Say, recent: list[float], steps_per_s: float) -> None:
        progress = self._progress
        progress.loss = sum(recent) / len(recent)
        progress.curve.append([progress.step, round(progress.loss, 4)])
        recent.clear()
        say(
            {
                "step": progress.step,
                "steps": self._steps,
                "loss": progress.loss,
                "steps_per_s": round(steps_per_s, 3),
                "share": min(1.0, self._share()),
                "seconds": round(self._clock.seconds, 1),
            }
        )

    def _keep(self, say: Say) -> None:
        self._progress.seconds = self._clock.seconds
        self._work.save(self._fitting, self._progress)
        say({"checkpoint": self._progress.step})

    def _finish(self, say: Say) -> dict[str, Any]:
        say({"phase": "measuring", "share": None})
        progress, out = self._progress, Path(self._order.out)
        progress.tau = self.tau()
        self._keep(say)
        config = self.config
        facts = {
            "out": str(out),
            "target": self._order.target,
            "init": self._order.init,
            "tau": progress.tau,
            "first_tau": progress.first_tau,
            "held_out": len(self._held),
            "texts": len(self._texts),
            "reply_tokens": sum(len(text.reply) for text in self._texts),
            "steps": progress.step,
            "batch_tokens": self._order.batch_tokens,
            "loss": progress.loss if progress.loss is not None else math.nan,
            "lr": self._lr,
            "seed": self._order.seed,
            "layers": config.num_hidden_layers,
            "block": config.block_size,
            "taps": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "parameters": sum(w.size for _, w in _flat(self._draft)),
            "text_seconds": self._work.text_seconds,
            "seconds": self._clock.seconds,
            "machine": _device(),
            "prompts_sha256": self._digest,
            "texts_sha256": hashlib.sha256(self._work.texts.path.read_bytes()).hexdigest(),
        }
        save_draft(self._draft, config, out)
        save_text(model_card(facts), out / "README.md")
        return {"result": facts}


def _uncoiled(text: Text, limit: int) -> Text:
    """A text whose reply ran into its limit loses what it repeats: that teaches nothing more."""
    if len(text.reply) < limit:
        return text
    return text._replace(reply=without_loop(text.reply))


def _flat(draft: Draft) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = tree_flatten(draft.parameters())  # type: ignore[assignment]
    return found


def _device() -> str:
    """The chip, without the machine's name: cards are published."""
    info = mx.device_info(mx.default_device())
    return str(info.get("device_name") or info.get("architecture") or mx.default_device())


def _compute(dtype: mx.Dtype) -> mx.Dtype:
    """float16 gradients would underflow."""
    return mx.float32 if dtype == mx.float32 else mx.bfloat16


def _stopped(order: Order, phase: str, done: int, wanted: int | None) -> dict[str, Any]:
    return {"stopped": {"phase": phase, "done": done, "of": wanted, "out": order.out}}


if __name__ == "__main__":
    raise SystemExit(serve(Order, train))
