"""From a checkpoint directory and a request to a job: every fact is fixed here, no tensor is moved.

`record` gathers what decides the result; `job_of` is a pure function of that record and of the base directory, so
`check` can rebuild the job of any grown directory and hold its bytes against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from ..errors import Fault, MupscaleError
from ..families.record import FamilyPlan, Part, Reading
from ..files.directory import CARD, CONFIG, INDEX, MODULES, OPTIMIZER, Directory
from ..files.elsewhere import hub_name
from ..files.places import torch_dtype
from ..files.strict import read_regular
from ..jobs.digests import make_job
from ..jobs.job import BLOCK_BYTES, Job, Move, Text
from ..plans.plan import Plan
from ..runs.growth_record import FORMAT
from ..runs.provenance import reference_of
from ..storage.location import Location, absolute
from ..storage.looking import has_versions, is_file
from ..version import __version__
from .about import MARK, factors
from .base import Base
from .request import Request
from .result.card import card
from .result.not_carried import not_carried
from .result.sentence_modules import module_files
from .result.train_script import NAME as SCRIPT
from .result.train_script import SENTENCES, peak_rate, train_script
from .shards import Spelling, plan_without, planned_names, stored_plan, weight_moves, written_by
from .state.optimizer_state import has_state, trainer_state, universal_state

if TYPE_CHECKING:
    from ..noise.auto import AutoNoise
    from ..noise.kinds import Noise, Readers
    from ..noise.resolved import NoisePlan


def record(
    base: Base,
    family: FamilyPlan,
    request: Request,
    choice: Mapping[str, Any] | None = None,
    *,
    out: Location | None = None,
    share: tuple[int, int] = (0, 1),
    threads: int = 1,
) -> dict[str, Any]:
    """Everything that decides the result, ready to become `mupscale.json`.

    `choice` is the size that was chosen for a request of automatic noise, with the losses that led to it. Norms are measured by
    so many threads; with `out`, each is kept there at once, for a run that resumes and for workers with another share.
    """
    plan, directory = family.plan, base.directory
    modules = module_files(directory, plan)
    early, history = base.early, base.history
    since = plan if early is None else early.then(plan)
    noise = None
    if request.adds_noise:
        noise = noise_record(base, family, request, choice, out, share, threads)
    return {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "request": request.as_json(),
        "model_type": family.model_type,
        "base_architecture": family.architecture,
        "architecture": family.wide_architecture,
        "multipliers": request.goal.k_text,
        "config": wide_config(family.wide_config, request.dtype),
        "parameters": {end: plan.parameters(end) for end in ("base", "wide")},
        "plan_hash": plan.hash,
        "plan": plan.as_json(),
        "since_reference": since.as_json(),
        "reference": reference_of(early),
        "not_stored": list(family.not_stored),
        "spelling": {
            "parts": {name: part.as_json() for name, part in family.stored.items()},
            **family.reading.as_json(),
        },
        "noise": noise,
        **({"peak_lr": peak_rate(directory)} if request.wakes else {}),
        **({SENTENCES: True} if modules.texts and not modules.refused else {}),
        "losses": None,
        "words": None if family.new_words is None else {"ids": list(family.new_words), "losses": None},
        "factors": factors(since),
        # Nothing that depends on the machine or the hour: workers that plan at the same time make the same job.
        "evidence": {key: getattr(family.evidence, key) for key in ("source", "trials", "steps")},
        "notes": list(family.notes),
        "not_carried": {
            **not_carried(directory, modules.refused),
            **(wide.not_carried if (wide := universal_state(directory, plan, request)) is not None else {}),
        },
        "base": {
            "name": _name(absolute(directory.path)),
            "config": config_digest(directory),
            # An object that changes gets another version, and reading names the one it began with: one read is enough.
            **(
                {"versions": True} if not request.trust_base and has_versions(directory.path / CONFIG) else {}
            ),
        },
        "grown_from": history.as_json(),
    }


def noise_record(
    base: Base,
    family: FamilyPlan,
    request: Request,
    choice: Mapping[str, Any] | None,
    out: Location | None = None,
    share: tuple[int, int] = (0, 1),
    threads: int = 1,
) -> dict[str, Any]:
    """The noise of every tensor, in sizes that are measured on the stored weights, as a record holds it."""
    from ..jobs.norms.measured import measured_in
    from ..jobs.norms.norm_journal import NormJournal
    from ..noise.resolve import norms_wanted, resolve_noise, unused_seed

    plan, early, path = family.plan, base.early, base.directory.path
    noise, settings = _requested_noise(request, plan, early, choice)
    stored = stored_plan(family)
    tensors = base.tensors(stored, Spelling.of(family))
    moves = weight_moves(stored, base.directory, tensors=tensors)[1]
    exempt = replace(family.exempt, frozen=family.exempt.frozen | set(family.reading.absent))
    wanted = list(norms_wanted(noise, plan=plan, since=early, exempt=exempt))
    files = [source.file for move in moves for source in move.sources]
    journal = NormJournal(out, path, files) if isinstance(out, Path) and wanted else None
    names = planned_names(tensors)
    norms = measured_in(path, moves, names, wanted, journal=journal, share=share, threads=threads)
    resolved = resolve_noise(
        lambda name, what: norms[name, what],
        noise,
        plan=plan,
        seed=unused_seed(request.seed, early, base.history.seeds),
        since=early,
        exempt=exempt,
    )
    auto = {} if choice is None else {"auto": dict(choice)}
    return {"kind": type(noise).__name__, "asked": settings, **auto, **resolved.as_json()}


def _requested_noise(
    request: Request, plan: Plan, early: Plan | None, choice: Mapping[str, Any] | None
) -> tuple[Noise, dict[str, Any]]:
    """The noise that was asked for, by size, by its cost or by recipe, and how it is recorded."""
    from ..noise.auto import AutoNoise
    from ..noise.kinds import CLASSES, NewUnits, Readers, SignalNoise

    settings: dict[str, Any] = {}
    noise: Noise | AutoNoise
    if request.recipe is not None:
        recipe = request.recipe
        recipe.check(plan, early, [] if request.optimizer is None else [request.optimizer])
        noise, settings = recipe.noise, {"lr": recipe.lr, "recipe": f"proxy of width {recipe.width}"}
        if isinstance(noise, NewUnits):
            settings |= {"readers": noise.readers, "size": noise.size}
    elif request.rise is None:
        assert request.noise is not None
        scheme, value = request.noise
        if scheme in get_args(Readers):
            noise, settings = NewUnits(cast("Readers", scheme), value), {"readers": scheme, "size": value}
        else:
            noise, settings = CLASSES[scheme](value), {scheme: value}
    else:
        noise = AutoNoise(request.rise)
    if isinstance(noise, AutoNoise):
        assert choice is not None
        return SignalNoise(choice["t"]), {"t": choice["t"], "chosen for a rise of": noise.share, **settings}
    return noise, settings


def config_digest(directory: Directory) -> str:
    """What distinguishes one configuration of a base from another."""
    return hashlib.sha256(json.dumps(directory.config, sort_keys=True).encode()).hexdigest()


def check_config(directory: Directory, about: Mapping[str, Any]) -> None:
    """Raise unless the base's configuration is the one that the record was made from."""
    if about["base"]["config"] != config_digest(directory):
        what = "it is not the configuration that was grown"
        raise MupscaleError(
            "the base is not the one of the record",
            [Fault("growth.other_base", CONFIG, what, "name the base itself")],
        )


def job_of(
    base: Base,
    out: Location,
    about: Mapping[str, Any],
    block_bytes: int = BLOCK_BYTES,
    like: Job | None = None,
) -> Job:
    """The job that writes what the record says, into `out`.

    Shards are filled in the order of the plan, which a record of 0.2.0 has lost: its entries are sorted. It needs the job that wrote
    the result, `like`. Each tensor then goes into the file that it has there.
    """
    directory = base.directory
    check_config(directory, about)
    request = Request.from_json(about["request"])
    plan, noise = plan_and_noise(base, about)
    spelling = about["spelling"]
    parts = {name: Part.of_json(part) for name, part in spelling["parts"].items()}
    reading = Reading.of_json(spelling)
    stored = plan_without(plan, [*about["not_stored"], *reading.absent])
    there = None if like is None else written_by(like)
    tensors = base.tensors(stored, Spelling(parts, reading.names, reading.left_out), there or {})
    files, moves, index = weight_moves(
        stored, directory, noise, request.dtype, request.shard_bytes, there, tensors
    )
    config = {**about["config"], MARK: {"plan_hash": plan.hash, "version": about["version"]}}
    texts = [
        Text(CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n"),
        Text(CARD, card(about, _card_of(directory))),
        *([Text(INDEX, index)] if index is not None else []),
    ]
    modules = module_files(directory, plan)
    files, moves = (*files, *modules.files), (*moves, *modules.moves)
    texts += modules.texts
    carried = [*directory.carried, *modules.carried]
    if modules.refused:
        carried.remove(MODULES)
    script = train_script(about)
    if script is not None and SCRIPT not in carried:
        texts.append(Text(SCRIPT, script))
    if (universal := universal_state(directory, plan, request, noise)) is not None:
        files, moves = (*files, *universal.files), (*moves, *universal.moves)
        texts += universal.texts
        written = {file.name for file in universal.files}
        carried += [name for name in directory.trainer if name not in written]
    elif has_state(directory, request):
        file, more = trainer_state(directory, plan, about, request, noise)
        files, moves = (*files, file), (*moves, *more)
        carried += [name for name in directory.trainer if name != OPTIMIZER]
    return make_job(
        directory.path,
        out,
        files,
        moves if like is None else _in_order_of(like.moves, moves),
        carried=carried,
        texts=texts,
        block_bytes=block_bytes,
        about=dict(about),
        trust_base=request.trust_base or bool(about["base"].get("versions")),
    )


def _in_order_of(others: Iterable[Move], moves: Iterable[Move]) -> list[Move]:
    """Moves in the order that others to the same places have."""
    order = {(move.target.file, move.target.offset, move.name): at for at, move in enumerate(others)}
    return sorted(moves, key=lambda m: order.get((m.target.file, m.target.offset, m.name), len(order)))


def plan_and_noise(base: Base, about: Mapping[str, Any]) -> tuple[Plan, NoisePlan | None]:
    """The plan and the resolved noise of a record."""
    plan = Plan.of_json(about["plan"])
    if plan.hash != about["plan_hash"]:
        raise MupscaleError(
            "the record's plan does not have the hash that stands next to it", code="growth.plan_hash_differs"
        )
    if about["noise"] is None:
        return plan, None
    from ..noise.resolved import restore_noise

    return plan, restore_noise(about["noise"], plan, base.early)


def wide_config(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """What config.json of the result says, with the dtype that was asked for."""
    if dtype is None:
        return dict(config)
    name = str(torch_dtype(dtype)).removeprefix("torch.")
    return {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": name}


def _name(base: Location) -> str:
    """What the base is called: on the Hub, if it lies in the cache, or else by its folder."""
    return hub_name(base) or base.name


def _card_of(directory: Directory) -> str:
    path = directory.path / CARD
    return read_regular(path).decode(errors="replace") if is_file(path) else ""
