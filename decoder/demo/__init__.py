"""The bundled demo pair: a tiny Qwen3 target and its DFlash draft, and the problems they solve.

Importing this package imports no MLX. The problems are in ``problems``; how the pair was made is in
``MODEL_CARD.md`` and in ``dflash_batch.decoder.training``.
"""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"

__all__ = ["DRAFT_DIR", "TARGET_DIR"]
