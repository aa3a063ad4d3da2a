"""Tune small, apply large: what it costs and when it pays. Also the namespace of what a study takes and returns."""

import typing as _typing

from ..lazy import exported as _exported

if _typing.TYPE_CHECKING:
    from ..training.recipe import Recipe as Recipe
    from .advice import advise as advise
    from .proxy import Proxy as Proxy
    from .settings import Settings as Settings

__getattr__ = _exported(__name__, {"Settings": "tune", "Proxy": "tune"})
