"""The decoder: tokens in, tokens out. The only room that imports mlx; it knows no queue.

    from dflash_batch.decoder import LoadSpec, Request, load_decoder

    decoder = load_decoder(LoadSpec("Qwen/Qwen3-4B", max_batch=8))
    prompts = [decoder.encode_chat([{"role": "user", "content": text}]) for text in texts]
    requests = [Request(uid, tuple(ids), max_tokens=64) for uid, ids in enumerate(prompts)]
    for completion in decoder.run(requests):  # as they finish
        print(completion.uid, completion.text)

Importing this package is light: mlx is loaded with the first of these names that needs it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# MLX's CUDA backend ends the process when it has met twice as many different graphs as it keeps,
# 400 by default, and batches of many widths, blocks and lengths go through more. It reads these
# when it is loaded, which is after us.
for _kept in ("MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_CUDA_SDPA_CACHE_SIZE"):
    os.environ.setdefault(_kept, "8192")

if TYPE_CHECKING:
    from dflash_batch.decoder.engine import Decoder
    from dflash_batch.decoder.errors import DecoderError, LoadError, PromptError
    from dflash_batch.decoder.loading import load_decoder
    from dflash_batch.decoder.types import (
        Completion,
        LoadSpec,
        ModelInfo,
        Request,
        Sampling,
        Thinking,
    )

__all__ = [
    "Completion",
    "Decoder",
    "DecoderError",
    "LoadError",
    "LoadSpec",
    "ModelInfo",
    "PromptError",
    "Request",
    "Sampling",
    "Thinking",
    "load_decoder",
]

_MODULES = {"Decoder": "engine", "load_decoder": "loading"}
_MODULES |= dict.fromkeys(["DecoderError", "LoadError", "PromptError"], "errors")
_MODULES |= dict.fromkeys(
    ["Completion", "LoadSpec", "ModelInfo", "Request", "Sampling", "Thinking"], "types"
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
