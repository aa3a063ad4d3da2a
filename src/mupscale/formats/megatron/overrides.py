"""What Megatron's optimizer of a wide job is built with: the settings of every group of a grown checkpoint.

Megatron is imported by `megatron_overrides` alone.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from ...errors import Fault, MupscaleError
from ...optimizers.read import Names
from ...storage.location import Location
from .groups import NAMES, OVERRIDDEN, grown_before, stored_groups
from .parts import spellings

_LAYER = re.compile(r"\blayers\.\d+\.")


def megatron_overrides(wide: Location | str) -> dict[Any, dict[str, Any]]:
    """Make the `config_overrides` of Megatron's `get_megatron_optimizer`: every tensor's rates, decay and eps.

    Args:
        wide: The folder that `grow_checkpoint` wrote, or that the wide job has saved since.

    Returns:
        The overrides, by Megatron's own keys.

    Raises:
        MupscaleError: If the checkpoint was not grown, or Megatron is not installed.

    >>> import tempfile, mupscale as mu
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         megatron_overrides(folder)
    ...     except mu.MupscaleError as error:
    ...         print(error.code)
    megatron.no_metadata
    """
    groups = stored_groups(wide)
    if not grown_before(groups) or not all(isinstance(group.get(NAMES), list) for group in groups):
        what = "its groups are not those of a checkpoint that was grown"
        remedy = "name the folder that grow_checkpoint wrote, or that the wide job has saved since"
        raise MupscaleError(
            "this checkpoint has no overrides", [Fault("megatron.was_not_grown", str(wide), what, remedy)]
        )
    try:
        key: Any = import_module("megatron.core.optimizer").ParamKey
    except ModuleNotFoundError as error:
        raise MupscaleError(
            f"overrides are Megatron's own: pip install megatron-core ({error})", code="extra.missing"
        ) from None
    patterns = _patterns([group[NAMES] for group in groups])
    return {
        key(name=names): {k: group[k] for k in OVERRIDDEN if k in group}
        for names, group in zip(patterns, groups, strict=True)
    }


def _patterns(members: Names) -> list[tuple[str, ...]]:
    """Patterns that match the names of each group and no other, behind any number of wrappers.

    A stage of a pipeline counts its layers from 0, so numbers of layers are left open where all layers are alike. Norms
    have a second name, which fused layers of Transformer Engine give them.

    >>> _patterns([["layers.0.a", "layers.1.a", "b"], ["layers.0.c"]])
    [('*module.b', '*module.layers.*.a', 'b', 'layers.*.a'), ('*module.layers.*.c', 'layers.*.c')]
    >>> _patterns([["layers.0.a"], ["layers.1.a"]])
    [('*module.layers.0.a', 'layers.0.a'), ('*module.layers.1.a', 'layers.1.a')]
    """
    loose = [{_LAYER.sub("layers.*.", name) for name in names} for names in members]
    alike = sum(map(len, loose)) == len(set[str]().union(*loose))
    every = [{own for name in of for own in spellings(name)} for of in (loose if alike else members)]
    return [tuple(sorted(before + name for name in of for before in ("", "*module."))) for of in every]
