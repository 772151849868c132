"""Which ids a file has used, and on what line: a table that stays small for a million of them."""

from __future__ import annotations

from array import array

_SMALLEST = 1 << 10


class Seen:
    """Ids -> the line of their first use, by 64-bit hashes in open addressing.

    Of a million ids two look equal by chance once in thirty million files; a dict of them would
    take ten times the memory.

        slot     0     1     2     3     …      hash & mask, else the next that is free
        hash  |  -  | h(a)|  -  | h(b)| …
        line  |  0  |  17 |  0  |  4  | …       0: free
    """

    def __init__(self) -> None:
        self._count = 0
        self._make(_SMALLEST)

    def first_use(self, name: str, line: int) -> int:
        """The line (1-based) on which `name` was used first; `line` if it is new."""
        code = hash(name) & 0xFFFF_FFFF_FFFF_FFFF
        slot = self._slot(code)
        if not self._lines[slot]:
            self._hashes[slot] = code
            self._lines[slot] = line
            self._count += 1
            if 2 * self._count > len(self._lines):
                self._grow()
            return line
        return self._lines[slot]

    def _slot(self, code: int) -> int:
        mask, hashes, lines = self._mask, self._hashes, self._lines
        slot = code & mask
        while lines[slot] and hashes[slot] != code:
            slot = (slot + 1) & mask
        return slot

    def _make(self, size: int) -> None:
        self._mask = size - 1
        self._hashes = array("Q", bytes(8 * size))
        self._lines = array("I", bytes(4 * size))

    def _grow(self) -> None:
        hashes, lines = self._hashes, self._lines
        self._make(2 * len(lines))
        for code, line in zip(hashes, lines, strict=True):
            if line:
                slot = self._slot(code)
                self._hashes[slot] = code
                self._lines[slot] = line
