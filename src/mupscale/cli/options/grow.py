"""Options of `mupscale grow` and `mupscale upscale`, and the request that they make."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from ...checkpoints.noise_words import DEFAULT_NOISE, READERS, WAKING, parse_noise
from ...errors import MupscaleError
from .plan import add_source, declared, goal_of
from .verb import add_threads, add_verb, check_threads, location, path

if TYPE_CHECKING:
    from pathlib import Path

    from ...checkpoints.request import Request
    from ...families.config.goal import Goal
    from ...training.recipe import Recipe


def add_to(verbs: Any) -> None:
    exact = "write a wider checkpoint that trains exactly like the base and cannot use its width yet"
    grown = "write a wider checkpoint that can use its new width, with the loss of the base"
    kept = ("./base ./wide -k 2", "./base ./wide -k 2 --dry-run")
    noisy = ("./base ./wide -k 2", "./base ./wide -k 2 --by copies --noise auto")
    more = "Streamed, with the optimizer state of a Trainer; run the same command again to resume."
    frees = "mupscale upscale lets it use its new width."
    units = "Without options by new units, which change no output; --noise parts copies instead."
    for name, text, about, examples in (
        ("grow", exact, f"{frees} {more}", kept),
        ("upscale", grown, f"{units} {more}", noisy),
    ):
        verb = add_verb(
            verbs,
            name,
            text,
            about,
            examples=examples,
            usage=f"mupscale {name} BASE OUT [-k K] [further options]",
        )
        add_source(verb)
        verb.add_argument("out", type=location, help="the directory to write, here or at a URL")
        if name == "upscale":
            _add_waking(verb)
        _add_writing(verb)
        verb.set_defaults(
            run=run,
            noise=None,
            train_steps=None,
            recipe=None,
            seed=0,
            inputs=None,
            no_loss=False,
            verb_name=name,
        )


def _add_waking(verb: argparse.ArgumentParser) -> None:
    """The options of `upscale` alone: how new units wake and copies part."""
    waking = verb.add_argument_group("waking new units, or parting copies by noise")
    waking.add_argument(
        "--noise",
        metavar="SIZE",
        help="by units: copied (new units read what trained units read, and noise) or random (default: copied). By copies, "
        "where the loss rises for a while: auto, auto=0.2, t=… (of each weight's spectral norm), sigma=… or paired=…; without a "
        f"tuned size auto, or {DEFAULT_NOISE} where the model does not fit into memory",
    )
    waking.add_argument(
        "--recipe",
        type=path,
        metavar="FILE",
        help="the rate, and by copies the noise, as mupscale tune found them",
    )
    waking.add_argument(
        "--train-steps",
        type=int,
        metavar="N",
        help="steps that it will be trained for, for --noise auto",
    )
    waking.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the noise (default: 0)")
    waking.add_argument(
        "--inputs",
        type=path,
        metavar="FILE",
        help="safetensors or JSON by argument name, for the loss, such as images.safetensors with pixel_values and labels "
        "(default: text that the model writes)",
    )
    waking.add_argument("--no-loss", action="store_true", help="measure no loss")


def _add_writing(verb: argparse.ArgumentParser) -> None:
    result = verb.add_argument_group("what is written")
    result.add_argument("--dtype", metavar="TYPE", help="float32, bfloat16, … (default: as stored)")
    result.add_argument(
        "--shard-size", type=_bytes, metavar="SIZE", help="largest file, as 500MB (default: 5GB)"
    )
    result.add_argument("--no-state", action="store_true", help="leave the optimizer state behind")
    result.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="what wrote that state, such as torch.optim.AdamW (default: read from the file)",
    )
    job = verb.add_argument_group("the job")
    add_threads(job, "writer threads, 20 MiB each")
    job.add_argument("--share", metavar="I/N", help="only share I (from 0) of N (default: all)")
    job.add_argument(
        "--trust-base",
        action="store_true",
        help="do not read the base again at the end, to see whether it changed; this is recorded",
    )
    job.add_argument("--dry-run", action="store_true", help="plan and check everything, write nothing")
    job.add_argument("--quiet", action="store_true", help="print no progress, no table and no next steps")


def run(chosen: argparse.Namespace) -> int:
    _check(chosen)
    recipe = None if chosen.recipe is None else _recipe(chosen.recipe)
    if _wakes(chosen, recipe):
        chosen.by = "units"
    goal = goal_of(chosen)
    request, share = _request(chosen, goal, recipe), _share(chosen.share)
    from .. import grow as grow

    return grow.run(chosen, request, share)


def _check(chosen: argparse.Namespace) -> None:
    """Raise if options cannot work, before anything that takes long to import."""
    if chosen.noise is not None and chosen.recipe is not None:
        raise MupscaleError(
            "--recipe sets the noise: give --noise or --recipe, not both", code="recipe.with_other_settings"
        )
    if chosen.train_steps is not None and chosen.recipe is not None:
        raise MupscaleError(
            "--recipe sets the noise: leave out --train-steps, which is for --noise auto",
            code="recipe.with_other_settings",
        )
    if chosen.train_steps is not None and chosen.noise is None:
        raise MupscaleError(
            "--train-steps is for --noise auto, and no --noise is given", code="option.steps_need_auto"
        )
    if chosen.verb_name == "upscale" and chosen.by == "copies" and not (chosen.noise or chosen.recipe):
        raise MupscaleError(
            "copies need a noise size: --noise auto | t=… | sigma=… | paired=…, or --recipe FILE\n"
            f"  without a tuned size write --noise auto; for a model that does not fit into memory {DEFAULT_NOISE}\n"
            "  for new units, which need none, leave out --by; for the exact map without noise: mupscale grow",
            code="noise.not_given",
        )
    check_threads(chosen)
    if chosen.noise is not None:
        parse_noise(chosen.noise, chosen.train_steps)


def _wakes(chosen: argparse.Namespace, recipe: Recipe | None) -> bool:
    """Whether new units are asked for, which `upscale` wakes: where nothing is said that parts copies."""
    if chosen.verb_name != "upscale" or chosen.by == "copies":
        return False
    if recipe is not None:
        return recipe.by == "units"
    return chosen.noise is None or parse_noise(chosen.noise, chosen.train_steps)[0] in READERS


def _request(chosen: argparse.Namespace, goal: Goal, recipe: Recipe | None) -> Request:
    from ...checkpoints.request import SHARD_BYTES, Request, parse_dtype

    noise = WAKING if recipe is None and _wakes(chosen, recipe) else None
    request = Request(
        goal,
        noise=noise if chosen.noise is None else parse_noise(chosen.noise, chosen.train_steps),
        seed=chosen.seed,
        dtype=None if chosen.dtype is None else parse_dtype(chosen.dtype),
        shard_bytes=chosen.shard_size or SHARD_BYTES,
        export=chosen.export,
        state=not chosen.no_state,
        optimizer=chosen.optimizer,
        recipe=recipe,
        trust_base=chosen.trust_base,
        declared=declared(chosen),
    )
    if chosen.no_loss and chosen.inputs is not None and request.rise is None:
        raise MupscaleError(
            "--inputs is for the loss that --no-loss leaves out; give one of them",
            code="option.batch_without_loss",
        )
    return request


def _recipe(file: Path) -> Recipe:
    """A recipe as a request stores it: without the points that were tried."""
    from dataclasses import replace

    from ...training.recipe import Recipe

    return replace(Recipe.read(file), tried=())


def _share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise MupscaleError(
            f"--share {text}: expected I/N with I from 0 to N-1, such as 0/8", code="option.not_a_share"
        )
    return int(found[1]), int(found[2])


def _bytes(text: str) -> int:
    """Bytes from a text.

    >>> _bytes("5GB"), _bytes("200 mb"), _bytes("1.5kB")
    (5000000000, 200000000, 1500)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.lower())
    count = round(float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")) if found else 0
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 5GB, 500MB, 200kB or 1TB")
    return count
