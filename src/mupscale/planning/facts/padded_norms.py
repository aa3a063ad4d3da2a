"""Spaces that a norm averages over, when zeros are added to them: who writes into them, and who reads them.

Zeros make a mean square smaller: of 96 channels only 64 are filled. If everything that writes into the space is
multiplied by a = filled^(-1/2), the mean square is the base's again, eps included, and the norm returns a times what it
returned in the base. Its gain, or those who read it, undo that. From 4 units to 6, a^2 is 6/4:

>>> x, a = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64), 1.5**0.5
>>> base, wide = nn.RMSNorm(4, eps=0.1).double(), nn.RMSNorm(6, eps=0.1).double()
>>> padded = torch.cat([a * x, x.new_zeros(2)])
>>> torch.allclose(wide(padded)[:4] / a, base(x), rtol=1e-12)
True

LayerNorm subtracts the mean, which zeros would move too. There everything that writes into the space also writes the mean of
its channels into the new ones: then the mean is that of the base, the new channels are zero once it is subtracted, and the
norm returns its bias there, which is zero. From 4 units to 6 again:

>>> base, wide = nn.LayerNorm(4, eps=0.1).double(), nn.LayerNorm(6, eps=0.1).double()
>>> padded = a * torch.cat([x, x.mean().expand(2)])
>>> torch.allclose(wide(padded)[:4] / a, base(x), rtol=1e-12), torch.allclose(wide(padded)[4:], x.new_zeros(2))
(True, True)
>>> torch.allclose(wide(torch.cat([a * x, x.new_zeros(2)]))[:4] / a, base(x), rtol=1e-2)  # zeros alone
False

Outputs are exact, and training is not the base's: in its backward the wide norm subtracts a mean over 6 channels too. Where a
norm writes into the space itself, as behind a residual sum, or an activation does, nothing can write the mean.

A recorded evaluation of the loss shows what is written and read. From the input of a norm, calls are followed backwards
to the first weights: those write. From the input of any other weight they are followed in the same way: a weight that
ends at a gain reads a norm, one that ends at a writer reads the space itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...errors import Fault
from ...models.attempts import attempted
from ...models.calls import Call, Trace
from ...models.kinds import is_batch_norm, is_norm
from ...rules.axes import nearest_copies
from ..draft import Draft, DraftEntry

Place = tuple[str, int]
"""A dimension of a tensor, by the tensor's name."""
Sizes = frozenset[tuple[int, int]]
"""Sizes of growing axes, in the base and in the wide model."""
_ROUNDED = 1e-2  # the number may have been rounded to bfloat16
_FILLED = (
    "zeros_like",
    "new_zeros",
    "ones_like",
    "new_ones",
    "full_like",
    "new_full",
    "empty_like",
    "new_empty",
)
"""Functions that take the shape of a tensor and none of its numbers."""
_PRODUCTS = ("mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply")
_TEST = 1.7
"""A factor that no code multiplies by."""
_SHIFT = 3.0  # added to every channel: a norm that subtracts the mean returns the same


@dataclass(frozen=True)
class Streams:
    """The spaces with zeros that norms average over, as dimensions of tensors."""

    writers: frozenset[Place]
    gains: frozenset[Place]
    raw_readers: frozenset[Place]
    """Weights that read what was written, without a norm between."""
    readers: dict[str, frozenset[Place]]
    """Gain -> the weights that read its norm. A gain that also feeds something else, as a tied readout, is not listed."""
    rooted: frozenset[str]
    """Tables whose rows the model multiplies by the root of their width."""
    multipliers: frozenset[str] = frozenset()
    """Parameters that multiply what is made of the batch, entry by entry: gains of one's own."""
    centred: Sizes = frozenset()
    """Sizes of the spaces whose norms subtract the mean: their writers write it into new channels."""
    closed: Sizes = frozenset()
    """Of these, the sizes of spaces into which a norm, an activation or a product writes, so that nothing can write the mean."""

    @property
    def places(self) -> frozenset[Place]:
        """All dimensions that lie in such a space."""
        return self.writers.union(self.gains, self.raw_readers, *self.readers.values())


def padded_norms(draft: Draft) -> dict[str, str]:
    """Path of every norm over a space that gets zeros -> the name of its gain."""
    found: dict[str, str] = {}
    for entry in draft.entries.values():
        if _averages(*entry.module) and entry.kind == "parameter" and len(entry.base_shape) == 1:
            path, _, leaf = entry.name.rpartition(".")
            if draft.padded(entry, 0) and (leaf == "weight" or path not in found):
                found[path] = entry.name
    return found


def streams(draft: Draft, trace: Trace) -> Streams:
    """Who writes and reads the spaces that padded norms average over."""
    norms = padded_norms(draft)
    centred = centred_sizes(draft)
    walk = _Walk(draft, trace, norms, centred)
    multipliers = frozenset(_multipliers(trace, walk)) if draft.ways.pads else frozenset()
    if not norms:
        return Streams(frozenset(), frozenset(), frozenset(), {}, frozenset(), multipliers)
    writers: set[Place] = set()
    closed: set[tuple[int, int]] = set()
    for index, call in enumerate(trace.calls):
        if call.path in norms:
            size = _sizes(draft, (norms[call.path], 0))
            for parent in walk.inputs(index):
                writers |= {p for p in walk.origins(parent) if _sizes(draft, p) == size}
                closed |= {size} if size in centred and walk.is_bent(parent, multipliers) else set()
    multipliers -= walk.open  # they write into such a space
    gains = frozenset((name, 0) for name in norms.values())
    raw: set[Place] = set()
    readers: dict[str, set[Place]] = {gain: set() for gain, _ in gains}
    shared: set[str] = set()
    found: list[tuple[frozenset[Place], set[Place]]] = []
    for index, call in enumerate(trace.calls):
        if call.path in norms:
            continue
        weights = walk.weights(call)
        if not weights:
            continue
        met = frozenset(place for parent in walk.inputs(index) for place in walk.origins(parent))
        reads = {
            (name, dim)
            for name in weights
            for dim, role in (draft.entries[name].roles or {}).items()
            if role == "in" and draft.padded(draft.entries[name], dim)
        }
        for gain, _ in met & gains:
            if (gain, 0) not in writers:
                readers[gain] |= reads
                shared |= set() if reads else {gain}
        found.append((met - gains, reads))
    # What is added behind the last norm of a stream is read with the stream, so it writes into the same space.
    growing = True
    while growing:
        growing = False
        for met, _ in found:
            sizes = {_sizes(draft, place) for place in met & writers}
            new = {place for place in met - writers if _sizes(draft, place) in sizes}
            writers |= new
            growing |= bool(new)
    for met, reads in found:
        raw |= reads if met & writers else set()
    listed = {gain: frozenset(each) for gain, each in readers.items() if each and gain not in shared}
    rooted = frozenset(_rooted(trace, walk))
    closed |= {size for place in gains & writers if (size := _sizes(draft, place)) in centred}
    return Streams(
        frozenset(writers), gains, frozenset(raw), listed, rooted, multipliers, centred, frozenset(closed)
    )


def streams_by_size(draft: Draft) -> Streams:
    """The same without a recorded evaluation: every axis of the size of a padded norm is taken for its space.

    Zeros of another space of that size then stay zero for longer than they must, and change nothing.
    """
    norms = padded_norms(draft)
    sizes = {(draft.entries[n].base_shape[0], draft.entries[n].wide_shape[0]) for n in norms.values()}
    places = {
        (name, dim): role
        for name, entry in draft.entries.items()
        for dim, role in (entry.roles or {}).items()
        if entry.growing and (entry.base_shape[dim], entry.wide_shape[dim]) in sizes
    }
    gains = frozenset((name, 0) for name in norms.values())
    writers = frozenset(place for place, role in places.items() if role == "out") - gains
    return Streams(writers, gains, frozenset(places) - writers - gains, {}, frozenset())


def _multipliers(trace: Trace, walk: _Walk) -> Iterator[str]:
    """Growing parameters that a product takes together with something made of the batch."""
    for call in trace.calls:
        if call.name in _PRODUCTS and not all(trace.weight(call, i) for i in range(len(call.inputs))):
            yield from walk.weights(call)


def _rooted(trace: Trace, walk: _Walk) -> Iterator[str]:
    """Tables whose rows are multiplied by one number, the root of their width, as Gemma does."""
    for call in trace.calls:
        parents = [trace.calls[p] for p in call.parents if p is not None]
        tables = [name for made in parents if made.name == "embedding" for name in walk.weights(made)]
        numbers = [float(t.detach()) for t in call.inputs if t.numel() == 1 and t.is_floating_point()]
        numbers += [float(value) for value in call.args if isinstance(value, (int, float))]
        for name in tables if call.name in _PRODUCTS else ():
            width = walk.draft.entries[name].base_shape[-1]
            if any(abs(number * number - width) < _ROUNDED * width for number in numbers):
                yield name


def with_streams(draft: Draft, found: Streams) -> Draft:
    """The draft whose entries know which of their dimensions lie in such a space, and which of them are gains, there or elsewhere."""
    gains, inside = {name for name, _ in found.gains}, {name for name, _ in found.places}
    norms = {name.rpartition(".")[0] for name in gains}

    def centred(name: str, dims: Iterable[int]) -> frozenset[int]:
        return frozenset(dim for dim in dims if _sizes(draft, (name, dim)) in found.centred)

    changes = {
        name: replace(
            entry,
            stream=frozenset(dim for other, dim in found.places if other == name),
            gain=name in gains,
            typical=name not in inside and (name in found.multipliers or _scales_channels(entry)),
            mean=centred(name, (dim for other, dim in found.writers if other == name)),
            still=centred(
                name,
                [0]
                if name not in gains and name.rpartition(".")[0] in norms
                else (dim for other, dim in found.raw_readers if other == name),
            ),
        )
        for name, entry in draft.entries.items()
    }
    return draft.with_entries(changes)


def centred_sizes(draft: Draft) -> Sizes:
    """Sizes of the spaces that every norm over them subtracts the mean of, if their new channels may carry it."""
    if not draft.ways.centred or draft.ways.by != "units":
        return frozenset()
    subtracting: dict[tuple[int, int], list[bool]] = {}
    for gain in padded_norms(draft).values():
        norm = draft.entries[gain].module[0]
        # A GroupNorm subtracts one mean of all positions, and the channels of one position have another.
        centres = subtracts_mean(norm) and not isinstance(norm, nn.GroupNorm)
        subtracting.setdefault(_sizes(draft, (gain, 0)), []).append(centres)
    return frozenset(size for size, norms in subtracting.items() if all(norms))


def unpaddable(draft: Draft) -> dict[Fault, tuple[int, int]]:
    """Norms over a space with zeros that subtract its mean, which zeros would change, or that have no gain, with its sizes."""
    faults: dict[str, tuple[Fault, tuple[int, int]]] = {}
    wide, centred = dict(draft.models[1].named_modules()), centred_sizes(draft)
    for entry in draft.entries.values():
        path, module = entry.name.rpartition(".")[0], entry.module[0]
        if (
            _averages(*entry.module)
            and any(draft.padded(entry, d) for d in entry.growing)
            and subtracts_mean(module)
        ):
            sizes = entry.base_shape[entry.growing[-1]], entry.wide_shape[entry.growing[-1]]
            if sizes in centred and len(entry.base_shape) == 1:
                continue
            faults.setdefault(path, (centred_fault(path, type(module).__name__, *sizes), sizes))
    for path, module in draft.models[0].named_modules() if draft.ways.pads else ():
        n, goal = _without_gain(module), _without_gain(wide.get(path))
        if not n or not goal or not draft.ways.grow(n, goal).pad:
            continue
        if isinstance(module, nn.RMSNorm):
            what = "RMSNorm without a gain over zeros: nothing absorbs the share that is not zeros"
            remedy = "use elementwise_affine=True, or a whole multiple"
            faults[path] = (Fault("axis.padding_without_gain", path, what, remedy), (n, goal))
        elif subtracts_mean(module) and not _whole_groups(module, wide.get(path)):
            faults[path] = (centred_fault(path, type(module).__name__, n, goal), (n, goal))
    return dict(faults.values())


def _whole_groups(base: nn.Module, wide: nn.Module | None) -> bool:
    """True for a GroupNorm that gets new groups of the size of the old ones: no group mixes zeros with channels of the base."""
    pair = (base, wide)
    if not all(isinstance(norm, nn.GroupNorm) for norm in pair):
        return False
    each = {norm.num_channels // norm.num_groups for norm in pair}  # type: ignore[union-attr, operator]
    return len(each) == 1


def _without_gain(norm: nn.Module | None) -> int:
    """How many channels a norm averages over, if it has no gain and says its shape as torch's norms do; otherwise 0."""
    if norm is None or not is_norm(norm) or any(True for _ in norm.parameters(recurse=False)):
        return 0
    if isinstance(norm, nn.GroupNorm):
        return norm.num_channels
    shape = getattr(norm, "normalized_shape", ())
    return int(shape[-1]) if shape else 0


def centred_fault(where: str, kind: str, base: int, wide: int) -> Fault:
    """Why a norm that subtracts the mean cannot have zeros, and the sizes that it can have."""
    what = f"{kind} over {base} -> {wide}: zeros would change its mean, so only whole multiples are exact"
    nearest = f"nearest: {nearest_copies(base, wide)}; ffn and heads may grow by any amount"
    return Fault("axis.padding_changes_mean", where, what, nearest)


def subtracts_mean(norm: nn.Module) -> bool:
    """True for a norm whose output stays when a constant is added to every channel.

    >>> subtracts_mean(nn.LayerNorm(8)), subtracts_mean(nn.RMSNorm(8))
    (True, False)

    A norm of another class is tried, one on the meta device as a copy whose gains are one:

    >>> class OwnNorm(nn.LayerNorm): ...
    >>> subtracts_mean(OwnNorm(8, device="meta")), subtracts_mean(OwnNorm(8, elementwise_affine=False))
    (True, True)
    """
    if type(norm) in (nn.LayerNorm, nn.GroupNorm):
        return True
    own = list(norm.parameters(recurse=False))
    size = next((p.shape[0] for p in own if p.dim() == 1), _without_gain(norm))
    if size < 2:
        return False
    if any(p.is_meta for p in own):
        norm = deepcopy(norm).to_empty(device="cpu")
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.fill_(1)
    like = next(norm.parameters(recurse=False), torch.empty(0))
    x = torch.linspace(-1, 2, 2 * size, dtype=like.dtype, device=like.device).view(2, size).pow(3)
    with torch.no_grad():
        # Any signature is allowed; what needs more than x is left to the measurement.
        found = attempted(lambda: (norm(x), norm(x + _SHIFT)))
    if found is None or not isinstance(found[0], torch.Tensor):
        return False
    return bool(torch.allclose(*found, rtol=1e-3, atol=1e-3))


class _Walk:
    """Follow a recorded evaluation backwards, from a call to the weights that made what it reads."""

    def __init__(self, draft: Draft, trace: Trace, norms: dict[str, str], centred: Sizes) -> None:
        self.draft, self.trace, self.norms, self.centred = draft, trace, norms, centred
        self.open: set[str] = set()
        """Weights that `origins` has met and whose roles are not decided yet."""

    def inputs(self, index: int) -> Iterator[int]:
        """The calls that made what a call reads of the batch; inside a norm, those outside of it."""
        call = self.trace.calls[index]
        for position, parent in enumerate(call.parents):
            inside = (
                parent is not None and call.path in self.norms and self.trace.calls[parent].path == call.path
            )
            if parent is not None and not inside and not self.trace.weight(call, position):
                yield parent

    def weights(self, call: Call) -> list[str]:
        """The growing parameters that a call reads, as they are or as views of them."""
        found: list[str] = []
        seen: set[int] = set()
        pending = [(call, i) for i in range(len(call.inputs)) if self.trace.weight(call, i)]
        while pending:
            at, i = pending.pop()
            leaf, parent = at.leaves[i], at.parents[i]
            if leaf is not None:
                name = self.draft.planned(leaf)
                entry = self.draft.entries.get(name)
                if entry is not None and entry.kind == "parameter" and entry.growing:
                    found.append(name)
            elif parent is not None and parent not in seen:
                seen.add(parent)
                made = self.trace.calls[parent]
                pending += [(made, j) for j in range(len(made.inputs)) if self.trace.weight(made, j)]
        return found

    def origins(self, index: int) -> frozenset[Place]:
        """The dimensions of weights that wrote the output of a call: the first that are met backwards."""
        found: set[Place] = set()
        for call, weights in self._behind(index):
            if call.path in self.norms and not _returns_its_input(call):
                found.add((self.norms[call.path], 0))
            for name in weights:
                entry = self.draft.entries[name]
                roles = entry.roles or {}
                self.open |= set() if roles else {name}
                found |= {(name, dim) for dim, role in roles.items() if role == "out"}
                if (
                    not roles
                    and len(entry.growing) == 1
                    and _sizes(self.draft, (name, entry.growing[0])) in self.centred
                ):
                    found.add((name, entry.growing[0]))  # a table or a token of one's own
        return frozenset(found)

    def is_bent(self, index: int, multipliers: frozenset[str]) -> bool:
        """Whether something that is not linear lies between the output of a call and the weights that wrote it."""
        return any(
            set(weights) & multipliers or (not weights and not _is_linear(call))
            for call, weights in self._behind(index)
            if call.path not in self.norms or _returns_its_input(call)
        )

    def _behind(self, index: int) -> Iterator[tuple[Call, list[str]]]:
        """The calls that made the output of one, back to norms and to calls that read weights, with the names of these."""
        pending, seen = [index], set()
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen.add(at)
            call = self.trace.calls[at]
            ends = call.path in self.norms and not _returns_its_input(call)
            weights = [] if ends else self.weights(call)
            if call.name in _FILLED:
                continue
            yield call, weights
            # What is added to a table of positions, which no batch makes, is written too.
            if not ends and (not weights or _adds(call)):
                pending += [
                    parent
                    for i, parent in enumerate(call.parents)
                    if parent is not None
                    and not self.trace.weight(call, i)
                    and self._keeps_channels(call, i)
                    and (not weights or call.inputs[i].is_floating_point())
                ]

    def _keeps_channels(self, call: Call, position: int) -> bool:
        """Whether the last axis of an input is that of the output: of a product and of attention, that of the values alone."""
        value = {"scaled_dot_product_attention": 2, "matmul": 1, "__matmul__": 1, "bmm": 1}.get(call.name)
        if value is None or len(call.args) <= value:
            return True
        carried = next((i for i, given in enumerate(call.inputs) if given is call.args[value]), position)
        return carried == position or self.trace.weight(call, carried)


def _returns_its_input(call: Call) -> bool:
    """True for a cast to the dtype that a tensor has: a norm's first call may return what the residual branch reads."""
    return not call.name.endswith("_") and any(out is given for out in call.outputs for given in call.inputs)


def _is_linear(call: Call) -> bool:
    """True for a call whose output is multiplied by a number, a negative one too, when one of its inputs is, or all are."""
    return _adds(call) or any(_follows(call, [i]) for i in range(len(call.inputs)))


def _adds(call: Call) -> bool:
    """True for a call whose output is multiplied by a number when all of its inputs are: a sum, a view, a concatenation."""
    return _follows(call, list(range(len(call.inputs))))


def _follows(call: Call, group: list[int]) -> bool:
    numbers, value = [i for i in group if call.inputs[i].is_floating_point()], call.value
    if value is None or not numbers:
        return value is None or not bool(value.any())
    got = attempted(lambda: call.again({i: call.inputs[i].detach() * -_TEST for i in numbers}))
    return got is not None and got.shape == value.shape and torch.allclose(got, -_TEST * value, rtol=1e-6)


def _averages(base: nn.Module, wide: nn.Module) -> bool:
    """True for norms that average over zeros; a batch norm takes each channel by itself, and new groups are zeros alone."""
    return is_norm(base) and not is_batch_norm(base) and not _whole_groups(base, wide)


def _scales_channels(entry: DraftEntry) -> bool:
    """True for the gain of a norm that takes each channel or group by itself, and for a running variance."""
    return (is_batch_norm(entry.module[0]) or _whole_groups(*entry.module)) and entry.name.rpartition(".")[
        2
    ] in ("weight", "running_var")


def _sizes(draft: Draft, place: Place) -> tuple[int, int]:
    entry, dim = draft.entries[place[0]], place[1]
    return entry.base_shape[dim], entry.wide_shape[dim]
