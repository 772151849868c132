"""What can go wrong in the decoder.

DecoderError
├── LoadError        a model, draft or tokenizer cannot be used
├── TrainingError    a draft cannot be trained with these settings, in this folder
└── PromptError      one row's prompt cannot be used; the others run
"""

from __future__ import annotations

import re


class DecoderError(Exception):
    """Base of all errors of this room. `code` is one of the contract's error codes."""

    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param


OUT_OF_MEMORY = "out_of_memory"
"""Code of what ended for want of memory; fewer rows at once may do."""

_NO_MEMORY = re.compile(
    r"out of memory|outofmemory|insufficient memory|unable to allocate|"
    r"attempting to allocate|cudaMalloc",
    re.IGNORECASE,
)


def code_of(error: Exception) -> str:
    """The contract's code for any error of the decoder. mlx tells want of memory by words only."""
    if isinstance(error, DecoderError):
        return error.code
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return OUT_OF_MEMORY
    return DecoderError.code


class LoadError(DecoderError):
    """Raised when a target, draft or tokenizer is missing, unknown, or does not match."""

    code = "model_not_found"


class PromptError(DecoderError):
    """Raised when one row's prompt cannot be tokenised or does not fit the context."""

    code = "invalid_value"


class TrainingError(DecoderError):
    """Raised when settings do not fit the texts, or the folder holds something else."""

    code = "training_unusable"
