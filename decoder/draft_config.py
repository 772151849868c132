"""The configuration of a DFlash draft checkpoint, in all its public spellings.

Draft-specific keys are looked up in `dflash_config`, then at top level, then take a default.
What would change the arithmetic and is not implemented is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_batch.decoder.errors import LoadError

_NESTED = {
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "causal",
    "is_causal",
    "final_logit_softcapping",
    "input_embedding_scale",
    "output_multiplier",
}
"""Keys of `dflash_config` that are honoured."""

_EXTENSIONS = {
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_mode",
    "projector_type",
    "draft_vocab_size",
    "quantization_config",
    "target_hidden_size",
    "selector_vocab_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
    "speculators_model_type",
    "speculators_config",
}
"""Keys that change what the draft computes; none is implemented. The last ones are of DSpark and of
speculators checkpoints, whose taps are counted from the embedding."""

_SAME = {
    "draft_vocab_size": "vocab_size",
    "selector_vocab_size": "vocab_size",
    "target_hidden_size": "hidden_size",
}
"""Extensions that change nothing where they repeat another key."""

_ROPES = ("default", "linear", "llama3", "yarn", "longrope")

_V2 = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
"""Keys of `dflash_config` that a DFlash 2 draft must have, and a DFlash draft cannot."""

KINDS = ("DFlashDraftModel", "DFlash2DraftModel")


@dataclass(frozen=True)
class SecondGeneration:
    """What a DFlash 2 draft has on top."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True)
class DraftConfig:
    """Everything the draft's forward depends on."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    attention_bias: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    windows: tuple[int | None, ...]  # of each layer; None: full attention
    causal: tuple[bool, ...]  # of each layer, inside the block
    softcap: float | None
    embedding_scale: float
    output_multiplier: float
    second: SecondGeneration | None = None  # of a DFlash 2 draft
    quant: str = "none"  # what its weights were quantised to when loaded

    @staticmethod
    def parse(config: dict[str, Any]) -> DraftConfig:
        """Read a `config.json`. Raises LoadError that names what is missing or not supported."""
        nested = config.get("dflash_config") or {}
        kind = _kind(config, nested)

        def find(name: str, default: Any = None) -> Any:
            return nested.get(name, config.get(name, default))

        def need(name: str) -> Any:
            value = find(name)
            if value is None:
                raise LoadError(f"the draft's config.json has no {name}")
            return value

        layers = int(need("num_hidden_layers"))
        target_layers = find("num_target_layers")
        taps = find("target_layer_ids")
        if taps is None:
            taps = default_taps(layers, int(need("num_target_layers")))
        theta, scaling = _rope(config)
        windows, causal = _attention(config, nested, layers)
        heads = int(need("num_attention_heads"))
        if config.get("hidden_act", "silu") != "silu":
            raise LoadError(f"the draft's hidden_act {config['hidden_act']} is not supported")
        hidden = int(need("hidden_size"))
        softcap = find("final_logit_softcapping")
        return DraftConfig(
            hidden_size=hidden,
            intermediate_size=int(need("intermediate_size")),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            rms_norm_eps=float(need("rms_norm_eps")),
            vocab_size=int(need("vocab_size")),
            attention_bias=bool(config.get("attention_bias", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(config.get("max_position_embeddings") or 0),
            block_size=int(find("block_size", 16)),
            mask_token_id=int(need("mask_token_id")),
            target_layer_ids=tuple(int(i) for i in taps),
            num_target_layers=int(target_layers) if target_layers is not None else max(taps) + 1,
            windows=windows,
            causal=causal,
            softcap=float(softcap) if softcap else None,
            embedding_scale=float(find("input_embedding_scale", 1.0)),
            output_multiplier=float(find("output_multiplier", 1.0)),
            second=SecondGeneration(**{name: int(need(name)) for name in sorted(_V2)})
            if kind == "DFlash2DraftModel"
            else None,
        )


def default_taps(layers: int, target_layers: int) -> tuple[int, ...]:
    """The taps of a draft that names none: one for each draft layer, spread over the target."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def _kind(config: dict[str, Any], nested: dict[str, Any]) -> str:
    """The draft's architecture; what it cannot have is refused by name."""
    named = config.get("architectures") or ["DFlashDraftModel"]
    kind = next((kind for kind in KINDS if kind in named), None)
    if kind is None:
        raise LoadError(f"this is not a DFlash draft: its config.json says {named[0]}")
    known = _NESTED | _V2 if kind == "DFlash2DraftModel" else _NESTED
    said = {
        key: value
        for key, value in (*config.items(), *nested.items())
        if value not in (None, False, 0) and value != config.get(_SAME.get(key, ""), ())
    }
    unknown = sorted((_EXTENSIONS & said.keys()) | (nested.keys() - known - _EXTENSIONS))
    if unknown:
        raise LoadError(
            "the draft's config.json uses extensions that are not supported: " + ", ".join(unknown)
        )
    return kind


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_theta` + `rope_scaling` or from `rope_parameters`."""
    nested = config.get("rope_parameters") or {}
    by_kind = [value for value in nested.values() if isinstance(value, dict)]
    if by_kind:
        if any(value != by_kind[0] for value in by_kind):
            raise LoadError("the draft's rope_parameters differ by layer_types: not supported")
        nested = by_kind[0]
    theta = config.get("rope_theta", nested.get("rope_theta"))
    if theta is None:
        raise LoadError("the draft's config.json has no rope_theta; it cannot be guessed")
    scaling = config.get("rope_scaling") or (nested or None)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind not in _ROPES:
        raise LoadError(f"the draft uses {kind} rope scaling, which is not supported")
    return float(theta), None if kind == "default" else scaling


def _attention(
    config: dict[str, Any], nested: dict[str, Any], layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Window and in-block causality of each layer.

    `is_causal` at top level holds for all layers, else `dflash_config.causal` does, or one of the
    two in the other's place; without any, a layer is causal inside the block iff it slides.
    """
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise LoadError(f"the draft has {layers} layers but {len(kinds)} layer_types")
    odd = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if odd:
        raise LoadError("the draft's layer_types are not supported: " + ", ".join(odd))
    sliding = [kind == "sliding_attention" for kind in kinds]
    window: int | None = config.get("sliding_window")
    if any(sliding) and not window:
        raise LoadError("the draft has sliding layers but no sliding_window")
    places = ((config, "is_causal"), (nested, "causal"), (nested, "is_causal"), (config, "causal"))
    fixed = next((place[key] for place, key in places if place.get(key) is not None), None)
    return (
        tuple(window if s else None for s in sliding),
        tuple(s if fixed is None else bool(fixed) for s in sliding),
    )
