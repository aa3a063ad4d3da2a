"""Tensors that no gradient reaches: those that their class never uses, and parts that a batch leaves out.

A tensor is unused if its module runs and nothing that it computes is in any output: the pooler of BERT below a language
model. It may grow in any way. An expert without tokens, and a tower without images, wait for another batch; they are not unused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Fault, MupscaleError, raise_faults
from ...models.float64 import lifted_casts
from ...models.names import pattern_of
from ...models.need import Need
from ...planning.declare import Declared
from ...planning.search.search import Found
from ...proofs.identity import Loss, evaluated
from ...tensors.random_states import forked
from ..models import quiet
from .images import Batch
from .losses import cast_to, tensors_in

TOKENS = ("mask_token", "masked_spec_embed", "mask_emb")
"""Tokens that stand for something hidden; only pretraining uses them, in place of an embedding."""


@dataclass(frozen=True)
class Reach:
    """What the gradient of one batch reaches in a small copy."""

    base: nn.Module
    wide: nn.Module
    batch: Batch
    loss: Loss
    idle: tuple[str, ...]
    """Patterns of tensors that are known to be unused."""

    def decided(self, search: Callable[[Declared], Found], said: Declared) -> Found:
        """What a search finds; tensors that the class never uses are written, in single units."""
        try:
            return search(said)
        except MupscaleError as error:
            if {*error.codes} != {"search.tensor_undecided"}:
                raise
            open_ = {name for fault in error.faults for name in fault.where.split(", ")}
            with lifted_casts():
                grads = evaluated(self.base, self.loss).grads
            silent = [name for name, g in grads.items() if g is None or not bool(g.any())]
            if not open_ <= self._spared(silent):
                raise
            roles = {name: self._role(name) for name in open_}
            layouts = dict.fromkeys(open_, 1)
            return search(replace(said, roles={**said.roles, **roles}, layouts={**said.layouts, **layouts}))

    def _role(self, name: str) -> Any:
        """The role of a tensor that is never used: what it writes grows, and what it reads where two dimensions do."""
        pairs = zip(self.base.get_parameter(name).shape, self.wide.get_parameter(name).shape, strict=True)
        growing = [dim for dim, (a, b) in enumerate(pairs) if a != b]
        return "out" if len(growing) < 2 else {dim: "out" if dim == growing[0] else "in" for dim in growing}

    def checked(self, found: Found) -> Found:
        """The plan, which names the tensors that the class never uses; raises if it leaves others untested."""
        spared = sorted({pattern_of(name) for name in self._spared(found.unreached)})
        needs = {
            Need(f"{name} is used by no output of this class, so it may grow in any way") for name in spared
        }
        return replace(found, plan=replace(found.plan, needs=found.plan.needs | needs)) if needs else found

    def _spared(self, silent: Collection[str]) -> set[str]:
        """Those of the tensors without gradient that the class never uses; raises if others grow that nothing else tests.

        Nothing is said of mask tokens, of what a row of the registry says that its class never uses, and of tensors that get
        a gradient in another layer.
        """
        base, wide = (dict(m.named_parameters(remove_duplicate=False)) for m in (self.base, self.wide))
        reached = {pattern_of(name) for name in base if name not in silent}
        names = {
            name
            for name in silent
            if name in wide
            and base[name].shape != wide[name].shape
            and not name.endswith(TOKENS)
            and pattern_of(name) not in reached
            and not any(fnmatchcase(name, pattern) for pattern in self.idle)
        }
        with lifted_casts():
            spared = unused(self.base, self.batch, names)
        rest = [name for name in base if name in names - spared]
        raise_faults(
            "parts of this model were not reached by any batch that is known for it",
            [
                Fault(
                    "family.not_reached_by_batch", part, f"{_counted(inside)} of it grow and get no gradient"
                )
                for part, inside in parts_of(rest, [*base]).items()
            ],
        )
        return spared


def _counted(names: Collection[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def unused(model: nn.Module, batch: Batch, names: Collection[str]) -> set[str]:
    """Those of the named parameters that no output and no loss of the model depends on, though their modules run.

    Their gradient must be absent, not zero, which routing may make it; and other values must change no bit, since a decision
    has no gradient either. Both are seen without labels and with those that the class takes; if none are known, none is unused.
    """
    given = (
        [batch] if "labels" not in inspect.signature(model.forward).parameters else _labelled(model, batch)
    )
    found = {name for name in names if given}
    for one in given:
        found &= _without_effect(model, one, found)
    return found


def parts_of(names: Collection[str], every: Collection[str]) -> dict[str, list[str]]:
    """Tensors by the largest part of the model that has no others.

    >>> every = ["eye.conv", "eye.norm", "text.in", "text.out"]
    >>> parts_of(["eye.conv", "eye.norm", "text.out"], every)
    {'eye': ['eye.conv', 'eye.norm'], 'text.out': ['text.out']}
    """
    chosen, found = {*names}, dict[str, list[str]]()
    for name in names:
        words = name.split(".")
        prefixes = [".".join(words[:i]) for i in range(1, len(words))]
        whole = (p for p in prefixes if all(n in chosen for n in every if n.startswith(f"{p}.")))
        found.setdefault(next(whole, pattern_of(name)), []).append(name)
    return found


def _without_effect(model: nn.Module, batch: Batch, names: set[str]) -> set[str]:
    """Those of the named parameters whose modules run on a batch and that no output depends on."""
    owners = {name: _runs_for(model, name) for name in names}
    ran: set[int] = set()

    def seen(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if any(isinstance(x, Tensor) and x.numel() for x in (*given, *named.values())):
            ran.add(id(module))

    distinct = {id(owner): owner for owner in owners.values()}.values()
    hooks = [owner.register_forward_hook(seen, with_kwargs=True) for owner in distinct]
    try:
        before = _outputs(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    parameters = {name: model.get_parameter(name) for name in names if id(owners[name]) in ran}
    total = sum(t.double().nan_to_num().sum() for t in before.values() if t.requires_grad)
    if not parameters or not isinstance(total, Tensor):
        return set()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    loose = {n: p for (n, p), g in zip(parameters.items(), gradients, strict=True) if g is None}
    if _stays(model, batch, before, loose):
        return {*loose}
    return {name for name, p in loose.items() if _stays(model, batch, before, {name: p})}


def _runs_for(model: nn.Module, name: str) -> nn.Module:
    """The module that runs when a parameter is used: torch's attention reads its output projection without calling it."""
    path = name.rpartition(".")[0]
    above = model.get_submodule(path.rpartition(".")[0])
    return above if isinstance(above, nn.MultiheadAttention) else model.get_submodule(path)


def _stays(
    model: nn.Module, batch: Batch, before: Mapping[str, Tensor], changed: Mapping[str, Tensor]
) -> bool:
    """Whether every output is the same to the bit when these parameters have other values."""
    kept = {name: p.detach().clone() for name, p in changed.items()}
    try:
        with torch.no_grad():
            for p in changed.values():
                p.add_(1.0).mul_(-0.5)
            after = _outputs(model, batch)
    finally:
        with torch.no_grad():
            for name, p in changed.items():
                p.copy_(kept[name])
    return before.keys() == after.keys() and all(
        torch.equal(t.nan_to_num(), after[n].nan_to_num()) for n, t in before.items()
    )


def _outputs(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
    with quiet(), forked(model, seed=0):
        return dict(tensors_in(model(**cast_to(model, batch)), every=True))


def _labelled(model: nn.Module, batch: Batch) -> list[Batch]:
    """The batch without labels, and with the first labels for which the model gives a loss; nothing if none are known."""
    for labels in _labels(model, batch):
        try:
            with torch.no_grad():
                if "loss" in str(next(iter(_outputs(model, {**batch, "labels": labels})), "")):
                    return [batch, {**batch, "labels": labels}]
        except Exception:  # model code fails in many ways on labels of another shape
            continue
    return []


def _labels(model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    """Labels of the usual shapes: the text itself, one class for each example, one for each pixel."""
    for name in ("decoder_input_ids", "input_ids"):
        if name in batch:
            yield batch[name]
    first = next((v for v in batch.values() if isinstance(v, Tensor) and v.dim() > 1), None)
    if first is not None:
        yield torch.zeros(len(first), dtype=torch.long)
        yield torch.zeros(len(first), *first.shape[-2:], dtype=torch.long)
