"""What a new draft is like when nobody says: taps, learning rate, mask token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash_batch.decoder import draft_config
from dflash_batch.decoder.errors import TrainingError
from dflash_batch.decoder.training.texts import Text
from dflash_batch.decoder.types import ModelInfo

TAPS = 5
MASKS = ("<|mask|>", "<mask>", "[MASK]", "<|MASK|>")


def default_taps(layers: int) -> tuple[int, ...]:
    """Five taps spread over the target as in public drafts; of a tiny one, its middle layers."""
    if layers >= 2 * TAPS:
        return draft_config.default_taps(TAPS, layers)
    return tuple(range(max(0, layers - 1 - TAPS + 2), layers - 1)) or (0,)


def default_rate(hidden: int, trained: bool) -> float:
    """Peak learning rate: 6e-4 in DFlash (arXiv 2602.06036, App. A.1), more for small drafts,
    a third of that for a draft that has been trained before."""
    rate = 1.5e-3 if hidden <= 1024 else 6e-4
    return rate / 3 if trained else rate


def free_token(tokenizer: Any, info: ModelInfo, texts: Iterable[Text]) -> int:
    """A token that no text needs: the tokenizer's mask, else an id behind its last one, else a
    special token, else the last id, that no text has. Raises TrainingError if all are in use."""
    used = set(info.eos_token_ids)
    for text in texts:
        used.update(text.prompt, text.reply)
    free = [i for i in range(info.vocab_size - 1, -1, -1) if i not in used]
    if not free:
        raise TrainingError("every token occurs in the texts; name one with --mask-token")
    if tokenizer is None:
        return free[0]
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    named = [vocabulary[name] for name in MASKS if name in vocabulary]
    behind = max(vocabulary.values()) + 1
    special = sorted(set(tokenizer.all_special_ids), reverse=True)
    added = sorted(tokenizer.get_added_vocab().values(), reverse=True)
    order = [*named, *([behind] if behind < info.vocab_size else []), *special, *added]
    return next((i for i in order if i not in used), free[0])
