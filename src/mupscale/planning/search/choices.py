"""Hypotheses as choices: one setting for every knob, and proposals on top of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ...models.names import pattern_of
from ...models.need import Need
from ...plans.plan import Plan
from ..draft import Draft
from ..facts.padded_norms import Streams
from ..facts.unwritten import reader_knobs
from ..knobs import Knob, Setting, layout_knobs, paired_knobs, part_knobs, role_knobs
from .fold_knobs import fold_knobs


@dataclass(frozen=True)
class Choice:
    """A hypothesis: which setting of every knob, and which proposals on top."""

    settings: tuple[int, ...]
    moves: tuple[int, ...] = ()


class Choices:
    """The knobs of two models, and the proposals made so far."""

    def __init__(self, made: Draft, base: nn.Module, returned: Sequence[str], found: Streams) -> None:
        self.made = made
        layouts = list(layout_knobs(made, everywhere=True))
        # Axes that a layout knob already varies are not asked about a second time by the readers.
        decided = {(n, d) for knob in layouts for s in knob for n, dims in s.layouts.items() for d in dims}
        proposed = (
            *fold_knobs(made, base, returned, found),
            *layouts,
            *paired_knobs(made),
            *part_knobs(made, decided),
            *role_knobs(made),
            *reader_knobs(made, decided),
        )
        self.knobs: list[Knob] = [knob for knob in proposed if knob]
        self.names = [_names(knob) for knob in self.knobs]
        self.moves: list[Setting] = []

    @property
    def likeliest(self) -> Choice:
        """Every knob at its first setting."""
        return Choice((0,) * len(self.knobs))

    def draft(self, choice: Choice) -> Draft:
        """The draft with all settings and proposals of a choice."""
        trial = self.made
        for knob, setting in zip(self.knobs, choice.settings, strict=True):
            trial = knob[setting].apply(trial)
        for move in choice.moves:
            trial = self.moves[move].apply(trial)
        return trial

    def describe(self, choice: Choice) -> str:
        """What a choice changes."""
        turned = [self.knobs[i][j] for i, j in enumerate(choice.settings) if j]
        changes = [*turned, *(self.moves[move] for move in choice.moves)]
        return "; ".join(map(str, changes)) or "the likeliest settings"

    def moved(self, choice: Choice, setting: Setting) -> Choice | None:
        """The choice with one proposal added; None if it has it."""
        if setting not in self.moves:
            self.moves.append(setting)
        move = self.moves.index(setting)
        return None if move in choice.moves else Choice(choice.settings, (*choice.moves, move))

    def last(self, choice: Choice) -> Setting | None:
        """The proposal that was added last."""
        return self.moves[choice.moves[-1]] if choice.moves else None

    def turned(self, choice: Choice, scopes: Sequence[Sequence[int]]) -> Iterator[Choice]:
        """The choice with one knob of these scopes turned."""
        for i in dict.fromkeys(i for scope in scopes for i in scope):
            for j in range(len(self.knobs[i])):
                if j != choice.settings[i]:
                    yield Choice((*choice.settings[:i], j, *choice.settings[i + 1 :]), choice.moves)

    def scopes(self, where: Sequence[str]) -> Iterator[list[int]]:
        """Knobs inside the module at fault, then inside each module that contains it, then all.

        For "h.*.attn.c_proj": the knobs of h.*.attn.c_proj, of h.*.attn, of h.*, of h, and all knobs.
        """
        done: set[tuple[int, ...]] = set()
        # A wrong layout disturbs many gradients; three of them name its surroundings well enough.
        for path in where[:3]:
            words = path.split(".")
            for depth in range(len(words), 0, -1):
                prefix = ".".join(words[:depth])
                scope = [i for i, names in enumerate(self.names) if any(_within(n, prefix) for n in names)]
                if scope and tuple(scope) not in done and len(scope) < len(self.knobs):
                    done.add(tuple(scope))
                    yield scope
        yield list(range(len(self.knobs)))


def assumed_roles(made: Draft, plan: Plan) -> set[Need]:
    """Raw matrices whose axes grow by the same k: training is the same for both orders of in and out, noise is not.

    s = 1/k_in and r = 1/k_out are equal if k_in = k_out, so the gradient identity passes either way; the size
    of noise depends on which axis is read.
    """
    alike = [
        e.name for e in made.open if len({plan[e.name].axes[d].k for d in e.growing}) == 1 < len(e.growing)
    ]
    return {
        Need(
            f"{name} reads its last growing axis (both grow by the same factor, so training does not show which; "
            "write declared=mu.Declared(roles=…) before adding noise)",
            "assumption",
        )
        for name in dict.fromkeys(map(pattern_of, alike))
    }


def _names(knob: Knob) -> set[str]:
    return {pattern_of(n) for s in knob for n in (*s.roles, *s.layouts, *s.folds, *s.fills)}


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
