"""The check of a pair: what fits is said to fit, and what is wrong is named."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from test_vectors import FOLDER

from dflash_batch.decoder import pairing
from dflash_batch.decoder.composite import CompositeDrafter
from dflash_batch.decoder.draft_model import DFlashDrafter
from dflash_batch.decoder.drafters import NoDrafter, Proposal
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.pairing import PairReport, check_pair, prompt_for
from dflash_batch.decoder.types import LoadSpec

QWEN3 = FOLDER / "dflash-qwen3-tiny"
PROMPT = [5, 9, 2, 7, 1, 3]


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_decoder(LoadSpec("demo", dtype="float32"))


@pytest.fixture
def pair() -> Any:
    spec = LoadSpec(str(QWEN3 / "target"), str(QWEN3 / "draft-b8"), dtype="float32")
    return load_decoder(spec).pair


def problem(demo: Any) -> list[int]:
    """A prompt of the kind that the bundled pair knows."""
    text = "Tom has 12 apples. He buys 3 more. How many apples does Tom have?"
    ids: list[int] = demo.encode_chat([{"role": "user", "content": text}])
    return ids


def levels(report: PairReport) -> dict[str, str]:
    return {check.name: check.level for check in report.checks}


def test_the_bundled_pair_fits(demo: Any) -> None:
    target, drafter = demo.pair

    report = check_pair(target, drafter, problem(demo), 24)

    assert set(levels(report).values()) == {"ok"}
    assert report.level == "ok"
    assert report.acceptance > 0.2
    assert report.tau > 2
    assert report.tokens == 24
    assert "fits" in report.verdict
    assert json.loads(json.dumps(report.as_dict()))["checks"][0]["name"] == "taps"


class Particular(DFlashDrafter):
    """Right as another drafter is with these taps, and with others in nothing."""

    def __init__(self, other: DFlashDrafter, right: tuple[int, ...]) -> None:
        super().__init__(other.model, other.config, other.target, other.spec.max_k + 1)
        self.right = right

    def propose(self, state: Any, anchor: mx.array, width: mx.array, k: int) -> Proposal:
        proposal = super().propose(state, anchor, width, k)
        wrong = (proposal.tokens + 1) % self.target.vocab_size
        return proposal if self.spec.taps == self.right else Proposal(wrong)


@pytest.mark.parametrize(("by", "says"), [(-1, "one layer earlier"), (1, "one layer later")])
def test_taps_that_are_counted_otherwise_are_found_out(demo: Any, by: int, says: str) -> None:
    target, drafter = demo.pair
    right = tuple(tap + by for tap in drafter.spec.taps)

    report = check_pair(target, Particular(drafter, right), problem(demo), 24)

    (found,) = (check for check in report.checks if check.name == "acceptance")
    assert (found.level, report.level) == ("warning", "warning")
    assert says in found.text


def test_a_draft_that_hardly_knows_its_target(demo: Any) -> None:
    target, drafter = demo.pair
    report = check_pair(target, Particular(drafter, ()), problem(demo), 24)
    found = levels(report)
    assert found.pop("acceptance") == "warning"
    assert set(found.values()) == {"ok"}
    assert (report.acceptance, report.tau) == (0, 1)


def test_what_is_broken_fails(pair: Any) -> None:
    target, drafter = pair
    broken = copy.deepcopy(drafter.model)
    broken.norm.weight = broken.norm.weight * mx.nan
    other = copy.copy(drafter)
    other.model = broken
    assert levels(check_pair(target, other, PROMPT, 4))["logits"] == "failed"

    other = copy.copy(drafter)
    other.config = replace(drafter.config, mask_token_id=2)
    assert levels(check_pair(target, other, PROMPT, 4))["mask"] == "warning"

    short = copy.copy(drafter)
    short.config = replace(drafter.config, max_position_embeddings=8)
    report = check_pair(target, short, PROMPT, 4)
    assert levels(report)["positions"] == "warning"
    assert any("8 positions" in check.text for check in report.checks)


def test_of_a_composite_the_model_is_checked_and_of_nothing_nothing(pair: Any) -> None:
    target, drafter = pair
    composite = check_pair(target, CompositeDrafter(drafter), PROMPT, 8)
    assert composite == check_pair(target, drafter, PROMPT, 8)
    for none in (NoDrafter(), CompositeDrafter(NoDrafter(), 8)):
        with pytest.raises(ValueError, match="no draft model"):
            check_pair(target, none, PROMPT, 8)
    with pytest.raises(ValueError, match="prompt"):
        check_pair(target, drafter, [], 8)


def test_a_pair_by_name_is_loaded_checked_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "TOKENS", 8)
    spec = LoadSpec(str(QWEN3 / "target"), str(QWEN3 / "draft-b8"), dtype="float32")
    *phases, found = pairing.report(spec)
    assert phases[-1] == {"phase": "ready"}
    assert found["draft"] == str(QWEN3 / "draft-b8")
    assert found["level"] in ("ok", "warning")
    with pytest.raises(LoadError, match="no draft is known"):
        list(pairing.report(replace(spec, draft="auto")))
    with pytest.raises(LoadError, match="no draft was named"):
        list(pairing.report(replace(spec, draft="none")))


def test_a_prompt_is_found_for_every_model(demo: Any, pair: Any) -> None:
    assert len(prompt_for(demo)) > 5
    bare = load_decoder(LoadSpec(str(QWEN3 / "target"), "none"))
    assert max(prompt_for(bare)) < bare.info.vocab_size
