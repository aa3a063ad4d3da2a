"""What the wide copy of a directory does not get, each with the reason: files, and noise that depends on the width."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ...errors import MupscaleError
from ...files.directory import CARD, MODULES, Directory
from ...files.elsewhere import CONVERT, universal_names
from ...storage.looking import is_dir

_REASONS = {
    "train.py": "the wide directory has its own, where its kind has one",
    ".git*": "it belongs to the repository of the base",
    ".*": "hidden files belong to a program or to a cache",
    "*.py": "it is code, which is neither run nor copied",
    "*.bin": "it may hold weights at the base's width; if it does not, copy it by hand",
    "mupscale*.json": "it records how the base was grown; the new record contains it",
    "*.safetensors": "it is not part of the model that was read",
    "*": "it is not known to fit another width; if it does, copy it by hand",
}
"""Pattern of a name -> why such a file is not copied; the first that matches counts."""
_WEIGHTS = (
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
    "*.gguf",
    "*.ot",
    "*.tflite",
)
_FOLDER = "it is a folder that modules.json does not name; if its files fit another width, copy it by hand"
_ARGUMENTS, _ALPHA = "training_args.bin", "neftune_noise_alpha"
NEFTUNE = (
    "the noise of NEFTune is as long as the width: every copy gets its own, smaller by the root of the growth, so training "
    "is not the base's"
)
_OTHER_FORMAT = "it holds the base's weights in another format"


def not_carried(directory: Directory, modules_refused: str) -> dict[str, str]:
    """Name -> reason, for everything in the directory that is neither read nor copied; the card is replaced."""
    own = {CARD, *universal_names(directory.path)}
    found = {name: _reason(directory, name) for name in directory.skipped if name not in own}
    if modules_refused:
        folders = [module.folder for module in directory.modules if module.files]
        found.update(dict.fromkeys((MODULES, *filter(None, folders)), modules_refused))
    if _has_neftune(directory):
        found[f"{_ARGUMENTS}: {_ALPHA}"] = NEFTUNE
    return found


def _has_neftune(directory: Directory) -> bool:
    """Whether the Trainer of the base adds noise to embeddings, by its arguments, which are read and not run."""
    if _ARGUMENTS not in directory.trainer:
        return False
    from ...files.pickles.torch_settings import read_settings

    try:
        held = read_settings(directory.path / _ARGUMENTS)
    except MupscaleError:  # the Trainer's own file, which is copied whatever is in it
        return False
    parts = getattr(held, "__dict__", {}).get("parts", ())
    return any(isinstance(part, dict) and part.get(_ALPHA) for part in parts)


def _reason(directory: Directory, name: str) -> str:
    if any(fnmatchcase(name, pattern) for pattern in _WEIGHTS):
        return _OTHER_FORMAT
    if fnmatchcase(name, "global_step*"):
        own = universal_names(directory.path)
        return f"it is cut by ranks of DeepSpeed; {f'its state is in {own[1]}' if own else f'to carry its state, {CONVERT} again'}"
    if is_dir(directory.path / name) and name[0] != ".":
        return _FOLDER
    return next(why for pattern, why in _REASONS.items() if fnmatchcase(name, pattern))
