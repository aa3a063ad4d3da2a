"""Where the files of a checkpoint are when they are not here: on the Hub, in a cache, behind a Git LFS pointer; and whose
files these are when another function reads them.

Knows how such places look on disk and which command fetches the files. Downloads nothing.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import Fault, MupscaleError
from ..storage.location import Location, Url
from ..storage.looking import exists
from .strict import name_fault, os_errors, printable, read_regular

POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of what Git stores in place of a large file."""
_LONGEST_POINTER = 1024  # bytes; the specification of Git LFS asks for less
MEGATRON_LATEST, MEGATRON_CONFIG = "latest_checkpointed_iteration.txt", "metadata.json"
MEGATRON_FORMAT = "sharded_backend"
MEGATRON_SMALL = 10_000  # bytes; both of these files have less than a hundred
DCP_METADATA = ".metadata"
"""What torch.distributed.checkpoint calls the file that says where its tensors lie."""
UNIVERSAL_LATEST = "latest_universal"
"""What names the folder of a universal checkpoint of DeepSpeed."""
UNIVERSAL_SETTINGS = "optimizer_state.pt"
"""The file of such a checkpoint that has the groups of the optimizer."""
CONVERT = (
    "run python -m deepspeed.checkpoint.ds_to_universal --input_folder RUN/global_stepN --output_folder "
    "RUN/global_stepN_universal --inject_missing_state, and name RUN"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+)")


def download_remedy(path: Path) -> str | None:
    """The command that fetches a model, if a path that is not there reads like the name of one on the Hub.

    >>> download_remedy(Path("org/some-7b"))
    'if it is a model on the Hugging Face Hub, run hf download org/some-7b --local-dir some-7b and name some-7b'
    >>> download_remedy(Path("/data/some-7b"))
    """
    name = str(path)
    if not _HUB_ID.fullmatch(name) or path.parent.exists():
        return None
    command = f"hf download {name} --local-dir {path.name}"
    return f"if it is a model on the Hugging Face Hub, run {command} and name {path.name}"


def hub_name(path: Location) -> str | None:
    """The name on the Hub of a snapshot in the cache, or None for any other directory.

    >>> hub_name(Path("/cache/models--org--some-7b/snapshots/0a1b"))
    'org/some-7b'
    """
    above = path.parent.parent.name if path.parent.name == "snapshots" else ""
    found = _CACHED.fullmatch(above)
    return f"{found[1]}/{found[2]}" if found else None


def cache_faults(path: Location) -> list[Fault]:
    """A fault if a directory is the cache of a model, which holds each revision in a folder of its own."""
    if isinstance(path, Url):
        return []
    with os_errors(path):
        if not (path / "snapshots").is_dir():
            return []
        revisions = sorted(entry.name for entry in os.scandir(path / "snapshots") if entry.is_dir())
        main = path / "refs" / "main"
        chosen = read_regular(main, 200).decode(errors="replace").strip() if main.is_file() else ""
    shown = [chosen] if chosen in revisions else revisions
    remedy = " or ".join(f"write {printable(str(path / 'snapshots' / name))}" for name in shown)
    what = f"the cache of a model of the Hub, which holds each revision ({len(revisions)} here) in a folder of its own"
    return [
        Fault(
            "directory.is_hub_cache",
            printable(str(path)),
            what,
            remedy or "download the model again: it has no revision",
        )
    ]


def megatron_faults(path: Location) -> list[Fault]:
    """A fault if a directory says of itself that Megatron wrote it, which a function of its own reads."""
    if not exists(path / MEGATRON_LATEST):
        config = path / MEGATRON_CONFIG
        if not exists(config) or MEGATRON_FORMAT.encode() not in read_regular(config):
            return []
    remedy = "call mu.grow_checkpoint(base, out, plan=plan)"
    return [
        Fault(
            "directory.is_megatron",
            printable(str(path)),
            "a checkpoint of Megatron, which this does not read",
            remedy,
        )
    ]


def is_universal(path: Location) -> bool:
    return exists(path / UNIVERSAL_LATEST)


def universal_names(path: Location) -> tuple[str, ...]:
    """What belongs to a universal checkpoint in a directory: `latest_universal` and the folder that it names."""
    return (UNIVERSAL_LATEST, tag_in(path)) if is_universal(path) else ()


def tag_in(path: Location) -> str:
    """The name of the folder that holds the checkpoint; a name that leads elsewhere is refused."""
    tag = read_regular(path / UNIVERSAL_LATEST, 1000).decode(errors="replace").strip()
    if (why := name_fault(tag)) is not None:
        raise MupscaleError(f"{UNIVERSAL_LATEST} names {printable(tag)}: {why.what}", code=why.code)
    return tag


def pointer_faults(path: Location, names: Iterable[str]) -> Iterator[Fault]:
    """A fault for every file of which only its Git LFS pointer is here."""
    if isinstance(path, Url):
        return  # Git LFS leaves pointers in checkouts only
    for name in names:
        try:
            small = os.stat(path / name).st_size <= _LONGEST_POINTER
        except OSError:
            continue  # whoever reads it says so
        if small and read_regular(path / name).startswith(POINTER):
            what = "a Git LFS pointer, expected the file itself"
            yield Fault(
                "file.lfs_pointer",
                printable(name),
                what,
                f"run git -C {shlex.quote(printable(str(path)))} lfs pull",
            )
