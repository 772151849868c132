"""Where a queue may be: prompts, results and passwords are not sent over a network in the clear.

Allowed without a word: a socket file, `rediss://`, and plain `redis://` to this machine or into a
WireGuard overlay, whose addresses say so (Tailscale's 100.64.0.0/10 and fd7a:115c:a1e0::/48). What
counts is the address that a name leads to, not the name. A home or office network is not private:
anyone in it can listen.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dflash_batch.worker.errors import UserError

_OVERLAYS = (ipaddress.ip_network("100.64.0.0/10"), ipaddress.ip_network("fd7a:115c:a1e0::/48"))

_LOOSE = {"ssl_cert_reqs": ("none", "optional"), "ssl_check_hostname": ("false", "0", "no")}
"""Options of a URL that would make TLS believe anybody."""


class QueueExposed(UserError):
    """Raised when a queue's address would let others on the network read along."""

    code = "queue_exposed"


def check_address(url: str, *, insecure: bool = False) -> None:
    """Raises QueueExposed, unless the user has said that this network is to be trusted.

    A name that leads nowhere passes: that nobody answers there is told by who connects.
    """
    parts = urlsplit(url)
    if insecure:
        return
    if parts.scheme == "rediss":
        loose = [name for name, values in _options(url).items() if values in _LOOSE.get(name, ())]
        if loose:
            raise QueueExposed(
                f"{', '.join(loose)} in the queue's address takes anybody for the server. Name "
                "its certificate authority instead: rediss://HOST?ssl_ca_certs=FILE. --insecure "
                "allows it."
            )
    elif parts.scheme == "redis":
        host = parts.hostname or "localhost"
        if exposed := [found for found in _addresses(host) if not _is_private(found)]:
            raise QueueExposed(
                f"redis://{host} sends prompts, results and the password in the clear over the "
                f"network, to {exposed[0]}. Use rediss://, or a tunnel (ssh -N -L "
                f"6379:localhost:6379 {host}, then redis://localhost), or Tailscale; or say "
                "--insecure if nobody else is on this network."
            )


def tls_options(url: str) -> dict[str, Any]:
    """Settings of redis-py for `rediss://`; what the URL itself says goes before them."""
    if urlsplit(url).scheme != "rediss":
        return {}
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


def _options(url: str) -> dict[str, str]:
    return {name: values[-1].lower() for name, values in parse_qs(urlsplit(url).query).items()}


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]).partition("%")[0] for entry in found})


def _is_private(address: str) -> bool:
    """Whether what is sent there stays on this machine, or in an overlay that encrypts it."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found.is_loopback or any(found in overlay for overlay in _OVERLAYS)
