"""The public door: grow a checkpoint of any format, on disk or in a store.

A Hugging Face directory becomes a request (`grow_directory.py`); another format grows by its own folder of `formats/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..arguments import wrong_whole
from ..errors import Fault, raise_faults
from ..families.config.goal import Goal, Way
from ..files.directory import CONFIG
from ..files.elsewhere import DCP_METADATA
from ..files.strict import printable, system_errors
from ..formats.format import Format, format_at
from ..noise.auto import AutoNoise, wrong_auto
from ..noise.kinds import CLASSES, AddedNoise, NewUnits, given_size, wrong_noise
from ..plans.plan import Plan
from ..rules.noise_defaults import DEFAULT_T
from ..storage.location import Location, location
from ..storage.looking import exists
from ..training.recipe import Recipe
from .events import Listener, NotCarried
from .grow_directory import Grown, Options, grow_directory
from .noise_words import AUTO
from .request import Request, parse_dtype


def grow_checkpoint(
    base: Location | str,
    out: Location | str,
    multipliers: int | str | Mapping[str, int] | None = None,
    *,
    to: str | None = None,
    by: Way | None = None,
    plan: Plan | None = None,
    noise: AddedNoise | NewUnits | AutoNoise | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    with_state: bool = True,
    optimizer_class: str | None = None,
    batch_file: Path | str | None = None,
    threads: int = 2,
    dry_run: bool = False,
    on: Listener = lambda event: None,
) -> Grown:
    """Grow a checkpoint into a larger one of the same format, as `mupscale grow` and `mupscale upscale` do.

    Without `noise` and `recipe` the result trains exactly like the base; with one of them it can use its new width. What
    `mupscale upscale` does without options is `noise=mu.NewUnits()`: the width grows by new units, which wake without a change of
    the loss. Tensors are streamed, so memory does not depend on the size of the model. A call that was interrupted is resumed by
    the same call, and a result that is there already is not written again.

    A checkpoint of Megatron, of DeepSpeed (universal) or of Lightning grows by a `plan`. Build the optimizer of the wide job with
    `mu.trainers.megatron_overrides` or `mu.trainers.groups_for`, or add `mu.trainers.LightningCallback` to the Lightning trainer.

    Args:
        base: A directory of Hugging Face, here or at a URL such as s3://bucket/model, or a checkpoint of another trainer.
        out: The directory or file to write.
        multipliers: How many times wider: 2 for every width, or by name, as `{"hidden": 2, "ffn": 4}`.
        to: Sizes, layers, words and experts as the command line takes them: "layers=8,hidden=96".
        by: "copies" or "units". By default "units" for `NewUnits`, or a recipe that was tuned so, and otherwise "copies".
        plan: The plan from base to wide, for formats other than Hugging Face's.
        noise: What parts copies or wakes new units.
        recipe: Noise and learning rate as `tune` found them, in place of `noise`.
        seed: The number on which all noise depends.
        dtype: The dtype in which weights are stored; by default the base's.
        with_state: Whether the state of a Trainer next to the weights is carried.
        optimizer_class: The class that left this state, such as "torch.optim.AdamW", where the file does not tell. Of several optimizers
            it is the class of all.
        batch_file: Inputs whose loss is measured before and after noise, as safetensors or JSON by argument name. Without it
            the model writes text itself.
        threads: How many threads write.
        dry_run: Whether everything is planned and checked, and nothing is written.
        on: A function that is called with every event: what was planned and measured, what is not carried, how many bytes are
            written.

    Returns:
        Where the result lies, and its `outcome`: "written", "already there" or "dry run".

    Raises:
        NotExact: If no exact plan is found for this kind of model, on a small copy.
        DamagedFile: If a file of the base is cut short or damaged.
        MupscaleError: If the goal cannot be reached, the model is not supported, or an argument cannot be used.

    >>> import tempfile, transformers
    >>> config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> transformers.LlamaForCausalLM(config).save_pretrained(f"{folder.name}/base")
    >>> grow_checkpoint(f"{folder.name}/base", f"{folder.name}/wide", 2).outcome
    'written'
    >>> transformers.LlamaForCausalLM.from_pretrained(f"{folder.name}/wide").config.hidden_size
    32
    >>> folder.cleanup()
    """
    path, target = location(base), location(out)
    other = _other_format(path)
    faults = wrong_whole("seed", seed) + wrong_whole("threads", threads, least=1)
    if noise is not None and recipe is not None:
        what, remedy = "a recipe sets the noise, and noise is given too", "leave out one of them"
        faults.append(Fault("recipe.with_other_settings", "noise", what, remedy))
    goal = multipliers is not None or to is not None
    if other is None:
        faults += _without_plan(plan, goal)
    else:
        options = {
            "by": by,
            "dtype": dtype,
            "with_state": not with_state,
            "batch_file": batch_file,
            "dry_run": dry_run,
        }
        faults += _by_plan(goal or recipe is not None, [name for name, value in options.items() if value])
    raise_faults("the checkpoint cannot be grown like that", faults)
    if other is not None:
        with system_errors():
            left = other.grown(path, target, plan, noise, seed, optimizer_class)
        if left:
            on(NotCarried(left))
        return Grown(target, "written")
    request = Request(
        Goal.parse(
            1 if multipliers is None else multipliers,
            to,
            by or ("units" if isinstance(noise if recipe is None else recipe.noise, NewUnits) else "copies"),
        ),
        noise=None if noise is None else _scheme_of(noise),
        seed=seed,
        dtype=None if dtype is None else parse_dtype(str(dtype).removeprefix("torch.")),
        state=with_state,
        optimizer=optimizer_class,
        recipe=None if recipe is None else replace(recipe, tried=()),
    )
    batch = None if batch_file is None else Path(batch_file)
    return grow_directory(path, target, request, Options(batch=batch, threads=threads, dry_run=dry_run), on)


def _other_format(base: Location) -> Format | None:
    """The format of a checkpoint that is no Hugging Face directory. Such a directory may hold the state of other trainers too.

    >>> _other_format(Path("nothing/here"))              # whoever reads the directory says what is missing
    """
    if exists(base / CONFIG):
        return None
    found = format_at(base)
    if found is None and exists(base / DCP_METADATA):
        what = "a checkpoint of torch.distributed, which grows while a wide job loads it"
        fault = Fault(
            "checkpoint.grows_while_loading", printable(str(base)), what, "call mu.load_grown_ in that job"
        )
        raise_faults("this checkpoint cannot be grown like that", [fault])
    return found


def _without_plan(plan: Plan | None, goal: bool) -> list[Fault]:
    """What is wrong with a call for a Hugging Face directory, whose plan is found from a goal."""
    if plan is not None:
        what = "a Hugging Face directory describes its model, and its plan is found"
        return [Fault("checkpoint.plan_is_found", "plan", what, "leave it out, and write multipliers=2")]
    what, remedy = "nothing says what grows", "write multipliers=2"
    return [] if goal else [Fault("goal.not_given", "multipliers", what, remedy)]


def _by_plan(goal: bool, others: Sequence[str]) -> list[Fault]:
    """What is wrong with a call for another format, which grows by a plan: a goal, or options that it would not follow."""
    faults = []
    if goal:
        what = "this checkpoint grows by a plan, which says what grows"
        remedy = "leave out multipliers, to and recipe"
        faults.append(Fault("checkpoint.plan_is_the_goal", "multipliers", what, remedy))
    what = "it is for Hugging Face directories, and this is no such directory"
    return faults + [Fault("checkpoint.not_for_format", name, what, "leave it out") for name in others]


def _scheme_of(noise: AddedNoise | NewUnits | AutoNoise) -> tuple[str, float]:
    """Noise as a request stores it: a scheme and its size.

    >>> from mupscale import SignalNoise
    >>> _scheme_of(SignalNoise(0.05)), _scheme_of(AutoNoise())
    (('t', 0.05), ('auto', 0.05))
    """
    if isinstance(noise, AutoNoise) and noise.untrained is None:
        raise_faults("this noise cannot be used", wrong_auto(noise))
        return AUTO, noise.share
    if not isinstance(noise, AutoNoise):
        raise_faults("this noise cannot be used", wrong_noise(noise))
        if isinstance(noise, NewUnits):
            return noise.readers, float(noise.size)
        size = given_size(noise)
        for scheme, kind in CLASSES.items():
            if isinstance(size, int | float) and kind(size) == noise:
                return scheme, float(size)
    what = f"{noise} has sizes or settings that a directory does not record; expected one size"
    remedy = f"write noise=mu.SignalNoise({DEFAULT_T})"
    raise_faults("this noise cannot be used", [Fault("noise.not_one_size", "noise", what, remedy)])
    raise AssertionError
