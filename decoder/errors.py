"""What can go wrong in the decoder.

DecoderError
├── LoadError        a model, draft or tokenizer cannot be used
├── TrainingError    a draft cannot be trained with these settings, in this folder
└── PromptError      one row's prompt cannot be used; the others run
"""

from __future__ import annotations


class DecoderError(Exception):
    """Base of all errors of this room. `code` is one of the contract's error codes."""

    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.param = param


class LoadError(DecoderError):
    """Raised when a target, draft or tokenizer is missing, unknown, or does not match."""

    code = "model_not_found"


class PromptError(DecoderError):
    """Raised when one row's prompt cannot be tokenised or does not fit the context."""

    code = "invalid_value"


class TrainingError(DecoderError):
    """Raised when settings do not fit the texts, or the folder holds something else."""

    code = "training_unusable"
