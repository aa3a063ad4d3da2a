"""Classes with experts that hold a dense model: which of its fields and tensors go where, as data.

The dense feed-forward layer becomes the expert that every token goes to, and routed experts are added next to it. Whether
a row is right is not taken for granted: `steps/experts.py` tries it on a small copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import Fault, raise_faults
from ..config.fields import DECODERS
from ..config.multipliers import Experts
from .symbols import symbols

Data = Mapping[str, Any]
_CLAIM = "this model cannot get experts exactly like that"
# Fields that dense decoders and classes with experts have in common.
_CARRIED = (
    *DECODERS, "hidden_size", "num_attention_heads", "num_key_value_heads", "use_cache", "attention_bias",
)  # fmt: skip
_GATED = "it multiplies its shared expert by a gate that trains, so that expert is not the dense layer"
GATED: Mapping[str, str] = dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"), _GATED)
"""Types with a shared expert that cannot hold a dense layer, and why."""


@dataclass(frozen=True)
class Target:
    """One class with experts. Names of tensors are those inside a block."""

    architecture: str
    takes: tuple[str, ...]
    """Types of dense models whose tensors and arithmetic it has."""
    fields: Callable[[Data, Experts], dict[str, Any]]
    """Its own fields, for the fields of a dense model."""
    made: Mapping[str, tuple[str, ...]]
    """Tensor -> the dense tensors it is made of, joined along their rows."""
    asleep: Mapping[str, str]
    """New tensor -> the dense tensor it is like."""
    copies: bool = False
    """Whether its experts are copies of the dense layer, all of which every token goes to."""
    renormalised: bool = True
    """Whether the weights of a token's experts are divided by their sum, so that one expert alone always has weight 1."""
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Field of the dense model that must not be set -> the code of the refusal, and why."""


def _granite(base: Data, experts: Experts) -> dict[str, Any]:
    scales = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    scales["attention_multiplier"] = symbols(base)["D"] ** -0.5
    return {
        **{key: base.get(key, usual) for key, usual in scales.items()},
        "intermediate_size": experts.ffn,
        "shared_intermediate_size": base["intermediate_size"],
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }


def _several_shared(base: Data, experts: Experts) -> dict[str, Any]:
    """Fields of classes whose shared expert is a whole number of routed ones."""
    ffn = base["intermediate_size"]
    if ffn % experts.ffn:
        what = f"{experts.ffn}: here the dense layer of {ffn} becomes whole experts of this size"
        nearest = max(n for n in range(1, experts.ffn + 1) if ffn % n == 0)
        raise_faults(
            _CLAIM,
            [
                Fault(
                    "experts.ffn_not_a_divisor",
                    "expert_ffn",
                    what,
                    f"write a divisor of {ffn}, such as {nearest}",
                )
            ],
        )
    return {
        "intermediate_size": ffn,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": ffn // experts.ffn,
        "n_routed_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "output_router_logits": False,
    }


def _glm4(base: Data, experts: Experts) -> dict[str, Any]:
    rope = {**(base.get("rope_parameters") or {}), "partial_rotary_factor": 1.0}
    more = {"rope_parameters": rope, "use_qk_norm": False, "norm_topk_prob": True, "num_mtp_layers": 0}
    return {**_several_shared(base, experts), **more}


def _mixtral(base: Data, experts: Experts) -> dict[str, Any]:
    return {
        "intermediate_size": experts.ffn,
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "router_jitter_noise": 0.0,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }


def _qwen3_moe(base: Data, experts: Experts) -> dict[str, Any]:
    return {
        "intermediate_size": experts.ffn,
        "moe_intermediate_size": experts.ffn,
        "num_experts": experts.number,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "use_sliding_window": False,
    }


def _dots1(base: Data, experts: Experts) -> dict[str, Any]:
    more = {"norm_topk_prob": False, "sliding_window": None, "layer_types": base.get("layer_types")}
    return {**_several_shared(base, experts), **more}


_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_WINDOW = ("experts.class_without_window", "attention is cut at a window, which this class does not have")
_NO_BIAS = "experts.class_without_bias"
_BIAS = (_NO_BIAS, "its feed-forward layers have biases, which this class does not have")
_SHARED = {f"mlp.shared_experts.{name.removeprefix('mlp.')}": (name,) for name in _MLP}
_ROUTED = {
    "mlp.gate.weight": _MLP[0],
    "mlp.experts.gate_up_proj": _MLP[0],
    "mlp.experts.down_proj": _MLP[2],
}
_COPIED = {"mlp.experts.gate_up_proj": _MLP[:2], "mlp.experts.down_proj": _MLP[2:]}
TARGETS: Mapping[str, Target] = {
    "granitemoeshared": Target(
        "GraniteMoeSharedForCausalLM",
        ("llama", "mistral", "granite"),
        _granite,
        {"shared_mlp.input_linear.weight": _MLP[:2], "shared_mlp.output_linear.weight": _MLP[2:]},
        {
            "block_sparse_moe.router.weight": _MLP[0],
            "block_sparse_moe.experts.gate_up_proj": _MLP[0],
            "block_sparse_moe.experts.down_proj": _MLP[2],
        },
        refused={"mlp_bias": _BIAS, "sliding_window": _WINDOW},
    ),
    "glm4_moe": Target(
        "Glm4MoeForCausalLM",
        ("llama", "mistral"),
        _glm4,
        _SHARED,
        _ROUTED,
        refused={
            "mlp_bias": _BIAS,
            "sliding_window": _WINDOW,
            "attention_bias": (
                _NO_BIAS,
                "its output projections of attention have biases, which this class does not have",
            ),
        },
    ),
    "dots1": Target(
        "Dots1ForCausalLM",
        ("qwen3",),
        _dots1,
        _SHARED,
        _ROUTED,
        renormalised=False,
        refused={"sliding_window": _WINDOW},
    ),
    "mixtral": Target(
        "MixtralForCausalLM",
        ("llama", "mistral"),
        _mixtral,
        _COPIED,
        {"mlp.gate.weight": _MLP[0]},
        copies=True,
        refused={
            "mlp_bias": _BIAS,
            "sliding_window": _WINDOW,
            "attention_bias": (_NO_BIAS, "attention has biases, which this class does not have"),
        },
    ),
    "qwen3_moe": Target(
        "Qwen3MoeForCausalLM",
        ("qwen3",),
        _qwen3_moe,
        _COPIED,
        {"mlp.gate.weight": _MLP[0]},
        copies=True,
        refused={"sliding_window": _WINDOW},
    ),
}


def experts_are_copies(experts: Experts) -> bool:
    """Whether the class that was named holds copies of the dense layer; the usual ones do not."""
    return experts.into is not None and experts.into in TARGETS and TARGETS[experts.into].copies


def target_of(base: Data, architecture: str, experts: Experts) -> Target:
    """The class that a dense model goes into: the one that was named, or the first that takes its type."""
    kind, named = str(base.get("model_type")), experts.into
    fitting = [name for name, target in TARGETS.items() if kind in target.takes]
    other = f"write --into {fitting[0]}" if fitting else ""
    faults = []
    if named is not None and named in GATED:
        faults = [Fault("experts.shared_expert_gated", f"--into {named}", GATED[named], other)]
    elif named is not None and named not in TARGETS:
        what = f"no such class with experts, expected one of {', '.join(TARGETS)}"
        faults = [Fault("experts.unknown_class", f"--into {named}", what, other)]
    elif named is None and not fitting:
        what = f"no class with experts is known that holds a {kind}; there are some for {', '.join(_known())}"
        faults = [Fault("experts.no_class_known", kind, what)]
    elif named is not None and named not in fitting:
        faults = [
            Fault(
                "experts.class_does_not_fit",
                f"--into {named}",
                f"it does not have the tensors and the arithmetic of {kind}",
                other,
            )
        ]
    elif not architecture.endswith("ForCausalLM"):
        what = f"{architecture}: classes with experts are known for language models"
        faults = [Fault("experts.not_a_language_model", kind, what)]
    raise_faults(_CLAIM, faults)
    return TARGETS[named or fitting[0]]


def _known() -> list[str]:
    return sorted({kind for target in TARGETS.values() for kind in target.takes})


def with_experts(base: Data, target: Target, experts: Experts) -> dict[str, Any]:
    """The configuration of the class with experts, at the width and depth of the base; refused where it has none."""
    faults = [Fault(code, key, why) for key, (code, why) in target.refused.items() if base.get(key)]
    if experts.top_k > experts.number:
        what = f"{experts.top_k} of {experts.number} experts for every token"
        faults.append(
            Fault("experts.top_k_too_large", "top_k", what, f"write at most top_k={experts.number}")
        )
    elif experts.top_k == 1 and target.renormalised:
        what = "this router's one weight is always 1, so it would never learn"
        faults.append(
            Fault("experts.router_never_learns", f"experts={experts.number},top_k=1", what, "write top_k=2")
        )
    if target.copies and experts.top_k != experts.number:
        what = f"{experts.top_k} of {experts.number}: copies that a router chooses from see different tokens, so they part from the base"
        faults.append(Fault("experts.copies_need_all", "top_k", what, f"write top_k={experts.number}"))
    if target.copies and experts.ffn != base["intermediate_size"]:
        what = f"{experts.ffn}: copies have the width of the dense layer"
        faults.append(
            Fault(
                "experts.copies_of_other_width",
                "expert_ffn",
                what,
                f"write expert_ffn={base['intermediate_size']}",
            )
        )
    raise_faults(_CLAIM, faults)
    kind = next(name for name, known in TARGETS.items() if known is target)
    return {
        "model_type": kind,
        "architectures": [target.architecture],
        **{key: base[key] for key in _CARRIED if key in base},
        "head_dim": symbols(base)["D"],
        **target.fields(base, experts),
    }
