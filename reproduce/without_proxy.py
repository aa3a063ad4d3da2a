"""How much noise for people without a proxy: the small pair of a setting, grown with relative noise of several sizes.

The learning rate is the base's, as it is for them; the point that tuning found stands beside it. The documented default
is smaller than the best size here, because trained language models do not survive that one
(`benchmarks/noise_damage.py`). The exit code is 1 if the default is larger than the best size that is stored.

    python -m reproduce.without_proxy                   # what is stored, and the noise that did best
    python -m reproduce.without_proxy mlp_adamw         # train the pair of one setting first
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch

import mupscale as mu
from mupscale.rules.noise_defaults import DEFAULT_T

from .ledger import final
from .page import experiments
from .stages import Experiment, Job, digest_of, train_curve
from .store import RESULTS, Store

SIZES = (0.1, 0.2, 0.4, 0.8)
"""t: the spectral norm of the noise over that of the weight."""
TUNED = "tuned"
STORE = RESULTS / "without_proxy.jsonl"

Finals = Mapping[str, float]
"""The final loss for every size, and for the tuned point."""


def keys(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """The key of every curve of a setting: its sizes, and the tuned point; none before tuning."""
    recipe = experiment.known_recipe()
    if recipe is None:
        return {}
    told = {"setting": experiment.setting.name, "lr": recipe.base_lr, "steps": experiment.scale.steps}
    sizes = {f"{size:g}": {**told, "t": size} for size in SIZES}
    return {TUNED: {**told, "recipe": digest_of(recipe)}, **sizes}


def train(experiment: Experiment) -> None:
    """Make the curves of a setting that are missing."""
    setting, scale, recipe, store = experiment.setting, experiment.scale, experiment.recipe(), Store(STORE)
    wide, lr = scale.k * scale.proxy, experiment.base_lr()

    @cache
    def base() -> mu.Run:
        run = setting.fresh(scale.proxy, lr, 0)
        setting.train(run, range(scale.steps), 0)
        return run

    def make(size: float | None) -> dict[str, Any]:
        if size is None:
            plan = setting.plan(scale.proxy, wide)
            run = mu.upscale(base(), lambda: setting.build(wide), recipe=recipe, plan=plan)
        else:
            run = setting.grown(base(), scale.proxy, scale.k, mu.SignalNoise(size), lr, seed=0)
        job = Job("ours", "ours", 0, wide, scale.steps, scale.steps)
        path = experiment.cache / f"{setting.name}_t{size}.pt"
        made = train_curve(setting, run, job, scale.points, path)
        path.unlink(missing_ok=True)
        return made

    for name, key in keys(experiment).items():
        curve = store.of(key, partial(make, key.get("t")))
        print(f"{setting.name} {name}: {final(curve['loss']):.4f} in {curve['seconds']:.0f} s", flush=True)


def finals(experiment: Experiment, store: Store) -> Finals:
    """What is stored of a setting; empty while a curve is missing."""
    found = {name: store.known(key) for name, key in keys(experiment).items()}
    if not found or None in found.values():
        return {}
    return {
        name: float("inf") if curve["diverged"] else final(curve["loss"])
        for name, curve in found.items()
        if curve is not None
    }


def regrets(every: Mapping[str, Finals]) -> dict[str, float]:
    """For each size, the worst ratio over settings of its loss to that of the best size there.

    >>> regrets({"a": {"0.1": 1.0, "0.2": 1.5, "tuned": 0.5}, "b": {"0.1": 4.0, "0.2": 2.0, "tuned": 2.0}})
    {'0.1': 2.0, '0.2': 1.5}
    """
    sizes = [name for name in next(iter(every.values())) if name != TUNED]
    best = {setting: min(told[size] for size in sizes) for setting, told in every.items()}
    return {size: max(told[size] / best[setting] for setting, told in every.items()) for size in sizes}


def main() -> int:
    known = {experiment.setting.name: experiment for experiment in experiments()}
    parser = argparse.ArgumentParser(prog="python -m reproduce.without_proxy")
    parser.add_argument(
        "settings", nargs="*", help=f"to train first: {', '.join(known)}; none: what is stored"
    )
    options = parser.parse_args()
    if strangers := [name for name in options.settings if name not in known]:
        parser.error(f"{', '.join(strangers)}: no such setting, expected {', '.join(known)}")
    torch.set_num_threads(1)
    for name in options.settings:
        train(known[name])
    store = Store(STORE)
    every = {name: told for name, e in known.items() if (told := finals(e, store))}
    if not every:
        print("nothing is stored: name a setting")
        return 2
    print(f"{'final loss':14}" + "".join(f"{name:>12}" for name in every))
    for size in next(iter(every.values())):
        print(f"{size:14}" + "".join(f"{told[size]:12.4f}" for told in every.values()))
    worst = regrets(every)
    best = min(worst, key=lambda size: worst[size])
    print(f"settings={len(every)} best={best} regret={worst[best]:.4f} default={DEFAULT_T:g}")
    return 0 if float(best) >= DEFAULT_T else 1


if __name__ == "__main__":
    sys.exit(main())
