"""A Python file of the user: loaded as a module, its functions checked, its errors shown with their line.

Executes only the file's top level.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import ModuleType

from ..arguments import wrong_function
from ..errors import Fault, MupscaleError


def load_file(path: Path) -> ModuleType:
    """Import a user's file as a module; it may import files next to it, and its exceptions are reported with their line."""
    spec = importlib.util.spec_from_file_location(f"mupscale_proxy_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise MupscaleError(
            f"{path}: no such Python file; name one that defines build(width)", code="proxy.no_such_file"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes of the file can be found again by name
    if str(path.parent.absolute()) not in sys.path:
        sys.path.append(str(path.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frames = frames_from(path, error)
        where = f" in line {frames[0].lineno}" if frames else ""
        raise MupscaleError(
            f"running {path} failed{where}: {type(error).__name__}: {error}", code="proxy.file_failed"
        ) from error
    return module


def missing_functions(owner: object, **wanted: tuple[str, ...]) -> list[Fault]:
    """A fault for every function that is missing from a user's file or takes other arguments.

    >>> [(fault.where, fault.remedy) for fault in missing_functions(Path, build=("width",))]
    [('build', 'write def build(width): …')]
    """
    return [
        fault._replace(remedy=f"write def {name}({', '.join(arguments)}): …")
        for name, arguments in wanted.items()
        for fault in wrong_function(name, getattr(owner, name, None), *arguments)
    ]


def frames_from(path: Path, error: Exception) -> list[FrameSummary]:
    """The frames of a traceback from the user's file on; empty where the file is not part of it.

    >>> frames_from(Path("proxy.py"), ValueError("elsewhere"))
    []
    """
    frames = extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if Path(frame.filename).absolute() == path.absolute()]
    return frames[own[0] :] if own else []
