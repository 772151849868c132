"""Logs: one line per event, `event key=value …`, to stderr. No prompt and no secret is logged."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("dflash_batch")


def say(event: str, /, level: int = logging.INFO, **facts: object) -> None:
    """Log one event. Floats are shortened, text with blanks is quoted, None is left out."""
    words = [event, *(f"{key}={_word(value)}" for key, value in facts.items() if value is not None)]
    _logger.log(level, "%s", " ".join(words))


def warn(event: str, /, **facts: object) -> None:
    """`say` for what a person should look at."""
    say(event, logging.WARNING, **facts)


def set_up(level: str = "INFO") -> None:
    """Send our events, and warnings of libraries, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _logger.setLevel(level.upper())
    # RQ gives its loggers a level of their own; its talk of each job is not ours
    logging.getLogger("rq.worker").setLevel(logging.WARNING)


def _word(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value).replace("\n", " | ")
    return f'"{text}"' if " " in text else text
