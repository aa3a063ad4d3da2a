"""Options of `mupscale grow` and `mupscale upscale`, and the request that they make."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

from ...checkpoints.noise_words import DEFAULT_NOISE, READERS, WAKING, parse_noise
from ...errors import MupscaleError
from .plan import add_source, declared, goal_of
from .verb import add_verb, location, path

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
    units = "Without options by new units, which change no output; --noise or --recipe part copies instead."
    for name, text, about, examples in (
        ("grow", exact, f"{frees} {more}", kept),
        ("upscale", grown, f"{units} {more}", noisy),
    ):
        verb = add_verb(verbs, name, text, about, examples=examples)
        add_source(verb)
        verb.add_argument("out", type=location, help="the directory to write, here or at s3://bucket/name")
        if name == "upscale":
            verb.add_argument(
                "--noise",
                metavar="SIZE",
                help="noise that parts copies, which raises the loss for a while: auto (the size at which the loss has risen by a twentieth of what was learned, or by what --steps allow; "
                "auto=0.2 for a fifth), t=… "
                "(relative to each weight's spectral norm), sigma=… (one reference constant for all tensors) or paired=… "
                "(zero-sum over copies: the output moves by rounding only). Write auto where no size was tuned and the model fits "
                f"into memory, else {DEFAULT_NOISE}. With --by units: copied (new units read what trained units read, and noise) or "
                "random (default: copied, by units)",
            )
            verb.add_argument(
                "--steps",
                type=int,
                metavar="N",
                help="steps that the result will be trained for: --noise auto may cost a 4,000th of what was learned for each, and "
                "at most all of it",
            )
            verb.add_argument(
                "--recipe",
                type=path,
                metavar="FILE",
                help="noise as mupscale tune found it, instead of --noise; a rise of the loss is measured as with --noise auto",
            )
            verb.add_argument(
                "--seed", type=int, default=0, metavar="N", help="seed of the noise (default: 0)"
            )
            verb.add_argument(
                "--batch",
                type=path,
                metavar="FILE",
                help="inputs (safetensors or JSON, by argument name) whose loss is shown before and after noise, and by which "
                "--noise auto and a recipe with a rise choose (default: text that the model itself writes)",
            )
            verb.add_argument(
                "--no-loss",
                action="store_true",
                help="do not load base and result at the end to show the loss before and after noise",
            )
        _add_writing(verb)
        verb.set_defaults(
            run=run,
            noise=None,
            steps=None,
            recipe=None,
            seed=0,
            batch=None,
            no_loss=False,
            verb_name=name,
        )


def _add_writing(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--dtype", metavar="TYPE", help="dtype of the weights: float32, bfloat16, … (default: as stored)"
    )
    verb.add_argument(
        "--no-state", action="store_true", help="do not carry the optimizer state stored with the weights"
    )
    verb.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="class of the optimizer that wrote that state, such as torch.optim.AdamW (default: read from the file)",
    )
    verb.add_argument(
        "--shard-size",
        type=_bytes,
        metavar="SIZE",
        help="bytes of the largest file, as 200kB, 500MB, 5GB or 1TB (default: 5GB)",
    )
    verb.add_argument(
        "--workers",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="writer threads, about 20 MiB of memory each (default: %(default)s)",
    )
    verb.add_argument(
        "--worker", metavar="I/N", help="do only share I (from 0) of N, for job arrays (default: all)"
    )
    verb.add_argument(
        "--trust-base",
        action="store_true",
        help="do not read the base once more before the result is published, to see whether it changed meanwhile; recorded in mupscale.json",
    )
    verb.add_argument("--dry-run", action="store_true", help="plan and check everything, write nothing")
    verb.add_argument("--quiet", action="store_true", help="print no progress, no table and no next steps")


def run(chosen: argparse.Namespace) -> int:
    _check(chosen)
    if _wakes(chosen):
        chosen.by = "units"
    goal = goal_of(chosen)
    request, share = _request(chosen, goal), _share(chosen.worker)
    from .. import grow as grow

    return grow.run(chosen, request, share)


def _check(chosen: argparse.Namespace) -> None:
    """Raise if options cannot work, before anything that takes long to import."""
    if chosen.noise is not None and chosen.recipe is not None:
        raise MupscaleError(
            "--recipe sets the noise: give --noise or --recipe, not both", code="recipe.with_other_settings"
        )
    if chosen.steps is not None and chosen.recipe is not None:
        raise MupscaleError(
            "--recipe sets the noise: leave out --steps, which is for --noise auto",
            code="recipe.with_other_settings",
        )
    if chosen.steps is not None and chosen.noise is None:
        raise MupscaleError(
            "--steps is for --noise auto, and no --noise is given", code="option.steps_need_auto"
        )
    if chosen.verb_name == "upscale" and chosen.by == "copies" and not (chosen.noise or chosen.recipe):
        raise MupscaleError(
            "copies need a noise size: --noise auto | t=… | sigma=… | paired=…, or --recipe FILE\n"
            f"  without a tuned size write --noise auto; for a model that does not fit into memory {DEFAULT_NOISE}\n"
            "  for new units, which need none, leave out --by; for the exact map without noise: mupscale grow",
            code="noise.not_given",
        )
    if chosen.workers < 1:
        raise MupscaleError(
            f"--workers {chosen.workers}: expected a whole number, 1 or more", code="option.below_one"
        )
    if chosen.noise is not None:
        parse_noise(chosen.noise, chosen.steps)


def _wakes(chosen: argparse.Namespace) -> bool:
    """Whether new units are asked for, which `upscale` wakes: where nothing is said that parts copies."""
    if chosen.verb_name != "upscale" or chosen.recipe is not None or chosen.by == "copies":
        return False
    return chosen.noise is None or parse_noise(chosen.noise, chosen.steps)[0] in READERS


def _request(chosen: argparse.Namespace, goal: Goal) -> Request:
    from ...checkpoints.request import SHARD_BYTES, Request, parse_dtype

    waking = WAKING if _wakes(chosen) else None
    request = Request(
        goal,
        noise=waking if chosen.noise is None else parse_noise(chosen.noise, chosen.steps),
        seed=chosen.seed,
        dtype=None if chosen.dtype is None else parse_dtype(chosen.dtype),
        shard_bytes=chosen.shard_size or SHARD_BYTES,
        export=chosen.export,
        state=not chosen.no_state,
        optimizer=chosen.optimizer,
        recipe=None if chosen.recipe is None else _recipe(chosen.recipe),
        trust_base=chosen.trust_base,
        declared=declared(chosen),
    )
    if chosen.no_loss and chosen.batch is not None and request.rise is None:
        raise MupscaleError(
            "--batch is for the loss that --no-loss leaves out; give one of them",
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
            f"--worker {text}: expected I/N with I from 0 to N-1, such as 0/8", code="option.not_a_share"
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
