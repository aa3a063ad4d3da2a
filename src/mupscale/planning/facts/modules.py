"""The roles of tensors in torch's own modules: which dimension is summed over, and what cannot grow.

The table of roles is data. A module that is not listed has no known role: its parameters are declared
by the user or decided by the gradient identity, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from ...errors import Fault
from ...models.kinds import KNOWN_NORMS
from ...models.need import Need
from ...rules.axes import Axis, Role
from ...rules.products import Factor, grow
from ...rules.scale import ONE, Scale

Roles = dict[int, Role]

_OUT_IN: Roles = {0: "out", 1: "in"}
_IN_OUT: Roles = {0: "in", 1: "out"}
# Activations with f(0) != 0, and softmax, in which zeros count: padding does not stay zero after them.
_ZERO_ELSEWHERE = (
    nn.Sigmoid, nn.Softplus, nn.LogSigmoid, nn.Softmax, nn.LogSoftmax, nn.Hardsigmoid, nn.Threshold, nn.AlphaDropout,
)  # fmt: skip


@dataclass
class Facts:
    """The roles and the layout that a module gives one of its tensors."""

    roles: Roles | None
    layouts: dict[int, tuple[Factor, ...]] = field(default_factory=dict)
    fold: Scale = ONE


def facts(
    base: nn.Module,
    wide: nn.Module,
    leaf: str,
    dims: int,
    owner: tuple[nn.Module, nn.Module] | None,
    pad: bool,
) -> Facts:
    """The roles (and, where a module has parts, the layout) of `base.leaf`, from the two modules that own it.

    `owner` is the pair of parent modules; it matters for the output projection of attention.
    """
    bias: Roles = {0: "out"}
    if _added(base, leaf):
        return Facts(None)
    if isinstance(base, nn.MultiheadAttention) and isinstance(wide, nn.MultiheadAttention):
        return _attention(base, wide, leaf, pad)
    if isinstance(base, nn.Linear):
        if owner is not None and isinstance(owner[0], nn.MultiheadAttention) and leaf == "weight":
            heads = _attention(owner[0], owner[1], "q_proj_weight", pad)  # type: ignore[arg-type]
            return Facts(_OUT_IN, {1: heads.layouts[0]}, heads.fold**-1)
        return Facts(_OUT_IN if leaf == "weight" else bias)
    if isinstance(base, nn.Bilinear):
        return Facts({0: "out", 1: "in", 2: "in"} if leaf == "weight" else bias)
    if isinstance(base, _ConvNd) and isinstance(wide, _ConvNd):
        return _convolution(base, wide, leaf, pad)
    if isinstance(base, (nn.Embedding, nn.EmbeddingBag)):
        return Facts({1: "out"})
    if isinstance(base, RNNBase) and isinstance(wide, RNNBase):
        return _recurrent(base, wide, leaf, pad)
    if isinstance(base, RNNCellBase) and isinstance(wide, RNNCellBase):
        return _cell(base, wide, leaf, pad)
    if isinstance(base, (*KNOWN_NORMS, nn.PReLU)):
        return Facts(dict.fromkeys(range(dims), "out"))
    if type(base).__name__ == "Conv1D" and hasattr(base, "nf"):  # transformers' GPT-2 layer, (in, out)
        return Facts(_IN_OUT if leaf == "weight" else bias)
    return Facts(None)


def _added(module: nn.Module, leaf: str) -> bool:
    """True for a parameter of a layer that torch's class does not have: a subclass added it, as LoRA does."""
    plain = (nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag, *KNOWN_NORMS)
    return isinstance(module, plain) and leaf not in ("weight", "bias")


def _convolution(base: _ConvNd, wide: _ConvNd, leaf: str, pad: bool) -> Facts:
    """Growing groups keep the channels of a group together; fixed groups are plain on both sides."""
    if leaf != "weight":
        found = Facts({0: "out"})
    elif not base.transposed:
        found = Facts(_OUT_IN)
    else:  # (in, out / groups): with growing groups nothing is summed over the copies
        return Facts(_IN_OUT if base.groups == wide.groups else _OUT_IN)
    if base.groups != wide.groups:
        found.layouts[0] = _groups(base, wide, base.out_channels, wide.out_channels, pad)
    return found


def _groups(base: _ConvNd, wide: _ConvNd, channels: int, goal: int, pad: bool) -> tuple[Factor, ...]:
    inner = grow(channels // base.groups, goal // wide.groups)
    return (grow(base.groups, wide.groups, pad), inner)


def grouped_reading(base: nn.Module, wide: nn.Module, pad: bool) -> Axis | None:
    """The layout in which a convolution with growing groups reads its input, which no tensor shows."""
    if not isinstance(base, _ConvNd) or not isinstance(wide, _ConvNd) or base.groups == wide.groups:
        return None
    return Axis.of(_groups(base, wide, base.in_channels, wide.in_channels, pad), role="in")


def _recurrent(base: RNNBase, wide: RNNBase, leaf: str, pad: bool) -> Facts:
    """Rows have one part per gate; layers after the first read both directions."""
    gates = Factor({"LSTM": 4, "GRU": 3}.get(base.mode, 1))
    hidden = grow(base.hidden_size, wide.hidden_size, pad)
    if leaf.startswith("bias"):
        return Facts({0: "out"}, {0: (gates, hidden)})
    if leaf.startswith("weight_hr"):
        return Facts(_OUT_IN, {1: (hidden,)})
    layouts: dict[int, tuple[Factor, ...]] = {0: (gates, hidden)}
    output = grow(base.proj_size or base.hidden_size, wide.proj_size or wide.hidden_size, pad)
    if leaf.startswith("weight_hh"):
        layouts[1] = (output,)
    elif not leaf.startswith("weight_ih_l0"):
        layouts[1] = (Factor(2 if base.bidirectional else 1), output)
    return Facts(_OUT_IN, layouts)


def _cell(base: RNNCellBase, wide: RNNCellBase, leaf: str, pad: bool) -> Facts:
    """Rows are one part per gate, as in the layers: LSTMCell(3, 4) has weight_hh of shape (4 gates * 4, 4)."""
    hidden = grow(base.hidden_size, wide.hidden_size, pad)
    rows = (Factor(base.weight_hh.shape[0] // base.hidden_size), hidden)
    if leaf.startswith("bias"):
        return Facts({0: "out"}, {0: rows})
    return Facts(_OUT_IN, {0: rows, 1: (hidden,)} if leaf == "weight_hh" else {0: rows})


def recurrent_output(base: nn.Module, wide: nn.Module, pad: bool) -> Axis | None:
    """The layout that a recurrent layer or cell writes: its hidden units, in a layer once per direction."""
    if isinstance(base, RNNCellBase) and isinstance(wide, RNNCellBase):
        axis = Axis.of((grow(base.hidden_size, wide.hidden_size, pad),), role="out")
        return axis if axis.grows else None
    if not isinstance(base, RNNBase) or not isinstance(wide, RNNBase):
        return None
    output = grow(base.proj_size or base.hidden_size, wide.proj_size or wide.hidden_size, pad)
    axis = Axis.of((Factor(2 if base.bidirectional else 1), output), role="out")
    return axis if axis.grows else None


def _attention(base: nn.MultiheadAttention, wide: nn.MultiheadAttention, leaf: str, pad: bool) -> Facts:
    """Heads are copied whole; a growing head size k needs k^-1/4 on q, k, v and k^1/4 on the way out.

    torch scales the logits by 1/sqrt(head size), and k copies of q·k add up: k / sqrt(k) = k^1/2 too much.
    """
    size = grow(base.head_dim, wide.head_dim)
    heads = (grow(base.num_heads, wide.num_heads, pad), size)
    fold = Scale.of(size.k) ** Fraction(-1, 4)
    if leaf == "in_proj_weight":
        return Facts(_OUT_IN, {0: (Factor(3), *heads)}, fold)
    if leaf == "in_proj_bias":
        return Facts({0: "out"}, {0: (Factor(3), *heads)}, fold)
    if leaf in ("bias_k", "bias_v"):
        return Facts({2: "out"}, {2: heads}, fold)
    return Facts(_OUT_IN, {0: heads}, fold)


def unsupported(base: nn.Module, wide: nn.Module, name: str) -> Iterator[Fault]:
    """Reasons why a module cannot be widened exactly, whatever the layout."""
    grows = any(
        a.shape != b.shape for a, b in zip(base.parameters(False), wide.parameters(False), strict=False)
    )
    if isinstance(base, (nn.Embedding, nn.EmbeddingBag)) and base.max_norm is not None and grows:
        yield Fault(
            "model.embedding_max_norm",
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
            "model.norm_groups_grow",
            name,
            f"num_groups grows from {base.num_groups} to {wide.num_groups}, so copies of one channel would be "
            "normalised in different groups",
            f"build the wide model with num_groups={base.num_groups}",
        )


def maps_zero_elsewhere(module: nn.Module) -> bool:
    """True for activations that do not map 0 to 0, through which padding leaks."""
    return isinstance(module, _ZERO_ELSEWHERE)


def leaking_pads(model: nn.Module, remedy: str) -> list[Fault]:
    """A fault for every activation that padding may leak through."""
    return [
        Fault(
            "axis.padding_leaks",
            path,
            f"{type(module).__name__} does not map 0 to 0, so padding may leak through it",
            remedy,
        )
        for path, module in model.named_modules()
        if maps_zero_elsewhere(module)
    ]


def padding_needs(model: nn.Module) -> set[Need]:
    """What a zero-padded plan relies on."""
    needs = {Need("every activation on a padded axis maps 0 to 0", "assumption")}
    for name, module in model.named_modules():
        if isinstance(module, _ZERO_ELSEWHERE):
            needs.add(Need(f"{name} ({type(module).__name__}) is not on a padded axis", "assumption"))
    return needs
