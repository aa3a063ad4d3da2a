"""How a checkpoint stores a model's tensors: under other names, experts separately, gate and up separately.

Found by saving a small copy in which every entry is a different number, so nothing about the converters of
transformers is assumed. A stored tensor must be a rectangle of one model tensor, in the same order, or whole tensors of
one shape and layer below each other; anything else is refused.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import Fault, MupscaleError, raise_faults
from ..models.names import named_tensors, pattern_of, unique_tensors
from .models import quiet
from .record import Cell, Part

# Every number in a stored name: a layer or an expert.
_NUMBER = re.compile(r"\d+")


def stored_parts(small: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    """Stored name -> part, for those tensors of the full model that are not stored as they are.

    `small` is a copy of the model with real weights, which are overwritten; `shapes` are those of the full model.
    """
    found, faults = _saved(small)
    sizes = {name: tuple(t.shape) for name, _, t in named_tensors(small)}
    moved = {part.tensor for name, part in found.items() if not _is_plain(name, part)}
    raise_faults("the checkpoint format of this model is not understood", faults)
    templates: dict[str, list[_Template]] = {}
    for pattern in dict.fromkeys(map(pattern_of, moved)):
        templates[pattern] = _templates(
            {n: p for n, p in found.items() if pattern_of(p.tensor) == pattern}, sizes
        )
    return {
        name: part
        for tensor, shape in shapes.items()
        for template in templates.get(pattern_of(tensor), ())
        for name, part in template.of(tensor, shape)
    }


def _is_plain(name: str, part: Part) -> bool:
    return name == part.tensor and all(cell == (0, 1) for cell in part.cells)


def _saved(model: nn.Module) -> tuple[dict[str, Part], list[Fault]]:
    """Save a model with numbered entries, and find where the numbers are stored."""
    from safetensors.torch import load_file

    model = model.double()
    ranges: list[tuple[str, int, Tensor]] = []
    count = 0
    with torch.no_grad():
        for name, (_, tensor) in unique_tensors(model)[0].items():
            if tensor.dtype in (torch.float64, torch.int64):
                tensor.copy_(torch.arange(count, count + tensor.numel()).view(tensor.shape))
                ranges.append((name, count, tensor))
                count += tensor.numel()
    parts: dict[str, Part] = {}
    faults: list[Fault] = []
    with tempfile.TemporaryDirectory() as folder, quiet():
        # In a job of several ranks transformers saves on the first alone; here every rank reads what it saved.
        model.should_save_on_this_rank = lambda *_: True  # type: ignore[assignment]
        model.save_pretrained(folder, max_shard_size="100GB")  # type: ignore[operator]
        for name, values in load_file(str(Path(folder, "model.safetensors"))).items():
            part = _part(values, ranges) or _stacked(values, ranges)
            if part is None:
                faults.append(
                    Fault(
                        "family.stored_form_unknown",
                        name,
                        "the tensor stored under this name is neither a rectangle of one tensor of the model, nor several "
                        "of one shape below each other",
                    )
                )
            else:
                parts[name] = part
    return parts, faults


def _part(values: Tensor, ranges: list[tuple[str, int, Tensor]]) -> Part | None:
    if values.dtype not in (torch.float64, torch.int64) or not values.numel():
        return None
    ids = values.long()
    name, first, whole = next(r for r in reversed(ranges) if r[1] <= int(ids.min()))
    if int(ids.max()) >= first + whole.numel():
        return None
    corners = [torch.unravel_index(corner - first, whole.shape) for corner in (ids.min(), ids.max())]
    low, high = ([int(i) for i in corner] for corner in corners)
    window = torch.arange(whole.numel()).view(whole.shape)
    cells: list[Cell] = []
    dropped: list[int] = []
    for dim, (a, b) in enumerate(zip(low, high, strict=True)):
        window = window.narrow(dim, a, b + 1 - a)
        length, size = b + 1 - a, whole.shape[dim]
        if size % length or a % length:
            return None
        cells.append((a // length, size // length))
    shape = list(window.shape)
    for dim in range(len(shape)):  # a stacked dimension of which one entry is stored is not stored as a 1
        if len(shape) - len(dropped) > ids.dim() and shape[dim] == 1 and cells[dim][1] > 1:
            dropped.append(dim)
    kept = [n for dim, n in enumerate(shape) if dim not in dropped]
    if kept != list(ids.shape) or not torch.equal(window.reshape(ids.shape) + first, ids):
        return None
    return Part(name, tuple(cells), tuple(dropped))


def _stacked(values: Tensor, ranges: list[tuple[str, int, Tensor]]) -> Part | None:
    """Whole tensors of one shape and one layer, below each other.

    >>> ranges = [("h.0.q", 0, torch.zeros(1, 2)), ("h.0.k", 2, torch.zeros(1, 2))]
    >>> part = _stacked(torch.arange(4).view(2, 2), ranges)
    >>> part and part.tensors
    ('h.0.q', 'h.0.k')
    """
    if values.dtype not in (torch.float64, torch.int64) or not values.numel() or not values.dim():
        return None
    ids = values.long()
    firsts = torch.tensor([first for _, first, _ in ranges])
    rows = torch.bucketize(ids.reshape(len(ids), -1)[:, 0].contiguous(), firsts, right=True) - 1
    order = torch.unique_consecutive(rows).tolist()
    if len(ids) % len(order):
        return None
    for piece, (_, first, whole) in zip(ids.chunk(len(order)), (ranges[i] for i in order), strict=True):
        if not torch.equal(piece, torch.arange(first, first + whole.numel()).view(whole.shape)):
            return None
    names = [ranges[i][0] for i in order]
    if len({tuple(_NUMBER.findall(name)) for name in names}) > 1:
        return None
    return Part(names[0], ((0, 1),) * ids.dim(), (), tuple(names[1:]))


@dataclass(frozen=True)
class _Template:
    """Stored names of one pattern, with each number in them explained."""

    text: str
    numbers: tuple[tuple[str, int], ...]
    """For every number: ("name", i-th number of the tensor's name), ("cell", dimension) or ("constant", value)."""
    part: Part
    singles: frozenset[int]
    """Dimensions that are stored entry by entry, however many there are."""

    def of(self, tensor: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Part]]:
        own = [int(n) for n in _NUMBER.findall(tensor)]
        free = sorted({d for kind, d in self.numbers if kind == "cell"})
        spans = [shape[d] if d in self.singles else self.part.cells[d][1] for d in free]
        for index in _grid(spans):
            which = dict(zip(free, index, strict=True))
            cells = tuple(
                (which[d], spans[free.index(d)]) if d in which else cell
                for d, cell in enumerate(self.part.cells)
            )
            values = [
                own[i] if kind == "name" else which[i] if kind == "cell" else i for kind, i in self.numbers
            ]
            below = tuple(_renumbered(name, own) for name in self.part.below)
            yield _renumbered(self.text, values), Part(tensor, cells, self.part.dropped, below)


def _renumbered(text: str, values: list[int]) -> str:
    numbers = iter(values)
    return _NUMBER.sub(lambda _: str(next(numbers)), text)


def _grid(spans: list[int]) -> Iterator[tuple[int, ...]]:
    if not spans:
        yield ()
        return
    for first in range(spans[0]):
        for rest in _grid(spans[1:]):
            yield (first, *rest)


def _templates(parts: Mapping[str, Part], sizes: Mapping[str, tuple[int, ...]]) -> list[_Template]:
    """One template for every way in which tensors of one pattern are stored."""
    groups: dict[tuple[str, tuple[Cell | None, ...]], dict[str, Part]] = {}
    for name, part in parts.items():
        shape = sizes[part.tensor]
        fixed = tuple(None if cell[1] == shape[d] > 1 else cell for d, cell in enumerate(part.cells))
        groups.setdefault((_NUMBER.sub("0", name), fixed), {})[name] = part
    found = []
    for (text, fixed), members in groups.items():
        options: list[list[tuple[str, int]]] = [[] for _ in _NUMBER.findall(text)]
        for at in range(len(options)):
            explained = [
                _explanations(int(_NUMBER.findall(name)[at]), part) for name, part in members.items()
            ]
            options[at] = [option for option in explained[0] if all(option in other for other in explained)]
        part = next(iter(members.values()))
        singles = frozenset(d for d, cell in enumerate(fixed) if cell is None)
        if not all(options):
            raise MupscaleError(
                f"the numbers in stored names such as {next(iter(members))} follow no known rule",
                code="family.stored_numbers_unknown",
            )
        found.append(_Template(text, tuple(option[0] for option in options), part, singles))
    return found


def _explanations(number: int, part: Part) -> list[tuple[str, int]]:
    """What a number in a stored name may be, likeliest first."""
    own = [int(n) for n in _NUMBER.findall(part.tensor)]
    named = [("name", i) for i, n in enumerate(own) if n == number]
    cells = [("cell", d) for d, (which, count) in enumerate(part.cells) if count > 1 and which == number]
    return [*named, *cells, ("constant", number)]
