"""Who may call, and how much they may send: looked at before any call is answered."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_batch.worker.errors import UserError
from dflash_batch.worker.gateway.errors import ApiError, error_response
from dflash_batch.worker.reader import MAX_BYTES

UPLOAD_BYTES = MAX_BYTES + (1 << 20)
BODY_BYTES = 16 << 20
"""Most bytes of a body: of an upload, and of any other call."""

_OPEN = frozenset({"/health"})
"""Paths that need no token."""


class TokensUnfit(UserError):
    """Raised when a file of tokens cannot be used."""

    code = "tokens_unfit"


class NotLoopback(UserError):
    """Raised when others could reach the server without a token."""

    code = "address_unsafe"


def read_tokens(path: Path) -> frozenset[bytes]:
    """Hashes of the tokens in a file: one a line, blank lines and lines after # left out.

    Raises TokensUnfit, also when others may read the file.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise TokensUnfit(f"cannot read the tokens in {path}: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise TokensUnfit(f"others may read the tokens in {path}: chmod 600 it")
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise TokensUnfit(f"there is no token in {path}: put one on a line")
    if short := sum(len(token) < 16 for token in tokens):
        raise TokensUnfit(f"{short} of the tokens in {path} have fewer than 16 characters")
    return frozenset(_hash(token) for token in tokens)


def check_address(host: str, tokens: frozenset[bytes]) -> None:
    """Without tokens only this machine may call. Raises NotLoopback."""
    if not tokens and not is_loopback(host):
        raise NotLoopback(
            f"{host} can be reached from other machines: give --token-file, or --host 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own, whatever a name server says."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass
class Guard:
    """ASGI middleware: token, origin, and size of the body."""

    app: ASGIApp
    tokens: frozenset[bytes] = frozenset()
    upload_bytes: int = UPLOAD_BYTES
    body_bytes: int = BODY_BYTES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_origin(headers)
            if self.tokens and scope["path"] not in _OPEN:
                self._check_token(headers)
            most = self.upload_bytes if scope["path"] == "/v1/files" else self.body_bytes
            said = headers.get("content-length", "0")
            if said.isascii() and said.isdigit() and len(said) < 20 and int(said) > most:
                raise _too_large(most)
        except ApiError as error:
            answer = error_response(error.status, str(error), error.code)
            if error.status == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            if error.status == 413:
                answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > most:
                raise _too_large(most)
            return message

        await self.app(scope, counted, send)

    def _check_token(self, headers: Headers) -> None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = _hash(token.strip())
        known = [hmac.compare_digest(given, token) for token in self.tokens]
        if kind.lower() != "bearer" or not any(known):
            raise ApiError(401, "a valid bearer token is needed", code="invalid_api_key")

    def _check_origin(self, headers: Headers) -> None:
        """A page in a browser on this machine is no caller of ours, whatever name it gave us."""
        host = urlsplit(f"//{headers.get('host', '')}").netloc
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise ApiError(403, "calls from pages of other servers are refused", code="origin")
        if not self.tokens:
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if not is_loopback(name):
                raise ApiError(403, "the Host header names another machine", code="host")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most:,} bytes", code="body_too_large")
