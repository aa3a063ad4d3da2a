"""How `from_pretrained` reads stored names: renamed, left out, or made anew because they are not stored.

The renaming is asked of transformers itself, name by name, so that old spellings (`LayerNorm.gamma`), a prefix that is
there or not, and tables of older versions are read as the stock class reads them. Reads no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from .copy.lift import Tensors
from .models import not_stored
from .record import Part, Reading

_COMPUTED = "the model computes it when it is built, so a stored value is not read"


def reading_of(model: nn.Module, stored: Iterable[str], parts: Mapping[str, Part]) -> Reading:
    """How a model of a stock class reads these stored names; `parts` are those that hold no whole tensor."""
    ties = Tensors.of(model).ties
    read_as = _names(model, stored)
    known, computed = set(model.state_dict()), set(not_stored(model))
    names: dict[str, str] = {}
    left_out: dict[str, str] = {}
    held = {ties.get(n, n) for name, part in parts.items() if name in read_as for n in part.tensors}
    for name, tensor in read_as.items():
        if tensor is None or name in parts:
            continue
        if tensor in computed or (tensor not in known and _is_computed(model, tensor, computed)):
            left_out[name] = _COMPUTED
        elif tensor not in known:
            left_out[name] = (
                f"{type(model).__name__} has no such tensor, and from_pretrained leaves it out too"
            )
        else:
            held.add(ties.get(tensor, tensor))
            if tensor != name:
                names[name] = tensor
    missing = {ties.get(name, name) for name in known} - held - computed
    return Reading(names, left_out, tuple(sorted(_made_anew(model, missing, held))) if read_as else ())


def _names(model: nn.Module, stored: Iterable[str]) -> dict[str, str | None]:
    """Stored name -> the name that transformers gives it, or None where a converter takes it apart or puts it together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefix, known = str(model.base_model_prefix), model.state_dict()
    found: dict[str, str | None] = {}
    for name in sorted(stored, key=dot_natural_key):  # some renamings depend on the names before
        renamed, converted = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, converted = rename_source_key(name, [], [], prefix, known)
        found[name] = renamed if converted is None else None
    return found


def _is_computed(model: nn.Module, name: str, computed: Collection[str]) -> bool:
    """Whether a name without a tensor is that of a table which the class now computes, or skips."""
    leaves = [
        leaf for leaf in ("rotary_emb.inv_freq", "position_ids") if any(c.endswith(leaf) for c in computed)
    ]
    patterns = [rf"(^|\.){re.escape(leaf)}$" for leaf in (*leaves, *computed)]
    for module in model.modules():
        patterns += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _made_anew(model: nn.Module, missing: Collection[str], held: Collection[str]) -> set[str]:
    """Missing tensors that the stock class makes for itself; any other missing tensor is a fault of the checkpoint.

    Those are what the class expects to be missing, and poolers and heads of which nothing is stored.
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    prefix = str(model.base_model_prefix)
    has_head = bool(prefix) and any(name.startswith(f"{prefix}.") for name in (*missing, *held))

    def part_of(name: str) -> str:
        """The head or the pooler that a tensor belongs to, or nothing."""
        if has_head and not name.startswith(f"{prefix}."):
            return name.partition(".")[0]
        before, found, _ = name.partition("pooler.")
        return before + found if found else ""

    there = {part_of(name) for name in held}
    return {
        name
        for name in missing
        if any(re.search(pattern, name) for pattern in patterns)
        or (part_of(name) and part_of(name) not in there)
    }
