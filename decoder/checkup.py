"""Checks that need MLX: its device, its arithmetic, and a model if one is named.

Run as a process of its own, `python -m dflash_batch.decoder.checkup [LOADSPEC]`: a finding is a
line of JSON on stdout. `LOADSPEC` is the arguments of a LoadSpec as a JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import mlx.core as mx

from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.finding import Finding, Level
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.types import LoadSpec, Request

_EMULATED = ("applegpu_g13", "applegpu_g14")  # M1 and M2 have no bfloat16 of their own


def device() -> Iterator[Finding]:
    """Where MLX computes."""
    where = mx.default_device()
    facts = mx.device_info(where)
    name = facts.get("device_name") or facts.get("architecture") or "unknown"
    if where != mx.gpu:
        cure = "install mlx for this Mac's architecture" if sys.platform == "darwin" else ""
        level: Level = "failed" if sys.platform == "darwin" else "note"
        yield Finding("device", level, f"CPU ({name}): right, and slow", cure)
        return
    backend = "Metal" if mx.metal.is_available() else "CUDA"
    size = facts.get("max_recommended_working_set_size") or facts.get("memory_size") or 0
    room = f", {int(size) / 2**30:.0f} GiB for it" if size else ""
    yield Finding("device", "ok", f"{backend}: {name}{room}")
    if str(facts.get("architecture", "")).startswith(_EMULATED):
        yield Finding("device", "note", "bfloat16 is emulated on this chip: try --dtype float16")


def arithmetic() -> Iterator[Finding]:
    """Whether the device computes, on small whole numbers that every dtype holds."""
    ones = mx.ones((64, 64))
    got = {str(kind): (ones.astype(kind) @ ones.astype(kind)).tolist() for kind in _KINDS}
    wrong = [kind for kind, rows in got.items() if rows != [[64.0] * 64] * 64]
    if wrong:
        yield Finding("arithmetic", "failed", f"wrong products in {', '.join(wrong)}")
    else:
        yield Finding("arithmetic", "ok", "products are right")


_KINDS = (mx.float32, mx.bfloat16, mx.float16)


def pair(decoder: Decoder) -> Iterator[Finding]:
    """What was loaded."""
    info = decoder.info
    draft = f"draft {info.draft}, block {info.block}" if info.draft else "no draft"
    yield Finding(
        "model",
        "ok",
        f"{info.target}: {info.family}, {info.dtype}, context {info.context_length:,}, {draft}",
    )
    if info.draft_notice:
        yield Finding("model", "note", info.draft_notice)
    if not info.has_tokenizer:
        yield Finding("model", "warning", "no tokenizer: prompts must be token ids")
    elif not info.has_chat_template:
        yield Finding("model", "warning", "no chat template: only /v1/completions can be served")


def decodes(decoder: Decoder) -> Iterator[Finding]:
    """Whether it writes tokens."""
    wanted = 4
    prompt = tuple(token % decoder.info.vocab_size for token in (1, 2, 3))
    (done,) = decoder.run([Request(0, prompt, max_tokens=wanted, ignore_eos=True)])
    if len(done.token_ids) == wanted:
        yield Finding("decoding", "ok", f"{wanted} tokens were decoded")
    else:
        yield Finding(
            "decoding", "failed", f"{len(done.token_ids)} tokens came where {wanted} were asked for"
        )


CHECKS: list[Callable[[], Iterator[Finding]]] = [device, arithmetic]
"""Run always, in this order."""

MODEL_CHECKS: list[Callable[[Decoder], Iterator[Finding]]] = [pair, decodes]
"""Run when a model is named, on the decoder that was loaded."""


def findings(spec: LoadSpec | None) -> Iterator[Finding]:
    """What all checks find, one by one."""
    for check in CHECKS:
        yield from check()
    if spec is None:
        return
    try:
        decoder = load_decoder(spec)
    except LoadError as error:
        yield Finding("model", "failed", str(error))
        return
    try:
        for model_check in MODEL_CHECKS:
            yield from model_check(decoder)
    finally:
        decoder.close()


def main() -> None:
    """See the top of this file."""
    spec = LoadSpec(**json.loads(sys.argv[1])) if len(sys.argv) > 1 else None
    for finding in findings(spec):
        print(json.dumps(finding.as_dict()), flush=True)


if __name__ == "__main__":
    main()
