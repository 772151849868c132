"""Do a target and a draft fit? Checked on what they compute, with a verdict to read.

A wrong pair gives the right text, only slowly: nothing else would tell. `check_pair` has the target
write a greedy text, drafts it, and counts; and it does so again with the taps one layer off to
either side, for checkpoints that count layers from the embedding.

`python -m dflash_batch.decoder.pairing` reads the arguments of a `LoadSpec` as JSON from stdin and
writes JSON lines: `{"phase", "share"}` as it loads, then the report, or `{"error", "code"}`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np

from dflash_batch.decoder.acceptance import Greedy
from dflash_batch.decoder.composite import CompositeDrafter
from dflash_batch.decoder.cycle import Slots, cycle, prefill
from dflash_batch.decoder.draft_model import DFlashDrafter
from dflash_batch.decoder.drafters import Drafter, NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.guard import Guarded
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.types import LoadSpec

TOKENS = 64
"""Tokens of text that are drafted."""

PROMPT = "Write the numbers from one to thirty in words, separated by commas."

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class PairCheck:
    """One thing looked at."""

    name: str
    level: Level
    text: str


@dataclass(frozen=True)
class PairReport:
    """What was found. `acceptance` is the share of drafts that stood, `tau` the tokens a cycle."""

    checks: tuple[PairCheck, ...]
    acceptance: float
    tau: float
    tokens: int

    @property
    def level(self) -> Level:
        """The worst of all checks."""
        levels = [check.level for check in self.checks]
        return next((level for level in _WORST_FIRST if level in levels), "ok")

    @property
    def verdict(self) -> str:
        """In a sentence."""
        return {
            "ok": f"the pair fits: {self.tau:.1f} tokens per cycle",
            "warning": "the pair works, but look at the warnings",
            "failed": "the pair does not fit: decode without this draft",
        }[self.level]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "level": self.level, "verdict": self.verdict}


_WORST_FIRST: tuple[Level, ...] = ("failed", "warning")


class _Trial(NamedTuple):
    """A text decoded by one drafter."""

    text: list[int]
    drafted: int
    accepted: int
    cycles: int

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)


def check_pair(
    target: Target, drafter: Drafter, prompt: Sequence[int], tokens: int = TOKENS
) -> PairReport:
    """Check a pair on `tokens` tokens of the target's own greedy text after `prompt`.

    Of a composite drafter its model is checked. Raises ValueError where there is no DFlash draft,
    and when the prompt or the number of tokens is of no use.
    """
    if isinstance(drafter, CompositeDrafter):
        drafter = drafter.model
    if not isinstance(drafter, DFlashDrafter):
        raise ValueError("there is no draft model to check")
    if not prompt or tokens < 2:
        raise ValueError("a prompt and at least two tokens are needed")
    plain = _decode(target, NoDrafter(), prompt, tokens)
    drafted = _decode(target, drafter, prompt, tokens)
    checks = (
        _taps(target, drafter, prompt),
        _mask(target, drafter, [*prompt, *plain.text]),
        _positions(target, drafter),
        _finite(target, drafter, prompt, plain.text[0]),
        _same_text(plain, drafted),
        _acceptance(target, drafter, prompt, tokens, drafted),
    )
    tau = (len(drafted.text) - 1) / max(1, drafted.cycles)
    return PairReport(checks, drafted.acceptance, tau, len(drafted.text))


def _decode(target: Target, drafter: Drafter, prompt: Sequence[int], tokens: int) -> _Trial:
    """`tokens` greedy tokens after a prompt, by whole blocks."""
    slots, first = _prefilled(target, drafter, prompt)
    text = [first]
    slots.place(0, len(prompt), first, tokens - 1)
    drafts = accepted = cycles = 0
    while len(text) < tokens:
        slots.lens.bound = len(prompt) + len(text)
        verdict, _ = cycle(slots, target, drafter, drafter.spec.max_k, Greedy())
        counts = (verdict.emitted, verdict.accepted, verdict.width)
        keep, stood, width = (int(np.array(a)[0]) for a in counts)
        text += np.array(verdict.chosen)[0, :keep].tolist()
        drafts, accepted, cycles = drafts + width - 1, accepted + stood, cycles + 1
    return _Trial(text, drafts, accepted, cycles)


def _prefilled(target: Target, drafter: Drafter, prompt: Sequence[int]) -> tuple[Slots, int]:
    """A row behind a prompt, and the first token after it."""
    slots = Slots(1, target, drafter)
    ids = mx.array([list(prompt)], dtype=mx.int32)
    logits = prefill(slots, target, drafter, ids, mx.array([len(prompt)], dtype=mx.int32))
    slots.lens.bound = len(prompt)
    return slots, int(np.array(mx.argmax(logits[0])))


def _taps(target: Target, drafter: DFlashDrafter, prompt: Sequence[int]) -> PairCheck:
    """Each tap is the output of its layer, whichever others are asked for with it."""
    taps, name = drafter.spec.taps, "taps"
    outside = [tap for tap in taps if not 0 <= tap < target.layers]
    if outside:
        return PairCheck(name, "failed", f"{outside} are not layers of the target")

    def features(layers: tuple[int, ...]) -> mx.array:
        slots = Slots(1, target, NoDrafter())
        slots.lens.open(len(prompt))
        seen = target.forward(mx.array([list(prompt)], dtype=mx.int32), slots.arena, layers)
        assert seen.features is not None
        return seen.features

    together = features(taps)
    alone = mx.concatenate([features((tap,)) for tap in taps], axis=-1)
    if not bool(mx.isfinite(together).all()):
        return PairCheck(name, "failed", "the target's features are not finite")
    if not bool(mx.array_equal(together, alone)):
        return PairCheck(name, "failed", "the target's features depend on which are asked for")
    shown = ", ".join(map(str, taps))
    return PairCheck(name, "ok", f"after layers {shown} of {target.layers}")


def _mask(target: Target, drafter: DFlashDrafter, text: Sequence[int]) -> PairCheck:
    mask, name = drafter.config.mask_token_id, "mask"
    if not 0 <= mask < target.vocab_size:
        return PairCheck(name, "failed", f"token {mask} is outside the target's vocabulary")
    if not bool(mx.isfinite(target.embed(mx.array([[mask]]))).all()):
        return PairCheck(name, "failed", f"the target has no finite embedding for token {mask}")
    if mask in text:
        return PairCheck(name, "warning", f"token {mask} masks drafts, yet it stands in the text")
    return PairCheck(name, "ok", f"token {mask} of {target.vocab_size:,}")


def _positions(target: Target, drafter: DFlashDrafter) -> PairCheck:
    config, name = drafter.config, "positions"
    kind = (config.rope_scaling or {}).get("rope_type", "default")
    said = f"rope base {config.rope_theta:g}, {kind}"
    known = config.max_position_embeddings
    if known and known < target.context_length and not any(config.windows):
        text = f"{said}; trained for {known:,} positions, the target has {target.context_length:,}"
        return PairCheck(name, "warning", text)
    return PairCheck(name, "ok", said)


def _finite(target: Target, drafter: DFlashDrafter, prompt: Sequence[int], first: int) -> PairCheck:
    slots, _ = _prefilled(target, drafter, prompt)
    k, anchor = drafter.spec.max_k, mx.array([first], dtype=mx.int32)
    drafted = drafter.draft(slots.draft, anchor, mx.array([k + 1], dtype=mx.int32), k)  # type: ignore[arg-type]
    if not bool(mx.isfinite(drafted.logits).all()):
        cure = "" if target.dtype == mx.float32 else "; try --dtype float32"
        return PairCheck("logits", "failed", f"the draft's logits are not finite{cure}")
    return PairCheck("logits", "ok", f"finite in {str(target.dtype).removeprefix('mlx.core.')}")


def _same_text(plain: _Trial, drafted: _Trial) -> PairCheck:
    if plain.text == drafted.text:
        return PairCheck("text", "ok", f"{len(plain.text)} tokens as without the draft")
    pairs = zip(plain.text, drafted.text, strict=True)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    # Two widths add up in another order: at a near-tie either token is the greedy one.
    return PairCheck("text", "warning", f"other than without the draft from token {at + 1} on")


def _acceptance(
    target: Target, drafter: DFlashDrafter, prompt: Sequence[int], tokens: int, own: _Trial
) -> PairCheck:
    """The share of drafts that stood, and whether it would be another with the taps shifted."""
    name = "acceptance"
    said = f"{own.acceptance:.0%} of {own.drafted} drafts stood"
    for by, where in ((-1, "earlier"), (1, "later")):
        taps = tuple(tap + by for tap in drafter.spec.taps)
        if min(taps) < 0 or max(taps) >= target.layers:
            continue
        shifted = copy.copy(drafter)
        shifted.spec = replace(drafter.spec, taps=taps)
        trial = _decode(target, shifted, prompt, tokens)
        if trial.acceptance > 1.5 * own.acceptance + 0.05:
            text = (
                f"{said}, {trial.acceptance:.0%} with taps one layer {where}: are they counted so?"
            )
            return PairCheck(name, "warning", text)
    if own.acceptance < Guarded.LEAST:
        return PairCheck(name, "warning", f"{said}: this draft hardly knows this target")
    return PairCheck(name, "ok", said)


def prompt_for(decoder: Decoder) -> list[int]:
    """A prompt as long as the model takes text; some token ids where it has no tokenizer."""
    if decoder.info.has_chat_template:
        return decoder.encode_chat([{"role": "user", "content": PROMPT}])
    if decoder.info.has_tokenizer:
        return decoder.encode_text(PROMPT)
    return [1 + i % (decoder.info.vocab_size - 1) for i in range(16)]


def report(spec: LoadSpec) -> Iterator[dict[str, Any]]:
    """Load a pair and check it: lines for `main`. Raises LoadError."""
    phases: list[dict[str, Any]] = []
    decoder = load_decoder(spec, lambda phase, share: phases.append({"phase": phase}))
    yield from phases
    info = decoder.info
    if info.draft_notice or not isinstance(_model(decoder), DFlashDrafter):
        raise LoadError(info.draft_notice or "no draft was named")
    found = check_pair(*decoder.pair, prompt_for(decoder))
    yield {"target": info.target, "draft": info.draft, "dtype": info.dtype, **found.as_dict()}


def _model(decoder: Decoder) -> Drafter:
    _, drafter = decoder.pair
    return drafter.model if isinstance(drafter, CompositeDrafter) else drafter


def main() -> int:
    """See the top of this file."""
    try:
        for line in report(LoadSpec(**json.load(sys.stdin))):
            print(json.dumps(line), flush=True)
    except LoadError as error:
        print(json.dumps({"error": str(error), "code": error.code}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
