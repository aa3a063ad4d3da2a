"""The floating dtypes that hold weights, by safetensors' names and by torch's, and what no weight may be; needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import Fault
from .strict import printable, raise_few

FLOATS = ("F16", "BF16", "F32", "F64")
"""By safetensors' names."""
TORCH_NAMES = {
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "double": "F64",
}
"""Every name that torch has for one of them -> safetensors' name."""


def refuse_not_finite(names: Iterable[str]) -> None:
    """Raise if there are names: of tensors of a base that have NaN or inf."""
    what, remedy = "it has NaN or inf", "grow an earlier checkpoint of this run, and name another output"
    raise_few(
        "the base has weights that are not finite",
        [Fault("model.weight_not_finite", printable(name), what, remedy) for name in names],
    )
