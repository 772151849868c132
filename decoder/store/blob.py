"""One blob: a safetensors file that proves what it holds.

Layout (https://github.com/huggingface/safetensors, format): 8 bytes little-endian header length,
JSON header, payload. What was promised is checked from the outside in:

    index entry ── digest ──► header ── payload digest ──► payload
                              │
                              └ names, dtypes, shapes, offsets, and facts as strings

so that a flipped bit, a zeroed tail or another entry's file is found, which no reader of
safetensors looks for. The payload's digest is the SHA-256 of the SHA-256 of its pieces, since
pieces can be hashed by several threads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from dflash_batch.decoder.store.errors import BadBlob

PIECE = 4 << 20
"""Bytes hashed at a time."""

THREADS = 4
"""Threads that hash; hashlib lets go of the interpreter."""

MOST_HEADER = 64 << 20

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "U8": 1, "BOOL": 1}
"""Bytes of an element, by safetensors' name of the dtype."""

Bytes = npt.NDArray[np.uint8]


class Tensor(NamedTuple):
    """An array as bytes."""

    dtype: str  # a key of SIZES
    shape: tuple[int, ...]
    data: Bytes  # flat


class Head(NamedTuple):
    """What a blob's header says."""

    facts: dict[str, str]
    places: dict[str, tuple[str, tuple[int, ...], int, int]]  # dtype, shape, begin, end
    payload: int  # bytes
    size: int  # bytes of header, its length included
    checksum: str  # of the payload


class Packed(NamedTuple):
    """A blob ready to be written."""

    head: bytes
    parts: list[Bytes]
    digest: str  # SHA-256 of `head`

    @property
    def size(self) -> int:
        return len(self.head) + sum(len(part) for part in self.parts)


def pack(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> Packed:
    """Lay out tensors, in their order, behind a header that holds `facts` and a checksum."""
    parts = [tensor.data for tensor in tensors.values()]
    header: dict[str, Any] = {"__metadata__": {**facts, "checksum": checksum(parts)}}
    begin = 0
    for name, (dtype, shape, data) in tensors.items():
        assert len(data) == SIZES[dtype] * math.prod(shape)
        end = begin + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Packed(head, parts, hashlib.sha256(head).hexdigest())


def write(packed: Packed, file: BinaryIO) -> None:
    """Write a blob to an unbuffered file. Raises OSError."""
    for part in (np.frombuffer(packed.head, dtype=np.uint8), *packed.parts):
        for piece in _pieces(part):
            left = piece.data
            while left:
                left = left[file.write(left) :]


def read_head(file: BinaryIO, digest: str) -> Head:
    """The header at the start of `file`, if it is the one with this digest. Raises BadBlob."""
    size = file.read(8)
    length = int.from_bytes(size, "little")
    if len(size) < 8 or not 2 <= length <= MOST_HEADER:
        raise BadBlob("it has no header")
    text = file.read(length)
    if hashlib.sha256(size + text).hexdigest() != digest:
        raise BadBlob("its header is not the one that was written")
    header = json.loads(text)
    facts = header.pop("__metadata__")
    places = {
        name: (place["dtype"], tuple(place["shape"]), *place["data_offsets"])
        for name, place in header.items()
    }
    payload = max((end for *_, end in places.values()), default=0)
    return Head(facts, places, payload, 8 + length, facts["checksum"])


def read_all(file: BinaryIO, head: Head) -> dict[str, Tensor]:
    """All tensors, their checksum verified. Raises BadBlob."""
    file.seek(head.size)
    data = _fill(file, head.payload)
    if file.read(1):
        raise BadBlob("it is longer than it was")
    tensors = {
        name: Tensor(dtype, shape, data[begin:end])
        for name, (dtype, shape, begin, end) in head.places.items()
    }
    if checksum([tensor.data for tensor in tensors.values()]) != head.checksum:
        raise BadBlob("its bytes are not those that were written")
    return tensors


def checksum(parts: Sequence[Bytes]) -> str:
    """SHA-256 over the SHA-256 of each piece of each part."""
    pieces = [piece for part in parts for piece in _pieces(part)]
    digests: Iterable[bytes]
    if sum(len(piece) for piece in pieces) <= PIECE:
        digests = map(_digest, pieces)
    else:
        with ThreadPoolExecutor(THREADS) as threads:
            digests = list(threads.map(_digest, pieces))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest(piece: Bytes) -> bytes:
    return hashlib.sha256(piece.data).digest()


def _pieces(part: Bytes) -> Iterator[Bytes]:
    for begin in range(0, len(part), PIECE):
        yield part[begin : begin + PIECE]


def _fill(file: BinaryIO, length: int) -> Bytes:
    data = np.empty(length, dtype=np.uint8)
    for piece in _pieces(data):  # one read of more than 2 GiB is refused on macOS
        left = piece.data
        while left:
            got = file.readinto(left)  # type: ignore[attr-defined]
            if not got:
                raise BadBlob("it is cut short")
            left = left[got:]
    return data
