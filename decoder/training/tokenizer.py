"""A small byte-level BPE tokenizer with a ChatML template, made from a list of texts.

Digits are never merged: every digit is one token, which makes small arithmetic learnable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
MASK = "<|mask|>"
SPECIALS = (END_OF_TEXT, START, END, MASK)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE tokenizer of at most ``vocab_size`` tokens; ids 0..3 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START, MASK],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that is there."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"no token {token}"
    return found


def chat_text(role: str, content: str) -> str:
    """One message as the template writes it."""
    return f"{START}{role}\n{content}{END}\n"
