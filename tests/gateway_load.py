"""Many live requests at once against a real server with a fake engine: are answers mixed up?

Run as `python tests/gateway_load.py [REQUESTS]`; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from gateway_tools import answer_to, ask_many, serving


def main(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * count), hard), hard))
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), None) as server:
        asyncio.run(ask_many(server.url, 1))  # the worker is up
        began = time.monotonic()
        found = asyncio.run(ask_many(server.url, count))
        seconds = time.monotonic() - began
    wrong = sum(found[text] != answer_to(text) for text in found)
    report = {
        "requests": count,
        "answered": len(found),
        "wrong": wrong,
        "seconds": round(seconds, 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
