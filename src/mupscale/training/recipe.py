"""The recipe: what tuning on a small pair found, as a value that larger runs apply, convert exactly or refuse.

Knows at which reference the constants are written, and what another run must share with the proxy for them to apply.
Does not know how they were found.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from math import isclose, isfinite
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError, raise_faults
from ..files import typed
from ..files.strict import parse_json, read_regular, refuse_malformed
from ..frozen import freeze_mappings
from ..models.names import parameter_names, resolve
from ..noise.auto import AutoNoise
from ..noise.kinds import MupNoise, NewUnits, Noise, PairedNoise
from ..optimizers.settings import in_units, same_setting
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..rules.axes import Axis
from ..rules.optimizer_rule import OptimizerRule
from ..rules.optimizers import qualified_name, rule_for
from ..runs.run import Run, since_of

FORMAT = "mupscale recipe 1"
_FIRST_WAY = ("by", "copies")
"""Left out where it is stored, because earlier versions of this form have no other way."""
_LONGEST = 1 << 26  # bytes; bounds what a foreign file can fill memory with
_MALFORMED = "this is not a recipe, expected what to_json wrote"
NO_SCHEDULE = "none"
"""The name of the schedule of a constant learning rate. None means that the schedule is not known."""
FEW_UNITS = 100
"""Below about this many units a proxy is too narrow for its optimum to be that of wide models."""


@dataclass(frozen=True)
class TensorGrowth:
    """One tensor as the proxy had it: its shape at the reference, and how it grew."""

    reference: tuple[int, ...]
    axes: tuple[str, ...]
    fold: str = "1"

    @staticmethod
    def all_of(plan: Plan, reference: Plan | None) -> dict[str, TensorGrowth]:
        """Every parameter of the wide model; `reference` leads from the reference to the plan's base."""
        return {
            name: TensorGrowth(
                entry.base_shape if reference is None else reference[entry.sources[0]].base_shape,
                tuple(map(_growth_of, entry.axes)),
                str(entry.fold),
            )
            for name, entry in plan.tensors.items()
            if entry.kind == "parameter" and entry.sources
        }


@dataclass(frozen=True)
class Recipe:
    """What tuning found: the constants of a growth by k, written at the reference, and everything they depend on.

    `mu.upscale(run, make, recipe=recipe)` applies it, or refuses it where it does not fit. `Recipe.read` reads it from a file.

    >>> recipe = Recipe("torch.optim.AdamW", {"lr": 1e-3}, 0.1, k=4, tensors={})
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True
    """

    optimizer: str
    """The full name of the optimizer's class."""
    constants: Mapping[str, Any]
    """lr, weight_decay, eps, … of the wide run, as written at the reference."""
    sigma: float | Mapping[str, Any] | None
    """σ̄ of the noise, one for all tensors or one for each; None where `rise` is given, and by new units."""
    k: int
    """How many times wider the proxy grew."""
    tensors: Mapping[str, TensorGrowth]
    """The tensors of the proxy: their names show its depth, their shapes its reference, their axes its growth."""
    paired: bool = False
    """Whether the noise sums to zero over copies, as `PairedNoise`."""
    rise: float | None = None
    """The noise as a share of what the base has learned, by which the loss rises: its size is measured on each base."""
    units: int = 0
    """The fewest units that grew in the proxy base."""
    width: int = 0
    """The width of the proxy base."""
    reference: int = 0
    """The width at which the constants are written."""
    plan: str = ""
    """The hash of the plan by which the proxy grew."""
    steps: int = 0
    """Training steps of the proxy base."""
    wide_steps: int = 0
    """Training steps after growth."""
    batch: int | None = None
    """The batch size of the proxy; None if it is not known."""
    schedule: str | None = None
    """The class of the proxy's scheduler, or "none"; None if it is not known."""
    base_lr: float | None = None
    """The best learning rate of the proxy base, at the reference: the one to train bases with."""
    seed: int = 0
    """The seed of the study."""
    loss: float | None = None
    """The loss of the best point."""
    control: float | None = None
    """The loss of the best point without noise."""
    stay: Mapping[str, float | None] = field(default_factory=dict)
    """Losses of the proxy base's width for as many FLOPs, by how it was trained; None where it diverged."""
    tried: Sequence[Mapping[str, Any]] = field(default=())
    """Every point that was trained, with its loss."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """What the study has cost."""
    remarks: Sequence[str] = field(default=())
    """What to know before it is used, such as an optimum at the edge of the grid."""
    by: str = "copies"
    """How the proxy grew: "copies", which noise parts, or "units", whose rates alone are tuned."""

    def __post_init__(self) -> None:
        freeze_mappings(self)

    @property
    def lr(self) -> float:
        """The learning rate after growth, at the reference."""
        return float(self.constants["lr"])

    @property
    def noise(self) -> Noise | AutoNoise:
        """The noise, at the reference, the rise of the loss by which its size is chosen on the base, or what wakes new units.

        >>> Recipe("torch.optim.AdamW", {"lr": 1e-3}, None, k=2, tensors={}, rise=0.05).noise
        AutoNoise(rise=0.05, untrained=None, steps=None)
        """
        if self.by == "units":
            return NewUnits()
        if self.rise is not None:
            return AutoNoise(self.rise)
        assert self.sigma is not None
        return PairedNoise(self.sigma) if self.paired else MupNoise(self.sigma)

    def summary(self) -> dict[str, Any]:
        """The part of the recipe that a grown run keeps: everything except the tensors and the trials."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in kept.items()
            if name not in ("tensors", "tried", "sigma") and (name, value) != _FIRST_WAY
        }

    def to_json(self) -> str:
        """The recipe as JSON text, which `from_json` reads back."""
        return json.dumps(self.as_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The recipe as plain values, in the form of its JSON."""
        values = {name: value for name, value in asdict(self).items() if (name, value) != _FIRST_WAY}
        return {"format": FORMAT, **values}

    def save(self, path: str | Path) -> None:
        """Write the recipe to a file, which `read` reads back.

        Args:
            path: The file.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe that `to_json` wrote; anything else is refused.

        Args:
            text: The JSON text.
        """
        with refuse_malformed(_MALFORMED, "recipe.malformed_record"):
            return Recipe.of_json(parse_json(text.encode(), "this is not a recipe: its JSON"))

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> Recipe:
        """The recipe that `as_json` gave; anything else is refused.

        Args:
            values: The plain values.
        """
        with refuse_malformed(_MALFORMED, "recipe.malformed_record"):
            entry = dict(values)
            if entry.pop("format", None) != FORMAT:
                raise MupscaleError(
                    f"this is not a recipe, expected format {FORMAT!r}", code="recipe.wrong_format"
                )
            unknown = sorted(set(entry) - {f.name for f in fields(Recipe)})
            if unknown:
                raise MupscaleError(
                    f"this is not a recipe: it says {', '.join(unknown)}, which recipes do not have",
                    code="recipe.unknown_keys",
                )
            entry["tensors"] = {
                name: _grown(typed.named(t)) for name, t in typed.named(entry["tensors"]).items()
            }
            made = Recipe(
                **{key: value if key == "tensors" else _READ[key](value) for key, value in entry.items()}
            )
            given = (made.sigma is not None) + (made.rise is not None)
            if given != {"copies": 1, "units": 0}.get(made.by):
                raise MupscaleError(
                    'this is not a recipe: expected one of sigma and rise, the other null; by "units" neither',
                    code="recipe.sigma_or_rise",
                )
            if made.rise is not None and not made.rise > 0:
                raise MupscaleError(
                    f"this is not a recipe: rise = {made.rise}, expected a number above 0",
                    code="recipe.rise_not_positive",
                )
            if not (isfinite(made.lr) and made.lr > 0):
                raise MupscaleError(
                    f"this is not a recipe: lr = {made.lr}, expected a finite number above 0",
                    code="recipe.lr_not_positive",
                )
            return made

    @staticmethod
    def read(path: str | Path) -> Recipe:
        """A recipe from its file.

        Args:
            path: The file: the recipe.json that `tune` wrote.
        """
        if not Path(path).is_file():
            raise MupscaleError(
                f"{path}: no such file; mupscale tune writes recipe.json into its folder",
                code="file.does_not_exist",
            )
        try:
            return Recipe.from_json(read_regular(Path(path), _LONGEST).decode("utf-8"))
        except MupscaleError as error:
            raise MupscaleError(f"{path}: {error.claim}", code=error.code) from None
        except UnicodeDecodeError as error:
            raise MupscaleError(f"{path}: {error}", code="json.not_json") from None

    def check(self, plan: Plan, reference: Plan | None, optimizers: Iterable[object] = ()) -> None:
        """Raise unless the recipe applies to a growth.

        Args:
            plan: The plan of the growth.
            reference: The plan from the reference to the base; None if the base is its own reference.
            optimizers: The optimizers of the run, or their full class names.
        """
        raise_faults("this recipe does not apply to this run", self._faults(plan, reference, optimizers))

    def _faults(self, plan: Plan, reference: Plan | None, optimizers: Iterable[object]) -> list[Fault]:
        faults = []
        for optimizer in optimizers:
            name = optimizer if isinstance(optimizer, str) else qualified_name(type(optimizer))
            if name != self.optimizer:
                what = f"the recipe was tuned with {self.optimizer}, whose constants do not apply to other optimizers"
                faults.append(
                    Fault("recipe.other_optimizer", name, what, "tune a proxy with the optimizer of this run")
                )
        here = TensorGrowth.all_of(plan, reference)
        missing, new = [n for n in self.tensors if n not in here], [n for n in here if n not in self.tensors]
        if missing or new:
            counts = f"{len(missing)} tensors of the proxy are missing here, {len(new)} are new"
            named = ", ".join([*missing[:2], *new[:2]])
            remedy = "tune a proxy of the same depth and parts, narrower only"
            return [
                *faults,
                Fault("recipe.other_tensors", named, f"{counts}: another depth, or another model", remedy),
            ]
        for name, grown in here.items():
            proxy = self.tensors[name]
            if (proxy.axes, proxy.fold) != (grown.axes, grown.fold):
                what = f"grows by {_growth(grown)}, in the proxy by {_growth(proxy)}"
                faults.append(Fault("recipe.other_growth", name, what, "tune a proxy with the same k"))
            if proxy.reference != grown.reference:
                what = f"shape {grown.reference} at this run's reference, {proxy.reference} at the recipe's"
                remedy = (
                    f"Run(…, since=plan_between(build, {self.reference}, …)) if the base was trained with the constants "
                    "of that width; otherwise tune with reference= this base's width"
                )
                faults.append(Fault("recipe.other_reference", name, what, remedy))
        return faults

    def since(self, plan: Plan) -> Plan | None:
        """The plan from this recipe's reference to the base of a plan, from shapes; None if they do not determine it.

        Shapes are not enough if a tensor absorbs a constant, is made of several tensors, is padded, is laid out in
        blocks, or is a buffer that grows, or if constants of the model's code grow. Then the user gives the reference.

        Args:
            plan: The plan of the growth.

        >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 8x2"),))})
        >>> recipe = Recipe("torch.optim.SGD", {"lr": 0.1}, 0.1, k=2, tensors={"w": TensorGrowth((4,), ("out x2",))})
        >>> made = recipe.since(plan)
        >>> made and str(made["w"].axes[0])
        'out: 4x2'
        """
        tensors: dict[str, TensorPlan] = {}
        for name, entry in plan.tensors.items():
            proxy = self.tensors.get(name)
            known = not entry.grows if entry.kind == "buffer" else proxy is not None
            shape = entry.base_shape if proxy is None else proxy.reference
            single = entry.sources == (name,) and entry.fold.is_one and entry.spread == 1 and not entry.padded
            plain = all(len(axis.segments) == len(axis.segments[0]) == 1 for axis in entry.axes if axis.grows)
            if not (known and single and plain and len(shape) == len(entry.axes)):
                return None
            pairs = list(zip(entry.axes, shape, strict=True))
            if any(not axis.grows and axis.base != size for axis, size in pairs):
                return None
            axes = tuple(Axis.between(size, axis.base, axis.role) for axis, size in pairs)
            tensors[name] = replace(entry, axes=axes)
        return replace(plan, tensors=tensors)

    def other_constants(self, groups: Iterable[Mapping[str, Any]]) -> list[str]:
        """Constants, other than the learning rate, whose values differ from the recipe's.

        A group without weight decay next to groups with it is usual (biases, gains) and does not count as a difference.

        Args:
            groups: The groups of an optimizer, written at the reference.

        >>> recipe = Recipe("torch.optim.AdamW", {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}, 0.1, k=2, tensors={})
        >>> recipe.other_constants([{"eps": 1e-8, "weight_decay": 0.1}, {"eps": 1e-6, "weight_decay": 0.0}])
        ['eps is 1e-06 here, 1e-08 in the recipe']
        """
        known = list(groups)
        lines = []
        for key, tuned in self.constants.items():
            here = [group[key] for group in known if key in group]
            if key == "weight_decay":
                here = [value for value in here if value] or here
            others = list(dict.fromkeys(_text(value) for value in here if not same_setting(value, tuned)))
            if others and key != "lr":
                lines.append(f"{key} is {' and '.join(others)} here, {_text(tuned)} in the recipe")
        return lines

    def differences(
        self, *, steps: int | None = None, batch: int | None = None, schedule: str | None = None
    ) -> list[str]:
        """Differences from the proxy that are allowed but may cost accuracy: few units, other steps, batch or schedule.

        Args:
            steps: Training steps after growth; None if they are not known, as for the others.
            batch: The batch size.
            schedule: The class of the scheduler.

        >>> Recipe("torch.optim.SGD", {"lr": 0.1}, 0.1, k=2, tensors={}, units=128, batch=64).differences(batch=512)
        ['the recipe was tuned with batch 64, this run has 512: the best learning rate may differ']
        """
        lines = []
        if 0 < self.units < FEW_UNITS:
            lines.append(
                f"the recipe comes from a proxy of {self.units} units; below about {FEW_UNITS} the best point still moves with "
                "width"
            )
        for what, proxy, ours in (
            ("steps", self.wide_steps or None, steps),
            ("batch", self.batch, batch),
            ("schedule", self.schedule, schedule),
        ):
            if proxy is not None and ours is not None and proxy != ours:
                lines.append(
                    f"the recipe was tuned with {what} {proxy}, this run has {ours}: the best learning rate may differ"
                )
        return lines


def wrong_with_recipe(recipe: Recipe, loss: object, **given: object) -> list[Fault]:
    """Faults for arguments of `upscale` that the recipe sets, and for a loss that it needs."""
    what = "a recipe sets noise and learning rate"
    faults = [
        Fault("recipe.with_other_settings", name, what, f"leave out {name}=, or the recipe")
        for name, value in given.items()
        if value is not None
    ]
    if isinstance(recipe.noise, AutoNoise) and loss is None:
        what = "it gives the noise as a rise of the loss, whose size is measured on this base"
        remedy = "add loss=lambda model: …, the loss of one batch"
        faults.append(Fault("recipe.needs_loss", "recipe", what, remedy))
    return faults


def at_recipe(recipe: Recipe, run: Run, plan: Plan, rules: Mapping[str, OptimizerRule] | None = None) -> Run:
    """The run written at the recipe's reference; raises if the recipe does not apply, warns of allowed differences.

    A run with another reference can be rewritten if its parameter groups were made at the recipe's reference: then
    their factors lead from that reference to each tensor. Otherwise its learning rates have other proportions than
    the tuned ones, which no single learning rate can correct, and the recipe is refused.
    """
    since = recipe.since(plan)
    if since is not None and run.optimizers:
        same = TensorGrowth.all_of(plan, since) == TensorGrowth.all_of(plan, run.since)
        if not same and _in_proportion(list(settings_at(since, run, rules))):
            grows = any(entry.grows for entry in since.tensors.values())
            run = replace(run, since=since if grows else None)
    recipe.check(plan, run.since, run.optimizers)
    _check_rates(run, rules)
    schedules = {type(scheduler).__name__ for scheduler in run.schedulers}
    # A run without a scheduler may get one after it has grown, so its schedule is not known (None), not constant.
    lines = recipe.differences(schedule="+".join(sorted(schedules)) or None)
    others = recipe.other_constants(settings_at(since_of(run, run.model), run, rules))
    if others:
        lines.append(f"other constants than the recipe was tuned with: {'; '.join(others)}")
    for line in lines:
        warnings.warn(line, stacklevel=3)
    return run


def _check_rates(run: Run, rules: Mapping[str, OptimizerRule] | None) -> None:
    """Raise unless learning rates have the proportions that μP gives them at the run's reference."""
    if _in_proportion(settings_at(since_of(run, run.model), run, rules)):
        return
    what = "the learning rates of its tensors are not in the proportions of the reference that the run names"
    remedy = (
        "train the base with mu.param_groups(model, since, …); for a base that was trained without "
        "μP, tune the proxy with reference= the base's width, and leave since= out of the run"
    )
    raise_faults(
        "this recipe does not apply to this run",
        [Fault("recipe.rates_out_of_proportion", "param_groups", what, remedy)],
    )


def _in_proportion(written: Iterable[Mapping[str, Any]]) -> bool:
    """Whether rates written at a reference have no factor left, up to rounding."""
    return all(isclose(settings["lr_factor"], 1.0, rel_tol=1e-9) for settings in written)


def settings_at(
    since: Plan, run: Run, rules: Mapping[str, OptimizerRule] | None = None
) -> Iterator[dict[str, Any]]:
    """The settings of every trained tensor, in the units of the reference from which `since` leads to the model."""
    names = parameter_names(run.model)
    for optimizer in run.optimizers:
        rule = rule_for(type(optimizer), rules=rules)
        for group in optimizer.param_groups:
            settings = {"lr_factor": 1.0, **{key: value for key, value in group.items() if key != "params"}}
            for parameter in group["params"]:
                name = resolve(names.get(id(parameter), ""), since)
                row = rule.row(settings, parameter.dim(), optimizer.state.get(parameter))
                yield settings if name is None else in_units(row, settings, since[name], back=True)


def _growth_of(axis: Axis) -> str:
    """How one dimension grows, whatever its size.

    >>> [_growth_of(Axis.parse(text)) for text in ("in: 4x2", "in: 4+4", "out: 8")]
    ['in x2', 'in 2 by units', '-']
    """
    if axis.padded:
        return f"{axis.role} {Fraction(axis.wide, axis.base)} by units"
    return f"{axis.role} x{axis.k}" if axis.grows else "-"


def _growth(grown: TensorGrowth) -> str:
    text = ", ".join(grown.axes)
    return text if grown.fold == "1" else f"{text} (fold {grown.fold})"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _grown(entry: Mapping[str, Any]) -> TensorGrowth:
    if entry.keys() != {"reference", "axes", "fold"}:
        raise ValueError("a tensor has a reference, axes and a fold, and nothing else")
    fold = typed.short_numbers(entry["fold"], 12)
    return TensorGrowth(typed.wholes(entry["reference"]), typed.texts(entry["axes"]), fold)


def _sigma(value: Any) -> float | dict[str, Any]:
    if not isinstance(value, Mapping):
        return _size(value)
    return {
        name: tuple(map(_size, sizes)) if isinstance(sizes, list) else _size(sizes)
        for name, sizes in typed.named(value).items()
    }


def _size(value: Any) -> float:
    if typed.number(value) < 0:
        raise ValueError(f"noise of size {value}")
    return float(value)


def _constant(value: Any) -> Any:
    """A constant of an optimizer: a number, a flag, a text, none of them, or a few of them."""
    if isinstance(value, list):
        return [_constant(part) for part in value]
    if value is not None and type(value) not in (bool, str):
        typed.number(value)
    return value


def _maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


_READ: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("k", "units", "width", "reference", "steps", "wide_steps", "seed"), typed.whole),
    **dict.fromkeys(("optimizer", "plan", "by"), typed.text),
    **dict.fromkeys(("base_lr", "loss", "control"), _maybe(typed.number)),
    "constants": lambda value: {name: _constant(part) for name, part in typed.named(value).items()},
    "sigma": _maybe(_sigma),
    "rise": _maybe(typed.number),
    "paired": typed.flag,
    "batch": _maybe(typed.whole),
    "schedule": _maybe(typed.text),
    "tried": lambda value: tuple(map(typed.named, typed.many(value))),
    "stay": lambda value: {how: _maybe(typed.number)(loss) for how, loss in typed.named(value).items()},
    "cost": typed.named,
    "remarks": typed.texts,
}
"""How every entry of a recipe is read."""
