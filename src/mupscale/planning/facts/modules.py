"""What is known of torch's own modules, one row of `MODULES` for each: roles of tensors, and what zeros and copies meet.

A module without a row has no known role: its parameters are declared by the user or decided by the gradient identity,
never guessed. A subclass has the row of its class, but a parameter that it adds, as LoRA does, has no role.

>>> row_of(nn.Conv2d(1, 1, 1)).sizes, row_of(nn.Sigmoid()).keeps_zero, row_of(nn.GLU()).features
(('in_channels', 'out_channels', 'groups'), False, 'mixed')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from ...errors import Fault
from ...models.dropout import dropout_needs
from ...models.need import Need
from ...rules.axes import Axis, Role
from ...rules.products import Factor, Ways
from ...rules.scale import ONE, Scale

Roles = dict[int, Role]

_OUT: Roles = {0: "out"}
_OUT_IN: Roles = {0: "out", 1: "in"}
_IN_OUT: Roles = {0: "in", 1: "out"}


@dataclass
class Facts:
    """The roles and the layout that a module gives one of its tensors."""

    roles: Roles | None
    layouts: dict[int, tuple[Factor, ...]] = field(default_factory=dict)
    fold: Scale = ONE


@dataclass(frozen=True)
class ModuleFacts:
    """A row: what is known of one class of modules."""

    roles: Mapping[str, Roles | Callable[[Any, Any, str, Ways], Facts]] = field(default_factory=dict)
    """Pattern of its tensors' names -> their roles, or a function of (base, wide, name, ways) that finds them."""
    sizes: tuple[str, ...] = ()
    """Attributes that hold sizes. Any other setting must be the same in both models."""
    features: Literal["entrywise", "per channel", "mixed"] | None = None
    """What a module without tensors does: a function of one entry (or nothing), the same with every channel (which are
    dimension 1), or something in which channels meet: neighbours, blocks or all. Plain copies are wrong for some that
    mix, and shapes do not show for which."""
    keeps_zero: bool = True
    """Whether padding stays zero: false for f(0) != 0, and for softmax, in which zeros count."""
    rate: str = ""
    """The attribute that holds a dropout rate."""
    reads: Callable[[Any, Any, Ways], Axis | None] = lambda base, wide, ways: None
    """A function of (base, wide, ways): the layout in which it reads its input, if no tensor shows it."""
    writes: Callable[[Any, Any, Ways], Axis | None] = lambda base, wide, ways: None
    """The same for its output."""


def _convolution(base: _ConvNd, wide: _ConvNd, leaf: str, ways: Ways) -> Facts:
    """Growing groups keep the channels of a group together; fixed groups are plain on both sides."""
    if leaf != "weight":
        found = Facts(_OUT)
    elif not base.transposed:
        found = Facts(_OUT_IN)
    else:  # (in, out / groups): with growing groups nothing is summed over the copies
        return Facts(_IN_OUT if base.groups == wide.groups else _OUT_IN)
    if base.groups != wide.groups:
        found.layouts[0] = _groups(base, wide, base.out_channels, wide.out_channels, ways)
    return found


def _groups(base: _ConvNd, wide: _ConvNd, channels: int, goal: int, ways: Ways) -> tuple[Factor, ...]:
    inner = Ways().grow(channels // base.groups, goal // wide.groups)
    return (ways.grow(base.groups, wide.groups), inner)


def _grouped_reading(base: _ConvNd, wide: _ConvNd, ways: Ways) -> Axis | None:
    """The layout in which a convolution with growing groups reads its input."""
    if base.groups == wide.groups:
        return None
    return Axis.of(_groups(base, wide, base.in_channels, wide.in_channels, ways), role="in")


def _recurrent(base: RNNBase, wide: RNNBase, leaf: str, ways: Ways) -> Facts:
    """Rows have one part per gate; layers after the first read both directions."""
    gates = Factor({"LSTM": 4, "GRU": 3}.get(base.mode, 1))
    hidden = ways.grow(base.hidden_size, wide.hidden_size)
    if leaf.startswith("bias"):
        return Facts(_OUT, {0: (gates, hidden)})
    if leaf.startswith("weight_hr"):
        return Facts(_OUT_IN, {1: (hidden,)})
    layouts: dict[int, tuple[Factor, ...]] = {0: (gates, hidden)}
    output = ways.grow(base.proj_size or base.hidden_size, wide.proj_size or wide.hidden_size)
    if leaf.startswith("weight_hh"):
        layouts[1] = (output,)
    elif not leaf.startswith("weight_ih_l0"):
        layouts[1] = (Factor(2 if base.bidirectional else 1), output)
    return Facts(_OUT_IN, layouts)


def _cell(base: RNNCellBase, wide: RNNCellBase, leaf: str, ways: Ways) -> Facts:
    """Rows are one part per gate, as in the layers: LSTMCell(3, 4) has weight_hh of shape (4 gates * 4, 4)."""
    hidden = ways.grow(base.hidden_size, wide.hidden_size)
    rows = (Factor(base.weight_hh.shape[0] // base.hidden_size), hidden)
    if leaf.startswith("bias"):
        return Facts(_OUT, {0: rows})
    return Facts(_OUT_IN, {0: rows, 1: (hidden,)} if leaf == "weight_hh" else {0: rows})


def _recurrent_output(base: RNNBase, wide: RNNBase, ways: Ways) -> Axis | None:
    """The layout that a recurrent layer writes: its hidden units, once per direction."""
    output = ways.grow(base.proj_size or base.hidden_size, wide.proj_size or wide.hidden_size)
    axis = Axis.of((Factor(2 if base.bidirectional else 1), output), role="out")
    return axis if axis.grows else None


def _cell_output(base: RNNCellBase, wide: RNNCellBase, ways: Ways) -> Axis | None:
    axis = Axis.of((ways.grow(base.hidden_size, wide.hidden_size),), role="out")
    return axis if axis.grows else None


def _attention(base: nn.MultiheadAttention, wide: nn.MultiheadAttention, leaf: str, ways: Ways) -> Facts:
    """Heads are copied whole; a growing head size k needs k^-1/4 on q, k, v and k^1/4 on the way out.

    torch scales the logits by 1/sqrt(head size), and k copies of q·k add up: k / sqrt(k) = k^1/2 too much.
    """
    size = Ways().grow(base.head_dim, wide.head_dim)
    heads = (ways.grow(base.num_heads, wide.num_heads), size)
    fold = Scale.of(size.k) ** Fraction(-1, 4)
    if leaf == "in_proj_weight":
        return Facts(_OUT_IN, {0: (Factor(3), *heads)}, fold)
    if leaf == "in_proj_bias":
        return Facts(_OUT, {0: (Factor(3), *heads)}, fold)
    if leaf in ("bias_k", "bias_v"):
        return Facts({2: "out"}, {2: heads}, fold)
    return Facts(_OUT_IN, {0: heads}, fold)


def _every_out(base: nn.Module, wide: nn.Module, leaf: str, ways: Ways) -> Facts:
    """Gains multiply units, whatever their shape: LayerNorm([C, H, W]) has three dimensions."""
    return Facts(dict.fromkeys(range(getattr(base, leaf).dim()), "out"))


_GAINS = dict.fromkeys(("weight", "bias"), _every_out)

MODULES: dict[type[nn.Module], ModuleFacts] = {
    # Modules with tensors: roles by name, attributes that hold sizes.
    nn.Linear: ModuleFacts({"weight": _OUT_IN, "bias": _OUT}, ("in_features", "out_features")),
    nn.Bilinear: ModuleFacts({"weight": {0: "out", 1: "in", 2: "in"}, "bias": _OUT},
                             ("in1_features", "in2_features", "out_features")),
    _ConvNd: ModuleFacts(dict.fromkeys(("weight", "bias"), _convolution), ("in_channels", "out_channels", "groups"),
                         reads=_grouped_reading),
    nn.Embedding: ModuleFacts({"weight": {1: "out"}}, ("embedding_dim",)),
    nn.EmbeddingBag: ModuleFacts({"weight": {1: "out"}}, ("embedding_dim",)),
    nn.MultiheadAttention: ModuleFacts(dict.fromkeys(("*_proj_weight", "in_proj_bias", "bias_[kv]"), _attention),
                                       ("embed_dim", "kdim", "vdim", "head_dim", "num_heads"), rate="dropout"),
    RNNBase: ModuleFacts(dict.fromkeys(("weight_*", "bias_*"), _recurrent), ("input_size", "hidden_size", "proj_size"),
                         rate="dropout", writes=_recurrent_output),
    RNNCellBase: ModuleFacts(dict.fromkeys(("weight_*", "bias_*"), _cell), ("input_size", "hidden_size"),
                             writes=_cell_output),
    nn.LayerNorm: ModuleFacts(_GAINS, ("normalized_shape",)),
    nn.RMSNorm: ModuleFacts(_GAINS, ("normalized_shape",)),
    nn.GroupNorm: ModuleFacts(_GAINS, ("num_channels",)),
    _NormBase: ModuleFacts(_GAINS, ("num_features",)),
    nn.PReLU: ModuleFacts(_GAINS, ("num_parameters",)),
    # Modules without tensors, those that are alike in one row: what they do with features and with zeros.
    **dict.fromkeys((
        nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
        nn.Hardtanh, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Softsign, nn.Tanhshrink,
    ), ModuleFacts(features="entrywise")),
    **dict.fromkeys((nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Softplus, nn.Threshold),
                    ModuleFacts(features="entrywise", keeps_zero=False)),
    nn.Dropout: ModuleFacts(features="entrywise", rate="p"),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout),
                    ModuleFacts(features="entrywise", keeps_zero=False, rate="p")),
    **dict.fromkeys((
        nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
        nn.ZeroPad1d, nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    ), ModuleFacts(features="per channel")),
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), ModuleFacts(features="per channel", rate="p")),
    **dict.fromkeys((nn.LocalResponseNorm, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Unflatten, nn.GLU),
                    ModuleFacts(features="mixed")),
    **dict.fromkeys((nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.Softmax2d),
                    ModuleFacts(features="mixed", keeps_zero=False)),
}  # fmt: skip
_UNKNOWN = ModuleFacts()
_CONV1D = ModuleFacts({"weight": _IN_OUT, "bias": _OUT})


def row_of(module: nn.Module) -> ModuleFacts:
    """The row of a module's class, or of the nearest class that it derives from; an empty one if there is none."""
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' GPT-2 layer, (in, out)
        return _CONV1D
    return next((MODULES[kind] for kind in type(module).__mro__ if kind in MODULES), _UNKNOWN)


def facts(
    base: nn.Module, wide: nn.Module, leaf: str, owner: tuple[nn.Module, nn.Module] | None, ways: Ways
) -> Facts:
    """The roles (and, where a module has parts, the layout) of `base.leaf`, from the two modules that own it.

    `owner` is the pair of parent modules; it matters for the output projection of attention.
    """
    row = row_of(base)
    roles = next((found for pattern, found in row.roles.items() if fnmatchcase(leaf, pattern)), None)
    if owner and isinstance(owner[0], nn.MultiheadAttention) and roles is _OUT_IN:
        # The weight of its out_proj reads heads.
        heads = _attention(*owner, "q_proj_weight", ways)  # type: ignore[arg-type]
        return Facts(_OUT_IN, {1: heads.layouts[0]}, heads.fold**-1)
    if not callable(roles):
        return Facts(roles)
    return roles(base, wide, leaf, ways) if row_of(wide) is row else Facts(None)


def unsupported(base: nn.Module, wide: nn.Module, name: str, ways: Ways) -> Iterator[Fault]:
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
        and ways.grow(base.num_groups, wide.num_groups).k != 1
    ):
        yield Fault(
            "model.norm_groups_grow",
            name,
            f"num_groups grows from {base.num_groups} to {wide.num_groups}, so copies of one channel would be "
            "normalised in different groups",
            f'build the wide model with num_groups={base.num_groups}, or add new groups: by="units"',
        )


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
        if not row_of(module).keeps_zero
    ]


def padding_needs(model: nn.Module) -> set[Need]:
    """What a zero-padded plan relies on."""
    needs = {Need("every activation on a padded axis maps 0 to 0", "assumption")}
    for name, module in model.named_modules():
        if not row_of(module).keeps_zero:
            needs.add(Need(f"{name} ({type(module).__name__}) is not on a padded axis", "assumption"))
    return needs


def dropout_of_modules(model: nn.Module) -> frozenset[Need]:
    """The same as `without_dropout(...).needs` for torch's own modules, without running them.

    >>> dropout_of_modules(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Dropout(0.0)))
    frozenset({'no dropout (*): with dropout each copy draws its own mask, and training is equal only on average'})
    """
    rates = ((path, getattr(m, row_of(m).rate)) for path, m in model.named_modules() if row_of(m).rate)
    return dropout_needs(path for path, rate in rates if rate > 0)
