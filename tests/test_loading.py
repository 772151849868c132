"""Names to decoders: folders and ids, pairs that fit and pairs that do not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import MODELS, bits_of, finish, greedy, make_model, make_shape, request

from dflash_batch.decoder import demo, loading, registry
from dflash_batch.decoder.errors import LoadError, PromptError
from dflash_batch.decoder.loading import load_decoder
from dflash_batch.decoder.quantise import quantise
from dflash_batch.decoder.registry import Draft, Pair
from dflash_batch.decoder.types import LoadSpec, Request

VECTORS = Path(__file__).parent / "vectors" / "dflash-qwen3-tiny"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A copy of a tiny target and its draft, to be spoiled."""
    for part in ("target", "draft-b8"):
        shutil.copytree(VECTORS / part, tmp_path / part, ignore=shutil.ignore_patterns("expected"))
    return tmp_path


def load(folder: Path, **options: Any) -> Any:
    options = {"draft": str(folder / "draft-b8"), **options}
    return load_decoder(LoadSpec(target=str(folder / "target"), **options))


def spoil(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(config))


def save(model: Any, name: str, folder: Path) -> None:
    config = make_shape(name)
    if bits := bits_of(name):
        config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_each_family_loads(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    save(model, name, tmp_path)

    decoder = load_decoder(LoadSpec(target=str(tmp_path), draft="none"))
    decoder.add(request(0, [1, 2, 3], 5))

    assert decoder.info.family == name.partition("-")[0]
    assert decoder.info.dtype == "float32"
    assert decoder.info.context_length == 512
    assert list(finish(decoder)[0].token_ids) == greedy(model, [1, 2, 3], 5)


def test_decay_rates_keep_their_precision(tmp_path: Path) -> None:
    model = make_model("qwen3_5")
    save(model, "qwen3_5", tmp_path)

    decoder = load_decoder(LoadSpec(target=str(tmp_path), draft="none", dtype="bfloat16"))

    target: Any = decoder._target
    ours, theirs = (
        dict(tree_flatten(text.parameters()))
        for text in (target._model, model.language_model.model)
    )
    assert {a.dtype for name, a in ours.items() if name.endswith("A_log")} == {mx.float32}
    assert {a.dtype for name, a in ours.items() if not name.endswith("A_log")} == {mx.bfloat16}
    name = "layers.0.linear_attn.A_log"
    assert mx.array_equal(ours[name], theirs[name])
    decoder.add(request(0, [1, 2, 3], 5))
    assert len(finish(decoder)[0].token_ids) == 5


def test_a_folder_without_tokenizer_serves_token_ids(pair: Path) -> None:
    phases: list[str] = []
    decoder = load_decoder(
        LoadSpec(target=str(pair / "target"), draft=str(pair / "draft-b8"), dtype="float32"),
        lambda phase, share: phases.append(phase),
    )
    info = decoder.info
    assert (info.family, info.block, info.dtype) == ("qwen3", 8, "float32")
    assert info.eos_token_ids == {62}
    assert not info.has_tokenizer
    assert phases[-1] == "ready"
    for refused in (
        lambda: decoder.encode_chat([{"role": "user", "content": "hi"}]),
        lambda: decoder.encode_text("hi"),
        lambda: decoder.add(Request(0, (1, 2), 4, stop=("x",))),
    ):
        with pytest.raises(PromptError) as caught:
            refused()
        assert caught.value.code == "tokenizer_missing"


def test_the_room_of_a_prompt(pair: Path) -> None:
    decoder = load(pair, max_context=40)
    assert decoder.room([1] * 10, 30) == 30
    assert decoder.room([1] * 10, None) == 30
    for prompt, budget, code in (
        ([1] * 10, 31, "context_length_exceeded"),
        ([1] * 40, None, "context_length_exceeded"),
        ([], 5, "invalid_value"),
        ([64], 5, "invalid_value"),
        ([-1], 5, "invalid_value"),
    ):
        with pytest.raises(PromptError) as caught:
            decoder.room(prompt, budget)
        assert caught.value.code == code


def test_auto_is_the_checkpoints_own_dtype(pair: Path) -> None:
    assert load(pair).info.dtype == "bfloat16"
    assert load(pair, dtype="float16").info.dtype == "float16"


def test_auto_without_a_known_draft_is_plain_decoding_with_a_notice(pair: Path) -> None:
    info = load(pair, draft="auto").info
    assert info.draft is None
    assert info.block == 1
    assert "no draft is known" in (info.draft_notice or "")
    assert load(pair, draft="none").info.draft_notice is None


def test_auto_offline_is_plain_decoding_with_a_notice(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "pairs", lambda: [Pair("target", Draft("/nowhere/draft"), None)])
    info = load(pair, draft="auto").info
    assert info.draft is None
    assert "not to be had" in (info.draft_notice or "")


def test_registry_matches_copies_of_a_target_and_nothing_else() -> None:
    def draft(target: str) -> str | None:
        found = registry.draft_for(target)
        return found and found.name

    assert draft("Qwen/Qwen3-4B") == "z-lab/Qwen3-4B-DFlash-b16"
    assert draft("mlx-community/Qwen3-4B-4bit") == "z-lab/Qwen3-4B-DFlash-b16"
    assert draft("/models/qwen3-8b_tuned/") == "z-lab/Qwen3-8B-DFlash-b16"
    assert draft("Qwen/Qwen3-4Bx") is None
    assert draft("Qwen/Qwen3.5-35B-A3B-8bit") == "z-lab/Qwen3.5-35B-A3B-DFlash"
    assert draft("demo") == str(demo.DRAFT_DIR)


def test_every_registry_entry_is_a_pair_of_names() -> None:
    found = registry.pairs()
    assert len({pair.alias for pair in found}) == len(found)
    for pair in found:
        assert "/" not in pair.target
        assert pair.draft.name.count("/") == 1
        assert pair.repo is not None
        assert pair.repo.count("/") == 1
        assert pair.repo.lower().endswith("/" + pair.alias)
        assert pair.draft.revision is None or re.fullmatch("[0-9a-f]{40}", pair.draft.revision)


def test_a_short_name_stands_for_a_target() -> None:
    assert registry.repo_for("qwen3-4b") == "Qwen/Qwen3-4B"
    assert registry.repo_for("Qwen/Qwen3-4B") is None
    assert registry.repo_for("demo") is None


def test_a_pinned_draft_is_fetched_at_its_revision(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(pair / "draft-b8")

    monkeypatch.setattr(loading, "snapshot_download", download)
    monkeypatch.setattr(registry, "pairs", lambda: [Pair("target", Draft("a/b", "0" * 40), None)])
    assert load(pair, draft="auto").info.draft == "a/b"
    assert asked == [("a/b", "0" * 40)]


# Lookup and quantisation


@pytest.mark.parametrize(
    ("draft", "kind", "shown", "block"),
    [
        ("ngram", "ngram", "ngram", 16),
        ("auto+ngram", "ngram", "ngram", 16),
        ("{}+ngram", "dflash+ngram", "{}+ngram", 8),
    ],
)
def test_drafts_by_lookup_are_named(
    pair: Path, draft: str, kind: str, shown: str, block: int
) -> None:
    folder = str(pair / "draft-b8")
    decoder = load(pair, draft=draft.format(folder), dtype="float32")
    assert decoder.info.draft == shown.format(folder)
    assert (decoder.info.block, decoder._drafter.spec.kind) == (block, kind)
    assert (decoder.info.draft_notice is not None) == draft.startswith("auto")
    decoder.add(request(0, [1, 2, 3], 40, ignore_eos=True))
    plain = load(pair, draft="none", dtype="float32")
    plain.add(request(0, [1, 2, 3], 40, ignore_eos=True))
    assert finish(decoder)[0].token_ids == finish(plain)[0].token_ids


@pytest.mark.parametrize("block", [1, 65])
def test_a_block_too_short_or_long_for_lookup_is_refused(pair: Path, block: int) -> None:
    with pytest.raises(LoadError, match="lookup"):
        load(pair, draft="ngram", block=block)
    assert load(pair, draft="ngram", block=24).info.block == 24


@pytest.mark.parametrize("quant", ["w8", "w4"])
@pytest.mark.parametrize("draft", ["draft-b8", "draft2-b8"])
def test_a_quantised_draft_changes_drafts_and_no_text(draft: str, quant: Any) -> None:
    def decode(**options: Any) -> Any:
        decoder = load(VECTORS, draft=str(VECTORS / draft), dtype="float32", **options)
        for uid in range(3):
            decoder.add(request(uid, [uid + 1, 2, 3], 24, ignore_eos=True, trace=True))
        return decoder, finish(decoder)

    decoder, got = decode(draft_quant=quant)
    plain, expected = decode()
    assert (decoder.info.draft_quant, plain.info.draft_quant) == (quant, "none")
    assert isinstance(decoder._drafter.model.fc, nn.QuantizedLinear)
    assert decoder._drafter.model.fc.bits == int(quant[1])
    assert decoder._drafter.model.fc.group_size == 64
    assert decoder._drafter.model.layers[0].mlp.up_proj.group_size == 32
    assert decoder._drafter.config != plain._drafter.config, "costs are another pair's"
    for uid in got:
        assert got[uid].token_ids == expected[uid].token_ids
    if quant == "w4":
        assert any(got[u].drafted_per_cycle != expected[u].drafted_per_cycle for u in got)


def test_a_draft_without_a_layer_to_quantise_is_refused() -> None:
    with pytest.raises(LoadError, match="no layer"):
        quantise(nn.Linear(24, 8), "w4")
    with pytest.raises(LoadError, match="w3"):
        quantise(nn.Linear(64, 8), "w3")


def test_other_names_of_tensors_are_read(pair: Path) -> None:
    expected = dict(tree_flatten(load(pair)._drafter.model.parameters()))
    path = str(pair / "draft-b8" / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(path)  # type: ignore[assignment]
    other = {
        name.replace("layers.0.", "midlayer.")
        .replace("fc.weight", "encoder.fc.weight")
        .replace("hidden_norm.", "encoder.output_norm_enc."): array
        for name, array in weights.items()
    }
    assert other.keys() != weights.keys()
    mx.save_safetensors(path, other)
    got = dict(tree_flatten(load(pair)._drafter.model.parameters()))
    assert got.keys() == expected.keys()
    assert all(mx.array_equal(expected[name], array) for name, array in got.items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_target_layers": 36}, "layers is 36, the target's is 6"),
        ({"hidden_size": 64}, "hidden size is 64"),
        ({"vocab_size": 100}, "vocabulary is 100"),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 6]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 3]}}, "mask_token_id"),
        ({"intermediate_size": 50}, "should be"),
        ({"num_hidden_layers": 3, "layer_types": None}, "missing"),
        ({"num_hidden_layers": 1, "layer_types": None}, "not known"),
    ],
)
def test_a_draft_of_another_target_is_refused(
    pair: Path, changes: dict[str, Any], says: str
) -> None:
    spoil(pair / "draft-b8", **changes)
    with pytest.raises(LoadError, match=says):
        load(pair)


@pytest.mark.parametrize("block", [1, 9])
def test_a_block_the_draft_was_not_trained_for_is_refused(pair: Path, block: int) -> None:
    with pytest.raises(LoadError, match="trained for blocks of 8"):
        load(pair, block=block)


def test_missing_and_broken_files_are_named(pair: Path) -> None:
    with pytest.raises(LoadError, match="no such folder"):
        load_decoder(LoadSpec(target=str(pair / "nothing")))
    spoil(pair / "target", model_type="gpt2", n_ctx=8, n_embd=8, n_head=1, n_layer=1,
          n_positions=8, layer_norm_epsilon=1e-5)  # fmt: skip
    with pytest.raises(LoadError):
        load(pair)
    (pair / "target" / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not valid JSON"):
        load(pair)
    (pair / "target" / "config.json").unlink()
    with pytest.raises(LoadError, match="not a model folder"):
        load(pair)


def test_a_damaged_draft_file_is_named(pair: Path) -> None:
    (pair / "draft-b8" / "model.safetensors").write_bytes(b"\x00" * 10)
    with pytest.raises(LoadError, match="cannot be read"):
        load(pair)


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(loading, "snapshot_download", offline)
    with pytest.raises(LoadError, match="hub cannot be reached"):
        loading.find("Qwen/Qwen3-4B")


def test_the_draft_takes_the_arithmetic_of_the_target(pair: Path) -> None:
    decoder = load(pair, dtype="float32")
    assert decoder._drafter.model.fc.weight.dtype == mx.float32
