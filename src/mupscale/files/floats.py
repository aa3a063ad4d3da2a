"""The floating dtypes that hold weights, by safetensors' names and by torch's; needs no torch."""

from __future__ import annotations

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
