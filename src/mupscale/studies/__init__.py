"""Studies: noise and learning rate tuned on a small pair by any number of workers, and reported. Also the namespace of what a study takes and returns.

The agenda of the sweeps is in `agenda/`, the study of a Hugging Face directory in `directory/`, the page about studies in
`report/`. May import every room before it; `budgets` counts the FLOPs.
"""

import typing as _typing

from ..lazy import exported as _exported

if _typing.TYPE_CHECKING:
    from ..training.recipe import Recipe as Recipe
    from .proxy import Proxy as Proxy  # not listed
    from .settings import Settings as Settings

__getattr__ = _exported(__name__, {"Settings": "tune", "Proxy": "tune"})
