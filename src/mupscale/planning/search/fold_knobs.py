"""Where constants may have to be folded: tied readouts, embeddings that a model multiplies by a root of its width.

A fold is a number that the model's code would have to multiply by, absorbed by a tensor instead. With k = 2:

- A tied table E is an embedding, so its copies are not scaled (s = 1). As a readout it sums over twice as many
  channels, so the logits double. Folding 1/2 into the gain of the last norm before it gives them back.
- Gemma multiplies embeddings by sqrt(width). Doubling the width multiplies them by sqrt(2); folding 2^(-1/2)
  into the embedding undoes that.
- A model that divides its logits by the width needs no 1/k in the readout: the fold k cancels its s = 1/k.
- A norm over zeros averages over more channels than are filled (`padded_norms.py`).

Where zeros are added, a width grows by k/filled instead of k. Powers of the filled share are kept apart from the fold, so
that they can be computed again at other sizes.

Proposes settings for the search. The last norm before a readout is known from the order in which modules ran.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import nn

from ...models.attempts import attempted
from ...models.kinds import is_norm
from ...models.names import pattern_of
from ...rules.scale import ONE, Scale
from ..draft import Draft, DraftEntry
from ..facts.padded_norms import Place, Streams
from ..knobs import Knob, Setting, copies

_ROOT = Fraction(1, 2)  # the exponent of a square root


def fold_knobs(draft: Draft, base: nn.Module, order: Sequence[str], found: Streams) -> Iterator[Knob]:
    """Folds for norms over zeros, for tied readouts, for readouts that the model scales, and for scaled embeddings.

    `order` holds the paths of modules in the order in which they returned.
    """
    yield from _padded_norms(draft, base, found)
    yield from _tied(draft, base, order, found)
    yield from _scaled_readouts(draft)
    yield from _scaled_embeddings(draft, found)


def _fold(
    names: Sequence[str],
    factor: Scale,
    shifts: Mapping[str, int] | None = None,
    fills: Mapping[int, Fraction] | None = None,
) -> Setting:
    powers = dict.fromkeys(names, fills) if fills else {}
    return Setting(folds=dict.fromkeys(names, factor), shifts=shifts or {}, fills=powers)


def _padded_norms(draft: Draft, base: nn.Module, found: Streams) -> Iterator[Knob]:
    """Writers into a space with zeros are multiplied by a = filled^(-1/2); gains undo it, or those who read them.

    Gains that are used as (1 + w) are left alone where readers can undo it, because a fold makes their weight decay
    inexact.
    """
    gains = [name for name, _ in sorted(found.gains)]
    if not gains:
        return
    adding = {name: _adds_one(base.get_submodule(name.rpartition(".")[0])) for name in gains}
    shifts = {name: 1 for name, adds in adding.items() if adds}
    settings = {}
    for by_readers in (False, True):
        powers: dict[Place, Fraction] = dict.fromkeys(found.writers, -_ROOT)
        undone = set(found.raw_readers)
        for name in gains:
            place, readers = (name, 0), found.readers.get(name)
            if place in found.writers:
                powers[place] += _ROOT
            elif by_readers and readers:
                undone |= readers
            else:
                powers[place] = _ROOT
        for place in undone:
            powers[place] = powers.get(place, Fraction(0)) + _ROOT
        fills: dict[str, dict[int, Fraction]] = {}
        for (name, dim), power in sorted(powers.items()):
            if power:
                fills.setdefault(name, {})[dim] = power
        settings[by_readers] = Setting(fills=fills, shifts=shifts)
    first = bool(shifts)
    yield [settings[first], settings[not first]]


def _tied(draft: Draft, base: nn.Module, order: Sequence[str], found: Streams) -> Iterator[Knob]:
    """A tied readout needs 1/k before it, unless the model itself divides by its width or by its root.

    What the table absorbs as a writer into a space with zeros is undone there too.
    """
    for name, reader in draft.conflicts.items():
        entry = draft.entries[name]
        if entry.declared_fold is not None:
            continue
        k = Scale.of(copies(draft, entry, entry.growing[-1]))
        settings: Knob = []
        # A table that the model multiplies by the root of its width absorbs k^-1/2 itself, and no power of the zeros.
        rooted = name in found.rooted
        writes = any(name == writer for writer, _ in found.writers)
        fills = {0: _ROOT} if writes and not rooted else {}
        by_model = Setting()  # the model divides what the table reads out by its width
        for path in _absorbers(order, reader.rpartition(".")[0], draft, base):
            gains = _writing_parameters(draft, path)
            # A gain stored as w of (1 + w) is multiplied as 1 + w' = (1 + w)/k.
            shifts = {g: 1 for g in gains if g.endswith("weight") and _adds_one(base.get_submodule(path))}
            pair = [_fold(gains, k**power, shifts, fills) for power in (-1, -_ROOT)]
            settings += pair[::-1] if rooted else pair
            if fills and len(settings) == 2:
                by_model = _fold(gains, ONE, shifts, fills)
        # The last norm is the likely place, a layer without a norm behind it the unlikely one.
        yield [*settings[:2], by_model, *settings[2:]]


def _absorbers(order: Sequence[str], reader: str, draft: Draft, base: nn.Module) -> list[str]:
    """Modules that may absorb a factor before a readout: the last norm, then the last layer that writes the width."""
    # In the order of return, everything before the readout's last call; a readout that is a function has no
    # call.
    end = max((i for i, path in enumerate(order) if path == reader), default=len(order))
    ran = [path for path in reversed(order[:end]) if _writing_parameters(draft, path)]
    norms = [p for p in ran if is_norm(base.get_submodule(p))]
    writers = [p for p in ran if p not in norms and not isinstance(base.get_submodule(p), nn.Embedding)]
    return [*norms[:1], *writers[:1]]


def _writing_parameters(draft: Draft, path: str) -> list[str]:
    """Growing parameters of one module that write the width."""
    return [
        n
        for n, e in draft.entries.items()
        if n.rpartition(".")[0] == path
        and e.growing
        and e.kind == "parameter"
        and (e.roles is None or "out" in e.roles.values())
    ]


def _adds_one(norm: nn.Module) -> bool:
    """True for a norm that multiplies by (1 + w), as Gemma's: with w = 0 its output is not zero.

    >>> class GemmaNorm(nn.RMSNorm):
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         return nn.functional.rms_norm(x, self.normalized_shape) * (1 + self.weight)
    >>> _adds_one(GemmaNorm(4).double()), _adds_one(nn.RMSNorm(4).double())
    (True, False)
    """
    probe = copy.deepcopy(norm)
    sizes = [p.shape[-1] for p in probe.parameters(recurse=False) if p.dim()]
    if not sizes or not is_norm(norm):
        return False
    with torch.no_grad():
        for p in probe.parameters():
            p.zero_()
        x = torch.randn(2, sizes[0], dtype=torch.float64, device="cpu").to(next(probe.parameters()).device)
        # Any signature is allowed; a norm that needs more than x is not of this kind.
        out = attempted(lambda: probe(x))
    return isinstance(out, torch.Tensor) and bool(out.abs().max() > 0)


def _scaled_readouts(draft: Draft) -> Iterator[Knob]:
    """Readouts, which sum over the width: the model may divide the result by the width or by its root."""
    groups: dict[str, list[str]] = {}
    for entry in draft.entries.values():
        if _reads_only(entry):
            groups.setdefault(pattern_of(entry.name), []).append(entry.name)
    for names in groups.values():
        entry = draft.entries[names[0]]
        dim = entry.growing[0]
        k = Scale.of(copies(draft, entry, dim))
        divided = [_fold(names, k**power, fills={dim: -power}) for power in (2 * _ROOT, _ROOT)]
        yield [Setting(), *divided]


def _reads_only(entry: DraftEntry) -> bool:
    """True for a parameter whose one growing axis is read, and whose fold was not declared."""
    roles = {(entry.roles or {}).get(dim) for dim in entry.growing}
    return (
        roles == {"in"}
        and entry.declared_fold is None
        and entry.kind == "parameter"
        and len(entry.growing) == 1
    )


def _scaled_embeddings(draft: Draft, found: Streams) -> Iterator[Knob]:
    """Embeddings, which the model may multiply by the root of its width (Gemma, BART with `scale_embedding`)."""
    for entry in draft.entries.values():
        embeds = isinstance(entry.module[0], nn.Embedding) and entry.kind == "parameter"
        if not embeds or entry.growing != [1] or entry.declared_fold is not None:
            continue
        k = Scale.of(copies(draft, entry, 1))
        settings = [Setting(), _fold([entry.name], k**-_ROOT, fills={1: _ROOT})]
        yield settings[::-1] if entry.name in found.rooted else settings
