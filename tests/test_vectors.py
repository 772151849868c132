"""Interoperability vectors: public checkpoint layouts with expected tokens, cycles and drafts.

They come with the DFlash format: a tiny Qwen3 target, drafts of block 4 and 8 with full and with
sliding layers, and a DFlash 2 draft of block 8; a Gemma 4 and a Qwen3.5 target, each with a draft.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny import finish, request

from dflash_batch.decoder.arena import Lens
from dflash_batch.decoder.draft_model import DFlashDrafter
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.types import LoadSpec

FOLDER = Path(__file__).parent / "vectors"
DRAFTS = (
    "dflash-qwen3-tiny/draft-b4",
    "dflash-qwen3-tiny/draft-b8",
    "dflash-qwen3-tiny/draft-b8-swa",
    "dflash-qwen3-tiny/draft2-b8",
    "dflash-gemma4-tiny/draft-b8",
    "dflash-qwen35-tiny/draft-b8",
)


def cases(draft: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(
        (FOLDER / draft / "expected" / "cases.json").read_text()
    )
    return loaded


def load(draft: str, block: int | None, max_batch: int) -> Any:
    return load_decoder(
        LoadSpec(
            target=str((FOLDER / draft).parent / "target"),
            draft=str(FOLDER / draft),
            block=block,
            dtype="float32",
            max_batch=max_batch,
        )
    )


@pytest.mark.parametrize("max_batch", [1, 4, 16])
@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_cycles_and_drafts_are_those_expected(draft: str, max_batch: int) -> None:
    by_block: dict[int | None, list[dict[str, Any]]] = {}
    for case in cases(draft):
        by_block.setdefault(case["block_size"], []).append(case)
    for block, some in by_block.items():
        decoder = load(draft, block, max_batch)
        for case in some:
            decoder.add(
                request(
                    case["case"],
                    case["prompt"],
                    case["max_new_tokens"],
                    stop_token_ids=frozenset(case["stop_token_ids"] or ()),
                    ignore_eos=True,
                    trace=True,
                )
            )
        done = finish(decoder)
        for case in some:
            got = done[case["case"]]
            assert list(got.token_ids) == case["expected_new_tokens"], case["desc"]
            assert list(got.emitted_per_cycle or ()) == case["emitted_per_cycle"], case["desc"]
            drafted = [list(d) for d in got.drafted_per_cycle or ()]
            assert drafted == case["drafted_per_cycle"], case["desc"]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_first_block_has_the_expected_logits(draft: str) -> None:
    decoder = load(draft, None, 1)
    drafter: DFlashDrafter = decoder._drafter
    expected: Any = mx.load(str(FOLDER / draft / "expected" / "first_block.safetensors"))
    for case in cases(draft):
        name = f"case{case['case']}.first_block."
        if case["block_size"] is not None or name + "logits" not in expected:
            continue
        features = expected[name + "target_hidden"]
        logits = expected[name + "logits"]
        logits = logits.reshape(-1, logits.shape[-1])
        length, k = features.shape[1], logits.shape[0]

        lens = Lens(1)
        state = drafter.new_state(lens)
        lens.open(length)
        drafter.commit(state, mx.zeros((1, length), mx.int32), features, mx.array([length]))
        lens.advance(mx.array([length]))
        lens.bound = length
        got = drafter.draft(state, mx.array([case["expected_new_tokens"][0]]), mx.array([k + 1]), k)
        assert mx.allclose(got.logits[0], logits, rtol=0, atol=1e-4)
