"""A Hugging Face directory: its config, where every tensor lies, and which other files belong to it.

Reads JSON and headers only: no weight is loaded, no pickle is opened. Checkpoints that cannot be widened as they
are (pickled, quantised, adapters, custom code) are refused with what to do first. Knows no model family.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError
from ..storage.location import Location, Url, location
from ..storage.looking import exists, is_dir, is_file, names_in
from ..storage.remote import listing
from .elsewhere import cache_faults, download_remedy, megatron_faults, pointer_faults
from .floats import FLOATS
from .headers import read_header
from .places import Place
from .strict import Reason, name_fault, os_errors, parse_json, printable, raise_few, read_regular, text_fault

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MODULES = "modules.json"
OPTIMIZER = "optimizer.pt"
CARD = "README.md"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of tokenizers, which an evaluation on text needs; a decoder's has at least one of them. Without any of them
transformers may build an empty tokenizer instead of failing."""
TRAINER = (
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "trainer_state.json",
    "training_args.bin",
)
_OURS = "mupscale*.json"
_CARRIED = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_REPLACED = (CONFIG, "*.index.json", CARD, _OURS)
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json", "model*.bin", "*.ckpt", "consolidated*.pth")
_UNQUANTISED = (
    "name the model that was quantised, which the card calls base_model, and quantise the result again; or dequantise this one "
    "and save it"
)
_QUANTISED_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_QUANTISED_LEAVES = (
    *("qweight", "qzeros", "g_idx", "absmax", "quant_map", "SCB", "weight_packed", "weight_scale"),
    *("weight_scale_inv", "weight_zero_point", "weight_format", "nested_absmax", "quant_state"),
)
_MOST_FILES = 100_000  # bounds the listing of a folder that is not a checkpoint


@dataclass(frozen=True)
class Module:
    """One module of a sentence-transformers model: its class, and the folder that holds its files, "" for the directory."""

    kind: str
    folder: str
    files: tuple[str, ...]
    """Names inside the folder; a module without settings may have no folder at all."""


@dataclass(frozen=True)
class Directory:
    """The content of a model's directory. Names are those of files directly inside it."""

    path: Location
    config: dict[str, Any]
    tensors: dict[str, Place]
    weights: tuple[str, ...]
    """The files that hold the tensors; none where only a configuration was read."""
    carried: tuple[str, ...]
    """Tokenizer, generation config and the like: a wider model uses the same."""
    trainer: tuple[str, ...]
    """Files that a Trainer run saved with the weights; nothing here opens them."""
    modules: tuple[Module, ...]
    """What modules.json of sentence-transformers names, in its order; none without such a file."""
    skipped: tuple[str, ...]
    """Files and folders that are neither read nor carried."""


def read_directory(path: Location | str, *, weights_needed: bool = True) -> Directory:
    """Read everything about a checkpoint except its weights; raises one error with all faults.

    Unless weights are needed, config.json alone will do, as long as no file with weights is there.
    """
    path = location(path)
    names = _names(path)
    claim = f"{printable(str(path))} cannot be widened as it is"
    bare = not weights_needed and CONFIG in names and not has_weights(path)
    if CONFIG not in names:
        raise_few(claim, cache_faults(path) + megatron_faults(path))
    raise_few(claim, _refused_files(path, names, bare))
    read = [n for n, regular in names.items() if regular and (n.endswith(".safetensors") or _is_carried(n))]
    raise_few(claim, pointer_faults(path, (CONFIG, INDEX, *read)))
    config = parse_json(read_regular(path / CONFIG), CONFIG, infinity=True)
    if not isinstance(config, dict):
        raise MupscaleError(
            f"{CONFIG} is not valid: it holds a {type(config).__name__}, expected an object with a model_type",
            code="config.not_an_object",
        )
    raise_few(claim, _refused_config(config))
    tensors = {} if bare else _sharded(path) if INDEX in names else read_header(path / SINGLE).tensors
    raise_few(claim, _quantised_tensors(tensors))
    weights = tuple(sorted({place.file for place in tensors.values()}))
    trainer = tuple(name for name, regular in names.items() if regular and _matches(name, TRAINER))
    carried = tuple(name for name, regular in names.items() if regular and _is_carried(name))
    modules = _modules(path) if MODULES in carried else ()
    inside = [f"{module.folder}/{name}" for module in modules if module.folder for name in module.files]
    raise_few(claim, foreign_links(path, (CONFIG, CARD, *weights, *trainer, *carried, *inside)))
    known = {CONFIG, SINGLE, INDEX, *weights, *trainer, *carried, *(module.folder for module in modules)}
    skipped = tuple(name for name in names if name not in known)
    return Directory(path, config, tensors, weights, carried, trainer, modules, skipped)


def _modules(path: Location) -> tuple[Module, ...]:
    entries = parse_json(read_regular(path / MODULES), MODULES)
    found, faults = [], []
    for entry in entries if isinstance(entries, list) else [None]:
        kind: Any
        folder: Any
        kind, folder = (
            (entry.get(key) for key in ("type", "path")) if isinstance(entry, dict) else (None, None)
        )
        wrong = text_fault(kind) or (name_fault(folder) if folder != "" else None)
        if wrong is not None:
            faults.append(
                Fault(
                    wrong.code,
                    f"{MODULES}: {printable(entry)}",
                    wrong.what,
                    "write the file as sentence-transformers does",
                )
            )
            continue
        names = _names(path / folder) if folder and is_dir(path / folder) else {}
        found.append(
            Module(kind.rpartition(".")[2], folder, tuple(n for n, regular in names.items() if regular))
        )
    raise_few(f"{MODULES} is not valid", faults)
    return tuple(found)


def has_weights(path: Location) -> bool:
    """Whether a directory holds a file with weights; an index whose files are not there does not count."""
    kinds = ("*.safetensors", *_PICKLED)
    return is_dir(path) and any(_matches(n, kinds) and not n.endswith(".json") for n in names_in(path))


def _names(path: Location) -> dict[str, bool]:
    """Every name in a folder, sorted, and whether it is (a link to) a regular file."""
    if isinstance(path, Url):
        return _remote_names(path)
    found: dict[str, bool] = {}
    with os_errors(path):
        if not is_dir(path):
            remedy = download_remedy(path) or "name a directory that save_pretrained has written"
            if exists(path):
                raise MupscaleError(
                    f"{printable(str(path))}: Not a directory; {remedy}", code="directory.is_a_file"
                )
            raise MupscaleError(
                f"{printable(str(path))}: No such file or directory; {remedy}",
                code="directory.does_not_exist",
            )
    with os_errors(path), os.scandir(path) as entries:
        for entry in entries:
            found[entry.name] = is_file(Path(entry.path))
            if len(found) > _MOST_FILES:
                raise MupscaleError(
                    f"{printable(str(path))} holds more than {_MOST_FILES} files",
                    code="directory.too_many_files",
                )
    return dict(sorted(found.items()))


def _remote_names(url: Url) -> dict[str, bool]:
    with os_errors(url):
        found = {one.name: one.is_file for one in listing(url)}
    if not found:
        raise MupscaleError(
            f"{printable(str(url))}: the store has no such folder; name one that save_pretrained has written",
            code="directory.does_not_exist",
        )
    if len(found) > _MOST_FILES:
        raise MupscaleError(
            f"{printable(str(url))} holds more than {_MOST_FILES} files", code="directory.too_many_files"
        )
    return found


def foreign_links(path: Location, names: Iterable[str]) -> list[Fault]:
    """Links out of a directory would publish a file that does not belong to the checkpoint.

    In the cache of the Hugging Face Hub every file of `snapshots/<revision>` is a link into `blobs` next to it.
    """
    if isinstance(path, Url):
        return []  # a store has no links
    home = path.resolve()
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    faults = []
    for name in names:
        target = (home / name).resolve()
        if not any(target.is_relative_to(folder) for folder in homes):
            what = f"a link to {printable(str(target))}, which is not part of this directory"
            faults.append(
                Fault(
                    "directory.link_leads_outside",
                    printable(name),
                    what,
                    "replace the link by the file itself, or remove it",
                )
            )
    return faults


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_carried(name: str) -> bool:
    replaced = _matches(name, (*_REPLACED, *TRAINER))
    return _matches(name, _CARRIED) and not replaced and name_fault(name) is None


def _refused_files(path: Location, names: Mapping[str, bool], bare: bool) -> list[Fault]:
    adapters: list[Fault] = []
    if any(name.startswith("adapter_") for name in names):
        from .adapters import adapter_faults

        adapters = adapter_faults(path, names)
    faults = [*adapters]
    faults += [
        Fault("checkpoint.is_quantised", printable(name), "the weights are quantised", _UNQUANTISED)
        for name in names
        if name in _QUANTISED_FILES
    ]
    if SINGLE in names and INDEX in names:
        faults.append(
            Fault(
                "directory.two_sets_of_weights",
                INDEX,
                f"{SINGLE} is there as well",
                "keep the one that holds the model",
            )
        )
    if SINGLE not in names and INDEX not in names and not adapters and not bare:
        pickled = [name for name in names if _matches(name, _PICKLED)]
        remedy = "load the model with transformers and call save_pretrained(folder), which writes safetensors"
        if pickled:
            faults.append(
                Fault(
                    "checkpoint.pickled_weights",
                    printable(pickled[0]),
                    "the weights are pickled, and pickles can run code",
                    remedy,
                )
            )
        else:
            faults.append(
                Fault("directory.no_weights", SINGLE, f"neither this file nor {INDEX} is there", remedy)
            )
    if CONFIG not in names and not adapters:
        faults.append(
            Fault(
                "directory.no_config",
                CONFIG,
                "it is missing",
                "name a directory that save_pretrained has written",
            )
        )
    return faults


def _refused_config(config: Mapping[str, Any]) -> list[Fault]:
    faults = []
    if config.get("quantization_config") is not None or config.get("compression_config") is not None:
        faults.append(
            Fault(
                "checkpoint.is_quantised",
                f"{CONFIG}: quantization_config",
                "the weights are quantised",
                _UNQUANTISED,
            )
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or text_fault(model_type) is not None:
        what = f"{printable(model_type)}, expected the name of a type of transformers"
        faults.append(
            Fault(
                "config.no_model_type",
                f"{CONFIG}: model_type",
                what,
                'write "model_type": "llama", for example',
            )
        )
    elif config.get("auto_map"):
        what = f"{printable(model_type)!r} may be computed by code that comes with the checkpoint, which is never run"
        remedy = (
            f"if the class of transformers computes the same, remove auto_map from {CONFIG}; otherwise convert the "
            "checkpoint to a class of transformers"
        )
        faults.append(Fault("config.code_with_checkpoint", f"{CONFIG}: auto_map", what, remedy))
    return faults


def _sharded(path: Location) -> dict[str, Place]:
    """The tensors of all shards. If there is an index, it must name the same tensors in the same files."""
    index = parse_json(read_regular(path / INDEX), INDEX)
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not where:
        raise MupscaleError(
            f"{INDEX} is not valid: it has no weight_map from tensors to files; copy or download it again",
            code="directory.index_without_map",
        )
    faults = []
    for name, file in where.items():
        wrong = text_fault(name) or name_fault(file)
        if wrong is None and not file.endswith(".safetensors"):
            wrong = Reason("directory.index_names_no_safetensors", "a safetensors file is expected")
        if wrong is not None:
            faults.append(Fault(wrong.code, f"{INDEX}: {printable(name)} in {printable(file)}", wrong.what))
    raise_few(f"{INDEX} is not valid", faults)
    tensors: dict[str, Place] = {}
    for file in sorted(set(where.values())):
        try:
            found = read_header(path / file).tensors
        except MupscaleError as error:
            faults += error.faults or [
                Fault(error.code, printable(file), error.claim, "copy or download the file again")
            ]
            continue
        wanted = {name for name, other in where.items() if other == file}
        for name in sorted(found.keys() - wanted):
            index_says = (
                f"the index puts it into {where[name]}" if name in where else "the index does not name it"
            )
            faults.append(
                Fault(
                    "directory.index_names_other_file" if name in where else "directory.index_lacks_tensor",
                    printable(name),
                    f"in {file}, but {index_says}",
                )
            )
        for name in sorted(wanted - found.keys()):
            faults.append(
                Fault(
                    "directory.index_names_missing_tensor",
                    printable(name),
                    f"the index puts it into {file}, which does not have it",
                )
            )
        tensors.update(found)
    raise_few(f"{INDEX} and the files it names do not agree", faults)
    return tensors


def _quantised_tensors(tensors: Mapping[str, Place]) -> list[Fault]:
    faults = []
    for name, place in tensors.items():
        leaf = name.rpartition(".")[2]
        packed = leaf == "weight" and place.dtype not in FLOATS
        if packed or leaf in _QUANTISED_LEAVES or place.dtype.startswith("F8"):
            what = f"{place.dtype}, a quantised weight or part of one"
            faults.append(Fault("checkpoint.is_quantised", printable(name), what, _UNQUANTISED))
    return faults
