"""What torch's own modules say about their tensors: which dimension is summed over, and what cannot grow.

The table of roles is data. A module that is not listed has no known role: its parameters are declared
by the user or decided by the gradient identity, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from torch import nn

from ..errors import Fault
from ..rules.axes import Factor, Role
from ..rules.scale import ONE, Scale

Roles = dict[int, Role]

_OUT_IN: Roles = {0: "out", 1: "in"}
_IN_OUT: Roles = {0: "in", 1: "out"}
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
_ZERO_TO_ZERO_FAILS = (nn.Sigmoid, nn.Softplus, nn.LogSigmoid, nn.Softmax, nn.LogSoftmax, nn.Hardsigmoid)


@dataclass
class Facts:
    """What a module says about one of its tensors."""

    roles: Roles | None
    layouts: dict[int, tuple[Factor, ...]] = field(default_factory=dict)
    fold: Scale = ONE


def facts(
    base: nn.Module, wide: nn.Module, leaf: str, dims: int, owner: tuple[nn.Module, nn.Module] | None
) -> Facts:
    """The roles (and, for attention, the layout) of `base.leaf`, from the two modules that own it.

    `owner` is the pair of parent modules; it matters for the output projection of attention.
    """
    if isinstance(base, nn.MultiheadAttention) and isinstance(wide, nn.MultiheadAttention):
        return _attention(base, wide, leaf)
    if isinstance(base, nn.Linear):
        found = Facts(_OUT_IN if leaf == "weight" else {0: "out"})
        if owner is not None and isinstance(owner[0], nn.MultiheadAttention) and leaf == "weight":
            heads = _attention(owner[0], owner[1], "in_proj_weight")  # type: ignore[arg-type]
            return Facts(_OUT_IN, {1: heads.layouts[0][1:]}, heads.fold**-1)
        return found
    if isinstance(base, nn.Bilinear):
        return Facts({0: "out", 1: "in", 2: "in"} if leaf == "weight" else {0: "out"})
    if isinstance(base, nn.modules.conv._ConvTransposeNd) and isinstance(wide, nn.modules.conv._ConvNd):
        grouped = base.groups != wide.groups
        return Facts((_OUT_IN if grouped else _IN_OUT) if leaf == "weight" else {0: "out"})
    if isinstance(base, nn.modules.conv._ConvNd) and isinstance(wide, nn.modules.conv._ConvNd):
        return _convolution(base, wide, leaf)
    if isinstance(base, (nn.Embedding, nn.EmbeddingBag)):
        return Facts({1: "out"})
    if isinstance(base, nn.modules.rnn.RNNBase):
        return Facts(_OUT_IN if leaf.startswith("weight") else {0: "out"})
    if isinstance(base, (*_NORMS, nn.PReLU)):
        return Facts(dict.fromkeys(range(dims), "out"))
    if type(base).__name__ == "Conv1D" and hasattr(base, "nf"):  # transformers' GPT-2 layer, (in, out)
        return Facts(_IN_OUT if leaf == "weight" else {0: "out"})
    return Facts(None)


def _convolution(base: nn.modules.conv._ConvNd, wide: nn.modules.conv._ConvNd, leaf: str) -> Facts:
    found = Facts(_OUT_IN if leaf == "weight" else {0: "out"})
    per_group = base.out_channels // base.groups
    if base.groups != wide.groups and per_group > 1:
        k = Fraction(wide.groups, base.groups)
        found.layouts[0] = (
            Factor(base.groups, k),
            Factor(per_group, Fraction(wide.out_channels // wide.groups, per_group)),
        )
    return found


def _attention(base: nn.MultiheadAttention, wide: nn.MultiheadAttention, leaf: str) -> Facts:
    """Heads are copied whole; a growing head size k needs k^-1/4 on q, k, v and k^1/4 on the way out.

    torch scales the logits by 1/sqrt(head size), and k copies of q·k add up: k / sqrt(k) = k^1/2 too much.
    """
    k_heads = Fraction(wide.num_heads, base.num_heads)
    k_size = Fraction(wide.head_dim, base.head_dim)
    heads = (Factor(base.num_heads, k_heads), Factor(base.head_dim, k_size))
    fold = Scale.of(k_size) ** Fraction(-1, 4)
    if leaf in ("in_proj_weight", "in_proj_bias"):
        roles = _OUT_IN if leaf == "in_proj_weight" else {0: "out"}
        return Facts(roles, {0: (Factor(3), *heads)}, fold)  # type: ignore[arg-type]
    if leaf in ("bias_k", "bias_v"):
        return Facts({2: "out"}, {2: heads}, fold)
    return Facts(_OUT_IN, {0: heads}, fold)


def unsupported(base: nn.Module, wide: nn.Module, name: str) -> Iterator[Fault]:
    """Reasons why a module, whose tensors grow, cannot be widened exactly."""
    if isinstance(base, (nn.Embedding, nn.EmbeddingBag)) and base.max_norm is not None:
        yield Fault(
            name,
            f"Embedding(max_norm={base.max_norm}) clips the norm of a row, and that norm depends on the width",
            "build both models with max_norm=None",
        )
    if (
        isinstance(base, nn.GroupNorm)
        and isinstance(wide, nn.GroupNorm)
        and base.num_groups != wide.num_groups
    ):
        yield Fault(
            name,
            f"num_groups grows from {base.num_groups} to {wide.num_groups}, so copies of one channel would be "
            "normalised in different groups",
            f"build the wide model with num_groups={base.num_groups}",
        )
    if isinstance(base, nn.LocalResponseNorm):
        yield Fault(name, "LocalResponseNorm mixes a fixed number of neighbouring channels", "remove it")


def parametrized(name: str) -> bool:
    """True for the tensors that weight_norm and spectral_norm put in place of a weight."""
    leaf = name.rpartition(".")[2]
    return ".parametrizations." in f".{name}" or leaf in ("weight_g", "weight_v", "weight_orig", "weight_u")


def padding_needs(model: nn.Module) -> set[str]:
    """What a zero-padded plan relies on."""
    needs = {"every activation on a padded axis maps 0 to 0"}
    for name, module in model.named_modules():
        if isinstance(module, _ZERO_TO_ZERO_FAILS):
            needs.add(f"{name} ({type(module).__name__}) is not on a padded axis")
    return needs
