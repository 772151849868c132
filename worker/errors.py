"""The base of what a command tells its user to put right; each part defines its own below it."""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """Raised when something outside the program stops it. The text says what, and what to do."""

    code: ClassVar[str] = "error"
