"""What the optimizer state next to the weights says of a recipe: whose it is, and with which constants it was trained.

Reads groups and the names of what is kept; knows nothing of tensors, and decides nothing about the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.directory import Directory
from ..files.torch_file import read_tree
from ..optimizers.read import parts, settings_of
from ..rules.optimizer_rule import Decay
from ..rules.optimizers import RULES
from ..training.recipe import Recipe
from .trainer_groups import fitting
from .trainer_state import OPTIMIZER


def notes_on(recipe: Recipe, directory: Directory, named: str | None = None) -> list[str]:
    """What a user should know; raises when the state is that of another optimizer than the recipe's.

    `named` is the optimizer that the user says it was.
    """
    if OPTIMIZER not in directory.trainer:
        return [] if named is not None else [_untold(recipe, f"there is no {OPTIMIZER} next to the weights")]
    try:
        groups, state = parts(read_tree(directory.path / OPTIMIZER), OPTIMIZER)
    except MupscaleError as error:  # who carries the state hears of it; who leaves it behind need not
        return [] if named is not None else [_untold(recipe, f"{error.claim} [{error.code}]")]
    settings = list(map(settings_of, groups))
    told = []
    if named is None:
        found = optimizers_of(settings, sorted({key for entry in state.values() for key in entry}))
        if found and recipe.optimizer not in found:
            what = f"it is the state of {' or '.join(found)}, the recipe was tuned with {recipe.optimizer}"
            remedy = "tune a proxy with the optimizer of this run; if it was another after all, --optimizer"
            raise MupscaleError(
                "this recipe does not apply to this run",
                [Fault("recipe.other_optimizer", OPTIMIZER, what, remedy)],
            )
        if len(found) != 1:
            fits = f"fits {' and '.join(found)}" if found else "fits no optimizer in the registry"
            told.append(_untold(recipe, f"what {OPTIMIZER} keeps {fits}"))
    others = recipe.other_constants(settings)
    if others:
        told.append(f"other constants than the recipe was tuned with: {'; '.join(others)}")
    return told


def optimizers_of(settings: Sequence[Mapping[str, Any]], kept: Sequence[str]) -> list[str]:
    """The optimizers in the registry that such settings and such a state can be of; a flag tells Adam from AdamW.

    >>> adam = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, amsgrad=False)
    >>> optimizers_of([adam], ["step", "exp_avg", "exp_avg_sq"])
    ['torch.optim.Adam', 'torch.optim.AdamW']
    >>> optimizers_of([{**adam, "decoupled_weight_decay": True}], ["step", "exp_avg", "exp_avg_sq"])
    ['torch.optim.AdamW']
    """
    found = fitting({key for group in settings for key in group}, set(kept))
    flags = {name: RULES[name].decoupled_flag for name in found}
    telling = [
        name
        for name, flag in flags.items()
        if flag is None
        or all(flag not in g or bool(g[flag]) == (RULES[name].decay is Decay.DECOUPLED) for g in settings)
    ]
    told = telling or list(found)
    # Packages rebuild torch's classes with the same settings and state; those of torch are the usual ones.
    return [name for name in told if name.startswith("torch.optim.")] or told


def _untold(recipe: Recipe, why: str) -> str:
    return (
        f"whether the base was trained with {recipe.optimizer}, as the recipe needs, is not known: {why}; "
        f"if it was, --optimizer {recipe.optimizer} says so"
    )
