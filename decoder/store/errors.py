"""What can go wrong with the SSD tier. None of it reaches a row: the tier counts it and goes on.

StoreError
├── StoreUnusable    the folder or its index cannot be used
└── BadBlob          one file is not what the index says
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of the errors of this package."""


class StoreUnusable(StoreError):
    """Raised when the folder is not ours, or its index cannot be opened."""


class BadBlob(StoreError):
    """Raised when a file is damaged, cut short, missing, or of another entry. Says which."""
