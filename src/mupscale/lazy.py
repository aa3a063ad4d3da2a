"""Names that are imported when they are first used, so that `import mupscale` costs nothing and needs no torch.

One table per namespace: name -> (module, extra). `mupscale.verify` imports `training/check/verify.py` then, and not before;
where a package of an extra is missing, the error names the extra. Callbacks of other libraries are classes that can be
made only when those libraries are there; `lazy_subclass` makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from .extras import needs

PACKAGE = __name__.rpartition(".")[0]
Lookup = Callable[[str], Any]


def exported(
    namespace: str, table: Mapping[str, tuple[str, str]], namespaces: tuple[str, ...] = ()
) -> Lookup:
    """The `__getattr__` of a namespace: a name of the table comes from its module below the package.

    "module:other" exports what the module calls `other`. `namespaces` are subpackages that attribute access imports.
    The namespace also gets a `__dir__` with all of these names, for completion in editors and shells.

    >>> look = exported("mupscale.rules", {"Axis": ("rules.axes", "")})
    >>> look("Axis").__module__
    'mupscale.rules.axes'
    """

    def look(name: str) -> Any:
        if name in namespaces:
            return import_module(f"{namespace}.{name}")
        if name not in table:
            raise AttributeError(f"module {namespace!r} has no attribute {name!r}")
        place, extra = table[name]
        module, _, stored = place.partition(":")
        with needs(f"{namespace}.{name}", *((extra,) if extra else ())):
            found = getattr(import_module(f"{PACKAGE}.{module}"), stored or name)
        setattr(sys.modules[namespace], name, found)
        return found

    there = vars(sys.modules[namespace])
    there.setdefault("__dir__", lambda: sorted({*there, *table, *namespaces}))
    return look


def lazy_subclass(
    module: str,
    name: str,
    hooks: type,
    parent: Callable[[], type],
    more: Callable[[type], Mapping[str, Any]] | None = None,
) -> Lookup:
    """The `__getattr__` of a module with one class: `hooks` over the class that `parent` imports.

    `more` gives further attributes, from the parent. The class is made once and kept in its module, so that it can be
    pickled and found again.

    >>> look = lazy_subclass("mupscale.lazy", "Callback", type("Hooks", (), {}), lambda: dict)
    >>> look("Callback") is sys.modules["mupscale.lazy"].Callback
    True
    """

    def look(asked: str) -> Any:
        if asked != name:
            raise AttributeError(f"module {module!r} has no attribute {asked!r}")
        base = parent()
        attributes = {} if more is None else more(base)
        made = type(name, (hooks, base), {"__module__": module, "__doc__": hooks.__doc__, **attributes})
        setattr(sys.modules[module], name, made)
        return made

    return look
