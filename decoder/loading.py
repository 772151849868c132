"""From names to a running decoder: find the files, load them, check that the pair fits.

A name is a folder or a Hugging Face id. `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` and the rest are
honoured by huggingface_hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model, load_tokenizer

from dflash_batch.decoder import demo, registry
from dflash_batch.decoder.caching import tiers_for
from dflash_batch.decoder.composite import CompositeDrafter
from dflash_batch.decoder.diagnostics import Diagnostics
from dflash_batch.decoder.draft2_model import DFlash2Drafter, Draft2Model
from dflash_batch.decoder.draft_config import DraftConfig
from dflash_batch.decoder.draft_model import DFlashDrafter, DraftModel
from dflash_batch.decoder.drafters import Drafter, NoDrafter
from dflash_batch.decoder.engine import Decoder
from dflash_batch.decoder.errors import LoadError
from dflash_batch.decoder.measured import cost_key, policy_for
from dflash_batch.decoder.memory import limit_here
from dflash_batch.decoder.quantise import quantise
from dflash_batch.decoder.targets.base import Target
from dflash_batch.decoder.targets.dense import DenseTarget
from dflash_batch.decoder.targets.gemma4 import Gemma4Target
from dflash_batch.decoder.targets.qwen3_5 import Qwen35Target
from dflash_batch.decoder.types import DraftQuant, LoadSpec, ModelInfo, Progress

FAMILIES: dict[str, Callable[[nn.Module, str, int], Target]] = {
    "llama": DenseTarget,
    "qwen3": DenseTarget,
    "qwen3_moe": DenseTarget,
    "gemma4": Gemma4Target,
    "gemma4_text": Gemma4Target,
    "qwen3_5": Qwen35Target,
    "qwen3_5_moe": Qwen35Target,
}
"""mlx-lm architectures we have a layer loop for. Others that mlx-lm maps onto these also work."""

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

LOOKUP_BLOCK, LOOKUP_MOST = 16, 64
"""Tokens of a block when lookup drafts alone: by default, and at most."""

CACHE_LIMIT = 1 << 30
"""Bytes of freed buffers MLX may keep for reuse. Its own default is all of the memory."""

_FILES = ["*.json", "model*.safetensors", "*.txt", "*.jinja", "tokenizer.model", "*.tiktoken"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def load_decoder(spec: LoadSpec, progress: Progress = lambda phase, share: None) -> Decoder:
    """Load what `spec` names. Raises LoadError that says what to do."""
    mx.set_cache_limit(CACHE_LIMIT)
    progress("finding the target", None)
    folder = find(str(demo.TARGET_DIR) if spec.target == registry.DEMO else spec.target)
    progress("loading the target", None)
    config = read_config(folder)
    target = load_target(folder, config, spec)
    progress("loading the draft", None)
    drafter, name, notice = load_drafter(spec, target)
    progress("loading the tokenizer", None)
    eos = eos_tokens(folder, config)
    tokenizer = None
    if any((folder / file).exists() for file in _TOKENIZERS):
        tokenizer = _tokenizer(folder, sorted(eos))
        eos |= {int(i) for i in tokenizer.eos_token_ids}
    info = ModelInfo(
        target=spec.target,
        family=target.family,
        draft=name,
        draft_notice=notice,
        block=drafter.spec.max_k + 1,
        dtype=str(target.dtype).removeprefix("mlx.core."),
        context_length=min(target.context_length, spec.max_context or target.context_length),
        vocab_size=target.vocab_size,
        eos_token_ids=frozenset(eos),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and bool(tokenizer.has_chat_template),
        calls_tools=tokenizer is not None and bool(tokenizer.has_tool_calling),
        template_names=template_names(tokenizer),
        draft_quant=spec.draft_quant if drafter.spec.taps else "none",
    )
    tiers = tiers_for(spec, folder, config, target, drafter)
    limit = spec.memory or limit_here()
    watch = Diagnostics(Path(spec.diagnostics), info, asdict(spec)) if spec.diagnostics else None
    progress("ready", 1.0)
    return Decoder(
        target,
        drafter,
        info=info,
        tokenizer=tokenizer,
        max_batch=spec.max_batch,
        policy=policy_for(spec, drafter, cost_key(folder, config, target, drafter)),
        tiers=tiers,
        memory=None if limit is None else limit - tiers.ram,
        watch=watch,
    )


def find(name: str, revision: str | None = None) -> Path:
    """The folder of a model: the one named, or a download from Hugging Face at a revision."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise LoadError(
            f"{name}: no such folder. Give a folder with config.json and *.safetensors, or a "
            "Hugging Face id such as Qwen/Qwen3-4B"
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except LocalEntryNotFoundError as e:
        raise LoadError(
            f"{name}: not in the local Hugging Face cache, and the hub cannot be reached "
            "(offline, or HF_HUB_OFFLINE is set)"
        ) from e
    except (HfHubHTTPError, HFValidationError) as e:
        raise LoadError(
            f"{name}: Hugging Face says: {_first_line(e)}. A gated model needs HF_TOKEN and its "
            "licence accepted on its page"
        ) from e
    except OSError as e:
        raise LoadError(f"{name}: cannot be downloaded: {_first_line(e)}") from e


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a folder. Raises LoadError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as e:
        raise LoadError(f"{path}: not found; this is not a model folder") from e
    except ValueError as e:
        raise LoadError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(config, dict):
        raise LoadError(f"{path}: not a JSON object")
    return config


def load_target(folder: Path, config: dict[str, Any], spec: LoadSpec) -> Target:
    """Weights into the family's adapter."""
    try:
        model, _ = load_model(folder, lazy=True)
    except (ValueError, FileNotFoundError, KeyError, TypeError) as e:
        raise LoadError(f"{folder}: {_first_line(e)}") from e
    family = type(model).__module__.rsplit(".", 1)[-1]
    if family not in FAMILIES:
        raise LoadError(
            f"{folder}: the architecture {config.get('model_type')} is not supported yet; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    dtype = _dtype(spec.dtype, model)
    _cast(model, dtype)
    mx.eval(model.parameters())
    text = config.get("text_config") or config  # of a multimodal checkpoint
    context = int(text.get("max_position_embeddings") or 2048)
    return FAMILIES[family](model, family, context)


def _dtype(name: str, model: nn.Module) -> mx.Dtype:
    """The arithmetic of the weights that are not quantised; `auto` is the checkpoint's own."""
    if name != "auto":
        return DTYPES[name]
    kinds = [a.dtype for a in _parameters(model).values() if a.dtype in DTYPES.values()]
    return max(set(kinds), key=kinds.count)


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Give the weights their arithmetic, but for the few that mlx-lm keeps more precise."""
    wanted = getattr(model, "cast_predicate", lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        floating = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if floating and wanted(path) else array

    model.update(tree_map_with_path(cast, model.parameters()))


def _parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def load_drafter(spec: LoadSpec, target: Target) -> tuple[Drafter, str | None, str | None]:
    """The drafter, its name, and a notice when one was looked for and not found."""
    if spec.spec == "off":
        return NoDrafter(), None, None
    name, looks_up = registry.split(spec.draft)
    model, shown, notice = _load_model_drafter(name, spec, target)
    if not looks_up:
        return model, shown, notice and f"plain decoding: {notice}"
    if shown is not None:
        return CompositeDrafter(model), f"{shown}+{registry.LOOKUP}", None
    block = LOOKUP_BLOCK if spec.block is None else spec.block
    if not 2 <= block <= LOOKUP_MOST:
        raise LoadError(f"block {block} does not fit lookup, which drafts 2 to {LOOKUP_MOST}")
    return CompositeDrafter(model, block), registry.LOOKUP, notice and f"lookup alone: {notice}"


def _load_model_drafter(
    name: str, spec: LoadSpec, target: Target
) -> tuple[Drafter, str | None, str | None]:
    """The draft model, its name, and why there is none where one was looked for."""
    draft: registry.Draft | None = registry.Draft(name)
    if name == "none":
        return NoDrafter(), None, None
    if name == "auto":
        draft = registry.draft_for(spec.target)
        if draft is None:
            return NoDrafter(), None, "no draft is known for this target"
    assert draft is not None
    try:
        folder = find(draft.name, draft.revision)
    except LoadError as e:
        if name != "auto":
            raise
        return NoDrafter(), None, f"its draft is not to be had: {e}"
    shown = registry.DEMO if folder == demo.DRAFT_DIR else draft.name
    return load_dflash(folder, target, spec.block, spec.draft_quant), shown, None


def load_dflash(
    folder: Path, target: Target, block: int | None, quant: DraftQuant = "none"
) -> DFlashDrafter:
    """A DFlash draft for a target. Raises LoadError with the reason when the pair does not fit."""
    try:
        config = replace(DraftConfig.parse(read_config(folder)), quant=quant)
    except LoadError as e:
        raise LoadError(f"{folder}: {e}") from e
    for what, ours, theirs in (
        ("layers", config.num_target_layers, target.layers),
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise LoadError(
                f"{folder}: this draft was made for another target: its {what} is {ours:,}, the "
                f"target's is {theirs:,}"
            )
    if not all(0 <= tap < target.layers for tap in config.target_layer_ids):
        raise LoadError(f"{folder}: target_layer_ids reach past the target's last layer")
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise LoadError(f"{folder}: mask_token_id is outside the target's vocabulary")
    if block is not None and not 2 <= block <= config.block_size:
        raise LoadError(
            f"{folder}: block {block} does not fit; this draft was trained for blocks of "
            f"{config.block_size}, so choose 2 to {config.block_size} (or draft none)"
        )
    second = config.second is not None
    model = Draft2Model(config) if second else DraftModel(config)
    _fill(model, folder / "model.safetensors", target.dtype)
    try:
        quantise(model, quant)
    except LoadError as e:
        raise LoadError(f"{folder}: {e}") from e
    drafter = DFlash2Drafter if second else DFlashDrafter
    return drafter(model, config, target, block or config.block_size)


def _fill(model: nn.Module, path: Path, dtype: mx.Dtype) -> None:
    """Load the tensors of a draft, all of them and no others, by name and shape."""
    if not path.exists():
        raise LoadError(f"{path}: not found")
    try:
        weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    except (RuntimeError, ValueError) as e:
        raise LoadError(f"{path}: cannot be read: {_first_line(e)}") from e
    weights = {_public_name(name): array for name, array in weights.items()}
    wanted = {name: array.shape for name, array in _parameters(model).items()}
    odd = [f"{name} is missing" for name in sorted(wanted.keys() - weights.keys())]
    odd += [f"{name} is not known" for name in sorted(weights.keys() - wanted.keys())]
    odd += [
        f"{name} is {weights[name].shape}, should be {shape}"
        for name, shape in sorted(wanted.items())
        if name in weights and weights[name].shape != shape
    ]
    if odd:
        more = f" (and {len(odd) - 3} more)" if len(odd) > 3 else ""
        raise LoadError(f"{path}: not a DFlash draft of this shape: {'; '.join(odd[:3])}{more}")
    model.load_weights([(name, array.astype(dtype)) for name, array in weights.items()])
    mx.eval(model.parameters())


def _public_name(name: str) -> str:
    """A tensor's name as the public layout has it; some checkpoints spell a few otherwise."""
    for theirs, ours in _RENAMED:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


_RENAMED = (
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("encoder.fc.", "fc."),
    ("midlayer.", "layers.0."),
)


def eos_tokens(folder: Path, config: dict[str, Any]) -> set[int]:
    """End-of-sequence ids of the model's config and generation config together."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    sources = [config, config.get("text_config") or {}]
    if generation.exists():
        try:
            sources.append(json.loads(generation.read_text("utf-8")))
        except ValueError as e:
            raise LoadError(f"{generation}: not valid JSON: {e}") from e
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            found |= {int(i) for i in (ids if isinstance(ids, list) else [ids])}
    return found


def template_names(tokenizer: Any) -> frozenset[str] | None:
    """The variables that the chat template reads; None where that cannot be told."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return None
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:
        return None  # it has tags of its own
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def _tokenizer(folder: Path, eos: list[int]) -> Any:
    try:
        return load_tokenizer(folder, eos_token_ids=eos or None)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise LoadError(f"{folder}: the tokenizer cannot be loaded: {_first_line(e)}") from e


def _first_line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0]
