"""`mu.tune`: from a proxy to a recipe. Several calls with the same storage share the work.

Opens the storage, works until the study is done, and writes the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from ..arguments import wrong_kind, wrong_number
from ..errors import Fault, raise_faults
from ..models.build import build
from ..rules.schemes import RISE
from ..runs.run import Run
from ..training.recipe import NO_SCHEDULE, Recipe, TensorGrowth
from ..training.units.groups import param_groups
from .agenda.status import EQUAL_STEPS, LegResult, StudyStatus, stays
from .proxy import Proxy, read_proxy
from .settings import Settings
from .whole import write_whole
from .worker import Worker


def tune(
    proxy: Proxy | ModuleType | str | Path,
    settings: Settings,
    *,
    storage: Any = None,
    study: str = "mupscale",
    folder: str | Path = "tuning",
    every: float = 30.0,
    beat: float = 10.0,
) -> Recipe:
    """Tune the learning rate, and noise if asked for, on a small model and the same model grown.

    The first sweep finds the learning rate of the small model, the second that of the grown one, next to the small one trained on.
    Calls that share storage, folder and settings share the study, whatever machine they run on, and a call that is repeated
    continues it. Progress is logged to the logger "mupscale".

    Args:
        proxy: What is trained: a `Proxy`, or the file or module that defines `build` and `train`.
        settings: What the sweeps try, and at which widths.
        storage: Where the study is kept: `postgresql://…`, or a journal file; by default one in the folder.
        study: The name of the study.
        folder: Where checkpoints and results are written.
        every: Seconds between checkpoints.
        beat: Seconds between signs of life of a worker.

    Returns:
        The recipe, which is also written to recipe.json in the folder.

    Raises:
        MupscaleError: If a setting cannot be used, or the study was begun with others.

    >>> import tempfile, torch
    >>> from torch import nn
    >>> def build(width): return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
    >>> def train(run, steps, report):
    ...     for step in range(run.steps, steps):
    ...         x = torch.randn(8, 2)
    ...         loss = (run.model(x) - x[:, :1] * x[:, 1:]).square().mean()
    ...         run.optimizer.zero_grad(); loss.backward(); run.optimizer.step()
    ...         report(step, loss)
    >>> settings = Settings(width=4, k=2, steps=4, lrs=[0.01, 0.02], noises=[0, 0.1], factors=[1], extend=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recipe = tune(Proxy(build, train), settings, folder=folder)
    >>> recipe.k, recipe.optimizer, sorted(recipe.tensors)
    (2, 'torch.optim.AdamW', ['0.bias', '0.weight', '2.bias', '2.weight'])
    """
    from .engine import open_storage
    from .ledger import Ledger

    place = Path(folder)
    faults = wrong_kind("settings", settings, Settings, "write Settings(width=128, k=2, steps=400)")
    faults += wrong_number("every", every, "write every=30.0: seconds between checkpoints")
    faults += wrong_number("beat", beat, "write beat=10.0: seconds between signs of life", above=True)
    if place.exists() and not place.is_dir():
        faults.append(
            Fault(
                "directory.is_a_file", "folder", f"{place} is a file, expected a folder", "name another one"
            )
        )
    raise_faults("this study cannot be run", faults)
    known = read_proxy(proxy)
    settings = settings.for_proxy(known)
    place.mkdir(parents=True, exist_ok=True)
    opened = open_storage(place / "study.journal" if storage is None else storage)
    worker = Worker(known, settings, Ledger(opened, study, settings, beat), place, every=every)
    recipe = recipe_of(worker, *worker.work())
    write_whole(place / "recipe.json", recipe.to_json().encode())
    return recipe


def recipe_of(worker: Worker, now: StudyStatus, results: Mapping[str, LegResult]) -> Recipe:
    """The recipe of a study that is done: a function of its results only, not of which worker produced them."""
    runs, settings, proxy = worker.runs, worker.settings, worker.proxy
    assert now.wide is not None
    base, best = now.base.best, now.wide.best
    assert base is not None
    assert best is not None
    run = runs.wide(best, worker.base_of(now).parts, at_base=False)
    controls = [loss for point, loss in now.wide.top.items() if point.is_control]
    remarks = [
        f"the best point of the {name} sweep still lies on an edge of the grid: extend it"
        for name, agenda in (("base", now.base), ("wide", now.wide))
        if agenda.on_edge
    ]
    if best.is_control:
        least = min(point.noise for point in now.wide.points if point.noise)
        remarks.append(
            f"no noise is best: within this budget noise of {least:g} and above gains nothing over continuing the base"
        )
    model = build(lambda: proxy.build(settings.at))  # for its names alone
    groups = param_groups(model, Run(model), proxy.optimizer, lr=best.lr, **proxy.settings)
    constants = {key: value for key, value in groups[0].items() if key not in ("params", "lr_factor")}
    sizes = [axis.base for entry in runs.plan.tensors.values() for axis in entry.axes if axis.grows]
    sigma: float | dict[str, Any] | None = None if settings.by_units else best.noise
    rise = None
    if settings.scheme == "t":
        sigma = run.provenance["noise"]["sigmas"]
    elif settings.scheme == RISE.name:
        sigma, rise = (None, best.noise) if best.noise else (0.0, None)
        remarks += [f"a rise of {rise:g} was t = {runs.sizes[rise]:g} on the proxy"] if rise else []
    not_grown = {leg.how: results[leg.key].loss for leg in stays(settings, now.base, now.wide)}
    grown = now.wide.top[best]
    if not_grown:
        remarks.append(stay_note(grown, not_grown))
    recipe = Recipe(
        optimizer=proxy.optimizer_name,
        constants={key: list(v) if isinstance(v, tuple) else v for key, v in constants.items()},
        sigma=sigma,
        k=settings.k,
        tensors=TensorGrowth.all_of(runs.plan, runs.reference),
        paired=settings.scheme == "paired",
        rise=rise,
        units=min(sizes),
        width=settings.width,
        reference=settings.at,
        plan=runs.plan.hash,
        steps=settings.steps,
        wide_steps=settings.after,
        batch=settings.batch,
        schedule=type(run.schedulers[0]).__name__ if run.schedulers else NO_SCHEDULE,
        base_lr=base.lr,
        seed=settings.seed,
        loss=grown,
        control=min(controls, default=None),
        stay={how: None if loss == inf else loss for how, loss in not_grown.items()},
        tried=_tried(now, settings, results),
        cost=_cost(now, settings, results),
        remarks=remarks,
        by="units" if settings.by_units else "copies",
    )
    return replace(recipe, remarks=(*remarks, *recipe.differences()))


def stay_note(grown: float, stay: Mapping[str, float]) -> str:
    """Whether growing beat not growing on the proxy, at equal FLOPs.

    >>> print(stay_note(2.0, {"going on": 2.1, "from scratch": 1.9}))
    growing did not beat not growing on the proxy: loss 2 grown; the base's width for as many FLOPs: 2.1 going on, 1.9 from scratch
    """
    losses = ", ".join(f"{loss:.6g} {how}" for how, loss in stay.items())
    won = "beat" if grown < min(stay.values()) else "did not beat"
    return f"growing {won} not growing on the proxy: loss {grown:.6g} grown; the base's width for as many FLOPs: {losses}"


def _tried(
    now: StudyStatus, settings: Settings, results: Mapping[str, LegResult]
) -> tuple[dict[str, Any], ...]:
    """Every point, with its loss at the last rung it reached."""
    rows = []
    for agenda, ladder in ((now.base, settings.base_ladder), (now.wide, settings.wide_ladder)):
        for point in agenda.points if agenda is not None else ():
            last = [leg for leg in ladder.legs(point) if leg.key in results][-1]
            loss = results[last.key].loss
            rows.append(
                {
                    "sweep": "base" if point.noise is None else "wide",
                    "noise": point.noise,
                    "lr": point.lr,
                    "steps": last.end,
                    "loss": None if loss == inf else loss,
                    "diverged": loss == inf,
                }
            )
    return tuple(rows)


def _cost(now: StudyStatus, settings: Settings, results: Mapping[str, LegResult]) -> dict[str, int]:
    """Steps at the two widths, of the legs that count; a run that diverged stopped early and is charged in full."""
    narrow = wide = min(EQUAL_STEPS, settings.after) if settings.control_at_base else 0
    for agenda, ladder in ((now.base, settings.base_ladder), (now.wide, settings.wide_ladder)):
        for point in agenda.points if agenda is not None else ():
            reached = max(leg.end for leg in ladder.legs(point) if leg.key in results)
            if point.noise is None or (point.is_control and settings.control_at_base):
                narrow += reached
            else:
                wide += reached
    if now.wide is not None:
        narrow += sum(leg.end for leg in stays(settings, now.base, now.wide))
    return {"base_width_steps": narrow, "wide_steps": wide}
