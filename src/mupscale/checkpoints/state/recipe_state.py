"""What the optimizer state next to the weights says of a recipe: whose it is, and with which constants it was trained.

Reads groups and the names of what is kept; knows nothing of tensors, and decides nothing about the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...errors import Fault, MupscaleError
from ...files.directory import OPTIMIZER, Directory
from ...files.pickles.torch_file import read_tree
from ...optimizers.identify import candidates
from ...optimizers.read import parts, settings_of
from ...training.recipe import Recipe

if TYPE_CHECKING:
    from ...training.recipe import Recipe


def notes_on(recipe: Recipe, directory: Directory, named: str | None = None) -> list[str]:
    """What a user should know; raises when the state is that of another optimizer than the recipe's.

    `named` is the optimizer that the user says it was.
    """
    if OPTIMIZER not in directory.trainer:
        return (
            []
            if named is not None
            else [_optimizer_unknown(recipe, f"there is no {OPTIMIZER} next to the weights")]
        )
    try:
        groups, state = parts(read_tree(directory.path / OPTIMIZER), OPTIMIZER)
    except MupscaleError as error:  # who carries the state hears of it; who leaves it behind need not
        return [] if named is not None else [_optimizer_unknown(recipe, f"{error.claim} [{error.code}]")]
    settings = list(map(settings_of, groups))
    notes = []
    if named is None:
        found = _usual(candidates(groups, state.values()))
        if found and recipe.optimizer not in found:
            what = f"it is the state of {' or '.join(found)}, the recipe was tuned with {recipe.optimizer}"
            remedy = "tune a proxy with the optimizer of this run; if it was another after all, --optimizer"
            raise MupscaleError(
                "this recipe does not apply to this run",
                [Fault("recipe.other_optimizer", OPTIMIZER, what, remedy)],
            )
        if len(found) != 1:
            fits = f"fits {' and '.join(found)}" if found else "fits no optimizer in the registry"
            notes.append(_optimizer_unknown(recipe, f"what {OPTIMIZER} keeps {fits}"))
    others = recipe.other_constants(settings)
    if others:
        notes.append(f"other constants than the recipe was tuned with: {'; '.join(others)}")
    return notes


def _usual(names: Iterable[str]) -> list[str]:
    """Packages rebuild torch's classes with the same settings and state; those of torch are the usual ones."""
    every = list(names)
    return [name for name in every if name.startswith("torch.optim.")] or every


def _optimizer_unknown(recipe: Recipe, why: str) -> str:
    return (
        f"whether the base was trained with {recipe.optimizer}, as the recipe needs, is not known: {why}; "
        f"if it was, --optimizer {recipe.optimizer} says so"
    )
