"""What to change next, from the first call that went wrong: folds that absorb its factor, then layouts around it.

Attention by hand with 1/sqrt(head size) and a fused projection, k = 2. Trial 1 goes wrong at softmax, whose input is
2^(1/2) too large. Both factors of `q @ k` lead back to `qkv`, so the proposal is 2^(-1/4) on its weight and bias. Trial
2 goes wrong at `proj`: v was multiplied too, the bias of `proj` was not. The proposal is 2^(1/4) on `proj.weight`, and
trial 3 passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from ...models.calls import Trace
from ...models.names import pattern_of
from ...rules.axes import Role
from ...rules.scale import Scale
from ..draft import Draft
from ..knobs import Setting
from .absorb import Absorbers, Way
from .first_wrong_call import Deviation
from .reshapes import Hint, hints, layout_settings

_BLIND = tuple(Fraction(n, 2) for n in (-2, -1, 1, 2))
"""Exponents of k that are tried where no factor of a single call helps, as for `(T + eye(w)) @ x`."""


class Proposals:
    """Settings for the first call that went wrong, for one base model."""

    def __init__(self, made: Draft, base: Trace) -> None:
        self.made, self.absorbers, self.base = made, Absorbers(base), base
        self.hints: list[tuple[int, Hint | int]] = []
        self.patterns: dict[str, list[str]] = {}
        for name in made.entries:
            self.patterns.setdefault(pattern_of(name), []).append(name)

    def folds(self, trial: Draft, where: Deviation) -> Iterator[Setting]:
        """Folds that set the wrong call right, the likeliest first."""
        if where.call is None:
            return
        if where.excess is not None:
            yield from self._settings(trial, self.absorbers.ways(where.index, where.excess**-1))
            return
        for mend in where.aligned.mends(where.index):
            yield from self._settings(trial, self.absorbers.of_inputs(where.index, mend))

    def guesses(self, trial: Draft, where: Deviation) -> Iterator[Setting]:
        """Folds before the wrong call that are tried although none sets it right by itself."""
        if where.call is None or where.excess is not None or next(where.aligned.mends(where.index), None):
            return
        for exponent in _BLIND:
            for k in where.aligned.compare.bases:
                yield from self._settings(trial, self._inputs(where.index, k**exponent))

    def layouts(self, trial: Draft, where: Deviation) -> Iterator[Setting]:
        """Layouts of the tensors around the wrong call."""
        if where.call is not None and where.excess is None:
            self.hints = self.hints or hints(self.base, where.aligned.wide)
            yield from layout_settings(trial, self.base, where.index, self.hints)

    def _inputs(self, index: int, scale: Scale) -> list[Way]:
        call = self.base.calls[index]
        floating = [i for i, t in enumerate(call.inputs) if t.is_floating_point() and not call.leaves[i]]
        return [way for i in floating for way in self.absorbers.of_inputs(index, {i: scale})[:1]]

    def _settings(self, trial: Draft, ways: Sequence[Way]) -> Iterator[Setting]:
        for way in ways:
            named = {self.made.planned(name): scale for name, scale in way.items()}
            if all(self._may_fold(name) for name in named):
                everywhere = {n: scale for name, scale in named.items() for n in self._layers(name)}
                yield _setting(trial, self.made, everywhere)
                if everywhere != named:
                    yield _setting(trial, self.made, named)

    def _layers(self, name: str) -> list[str]:
        """The tensors of other layers that correspond to one tensor: by name and by both shapes."""
        entry = self.made.entries[name]
        others = ((n, self.made.entries[n]) for n in self.patterns[pattern_of(name)])
        shapes = (entry.base_shape, entry.wide_shape)
        return [n for n, e in others if (e.base_shape, e.wide_shape) == shapes and self._may_fold(n)]

    def _may_fold(self, name: str) -> bool:
        """Declared folds stand; a buffer absorbs a factor only if it is copied from the base."""
        entry = self.made.entries.get(name)
        return entry is not None and entry.declared_fold is None and entry.fill != "own"


def _setting(trial: Draft, made: Draft, way: Mapping[str, Scale]) -> Setting:
    """The factors of one way; a raw parameter gets another role instead if that has the same effect."""
    folds: dict[str, Scale] = {}
    roles: dict[str, Mapping[int, Role]] = {}
    for name, scale in way.items():
        flipped = _other_role(trial, name, scale) if made.entries[name].roles is None else None
        if flipped is None:
            folds[name] = scale
        else:
            roles[name] = flipped
    return Setting(roles=roles, folds=folds)


def _other_role(trial: Draft, name: str, scale: Scale) -> Mapping[int, Role] | None:
    """The other role of a parameter with one growing axis, if its weight scale is the present one times `scale`."""
    entry = trial.entries[name]
    if entry.roles is None or len(entry.growing) != 1:
        return None
    dim = entry.growing[0]
    flipped: dict[int, Role] = {dim: "in" if entry.roles.get(dim) == "out" else "out"}
    now, then = (e.plan(trial.ways).change.s for e in (entry, replace(entry, roles=flipped)))
    return flipped if then == now * scale else None
