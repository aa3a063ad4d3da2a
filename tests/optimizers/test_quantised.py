"""Quantised state is carried: exactly where a wide block reads one scale, and rounded once more elsewhere, with a warning."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mupscale as mu
from harness.known_optimizers import WRITTEN_RULES
from harness.low_bit import BnbAdamW, BnbAdEMAMix, BnbLion, BnbRMSprop, dequantise, dynamic_map, quantise
from harness.refusals import refusal
from mupscale.files.pickles.torch_file import read_tree
from mupscale.files.places import Place
from mupscale.optimizers.carry import carry_state
from mupscale.optimizers.named import Moment, NamedGroup
from mupscale.optimizers.quantised import Coded, block_axis, folded
from mupscale.plans.direction import Direction
from mupscale.plans.plan import Plan
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.rules import Axis
from mupscale.rules.optimizers import rule_for
from mupscale.sharded.fill import state_fillings
from mupscale.tensors.making import Making

KINDS: dict[str, tuple[type[Optimizer], float]] = {
    "AdamW": (BnbAdamW, 3e-3),
    "AdEMAMix": (BnbAdEMAMix, 3e-3),
    "Lion": (BnbLion, 1e-3),
    "RMSprop": (BnbRMSprop, 1e-3),
}
ONE_SCALE, SEVERAL = (64, 128), (80, 160)
"""Widths: in the first, a wide block of 256 entries is two rows that are copies of one, so that it reads one scale."""


def make(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


def trained(kind: str, width: int, bits: int = 8) -> tuple[mu.Run, Callable[[mu.Run], float]]:
    torch.manual_seed(0)
    model, x = make(width), torch.randn(32, 3)
    rule, lr = KINDS[kind]
    run = mu.Run(model, rule(model.parameters(), lr=lr, optim_bits=bits))  # type: ignore[call-arg]

    def step(of: mu.Run) -> float:
        of.model.zero_grad()
        loss = (of.model(x) - torch.sin(2 * x[:, :2])).square().mean()
        loss.backward()
        of.optimizer.step()
        return float(loss.detach())

    for _ in range(10):
        step(run)
    return run, step


def widened(run: mu.Run, width: int) -> tuple[mu.Run, str]:
    with pytest.warns(UserWarning, match="quantised") as told:
        wide = mu.grow(run, lambda: make(width), rules=WRITTEN_RULES)
    return wide, str(told[0].message)


def state_of(run: mu.Run, name: str = "2.weight") -> dict[str, Any]:
    return dict(run.optimizer.state[run.model.get_parameter(name)])


def values(run: mu.Run, key: str = "state1") -> Tensor:
    state = state_of(run)
    return dequantise(state[key], state[f"absmax{key[-1]}"], state[f"qmap{key[-1]}"])


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_exact_where_every_wide_block_reads_one_scale(kind):
    run, _ = trained(kind, ONE_SCALE[0])
    wide, told = widened(run, ONE_SCALE[1])
    assert "0 of the" in told
    assert all(apart < 1e-6 for apart in wide.provenance["rounded"].values())
    for key in ("state1", "state2"):
        if key in state_of(run):
            power = 2 if key == "state2" or kind == "RMSprop" else 1
            copied = values(run, key).repeat_interleave(2, -1).repeat_interleave(2, -2)
            assert torch.equal(values(wide, key), copied / 2**power), "gradients of a matrix are halved"


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_rounded_by_less_than_half_a_gap_of_its_table_elsewhere_and_told(kind):
    run, _ = trained(kind, SEVERAL[0])
    wide, told = widened(run, SEVERAL[1])
    largest = max(wide.provenance["rounded"].values())
    assert f"{largest:.1e}" in told
    assert 1e-6 < largest <= float(dynamic_map(True).diff().max()) / 2 + 1e-6


@pytest.mark.parametrize("widths", [ONE_SCALE, SEVERAL], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_follow_the_base_and_those_of_fresh_state_do_not(kind, widths):
    run, step = trained(kind, widths[0])
    wide, _ = widened(run, widths[1])
    model = mu.grow(run.model, lambda: make(widths[1])).model
    rule, lr = KINDS[kind]
    assert wide.plan is not None
    fresh = mu.Run(
        model,
        mu.trainers.optimizer_in_units(model, wide.plan, rule, lr=lr, optim_bits=8, rules=WRITTEN_RULES),
    )
    losses = [(step(run), step(wide), step(fresh)) for _ in range(10)]
    carried, anew = (max(abs(of[i] / of[0] - 1) for of in losses) for i in (1, 2))
    assert carried < 0.02
    assert anew > 3 * carried, "control: state that is not carried"


def test_codes_that_are_copied_with_the_scales_of_their_position_are_wrong():
    """Control: what a growth that does not know blocks would do."""
    run, _ = trained("AdamW", SEVERAL[0])
    wide, _ = widened(run, SEVERAL[1])
    state = state_of(run)
    codes = state["state1"].repeat_interleave(2, -1).repeat_interleave(2, -2)
    scales = state["absmax1"].repeat_interleave(4) / 2
    wrong = dequantise(codes, scales, state["qmap1"])
    right = values(run).repeat_interleave(2, -1).repeat_interleave(2, -2) / 2
    assert (wrong - right).abs().max() > 10 * (values(wide) - right).abs().max()


def test_a_tensor_keeps_the_bits_it_had():
    """bitsandbytes steps a tensor in the bits of its state; a small one that grows large stays exact."""
    run, step = trained("AdamW", 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide = mu.grow(run, lambda: make(80), rules=WRITTEN_RULES)
    assert state_of(wide)["state1"].shape == (80, 80)
    assert state_of(wide)["state1"].dtype == torch.float32
    assert "absmax1" not in state_of(wide)
    step(wide)


def test_narrowing_undoes_widening():
    run, _ = trained("AdamW", ONE_SCALE[0])
    wide, _ = widened(run, ONE_SCALE[1])
    with pytest.warns(UserWarning, match="0 of the 2"):
        back = mu.narrow(wide, lambda: make(ONE_SCALE[0]), rules=WRITTEN_RULES)
    assert all(
        torch.equal(torch.as_tensor(state_of(back)[key]), torch.as_tensor(state_of(run)[key]))
        for key in state_of(run)
    )


def test_a_state_dict_of_bitsandbytes_is_read_although_it_hides_its_tensors():
    run, _ = trained("AdamW", ONE_SCALE[0])
    wide, _ = widened(run, ONE_SCALE[1])
    state = run.optimizer.state_dict()
    hidden = {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"}
    for i, of in state["state"].items():
        state["state"][i] = {
            **{k: v for k, v in of.items() if k not in hidden},
            "__bnb_optimizer_quant_state__": {k: v for k, v in of.items() if k in hidden},
        }
    names = [name for name, _ in run.model.named_parameters()]
    assert wide.plan is not None
    with pytest.warns(UserWarning, match="quantised"):
        there = mu.trainers.grow_optimizer_state_dict(
            state, wide.plan, BnbAdamW, names=names, rules=WRITTEN_RULES
        )
    found = {
        name: of
        for g in there["param_groups"]
        for name, of in zip(g["param_names"], g["params"], strict=True)
    }
    carried = there["state"][found["2.weight"]]
    assert all(
        torch.equal(torch.as_tensor(carried[k]), torch.as_tensor(v)) for k, v in state_of(wide).items()
    )


def test_an_upscaled_run_records_what_was_rounded():
    run, _ = trained("AdamW", SEVERAL[0])
    with pytest.warns(UserWarning, match="quantised"):
        wide = mu.upscale(run, lambda: make(SEVERAL[1]), noise=mu.MupNoise(0.01), rules=WRITTEN_RULES)
    assert max(wide.provenance["rounded"].values()) > 1e-6


def test_settings_that_bitsandbytes_keeps_for_single_parameters_are_refused():
    run, _ = trained("Lion", 8)
    manager = SimpleNamespace(index2config={(0, 1): {"optim_bits": 32}}, pid2config={})
    run.optimizer.mng = manager  # type: ignore[attr-defined]
    mu.grow(run, lambda: make(16), rules=WRITTEN_RULES)  # control: bits are kept in the state
    manager.pid2config[0] = {"lr": 1.0}
    refusal(
        lambda: mu.grow(run, lambda: make(16), rules=WRITTEN_RULES),
        "optimizer.overridden_settings",
        where="lr",
    )


def in_a_file(shape: tuple[int, int], axes: tuple[str, str]) -> tuple[dict[str, Any], list[Any]]:
    blocks = -(-shape[0] * shape[1] // 256)
    state = {
        "state1": Place("optimizer.pt", 0, "U8", shape),
        "absmax1": Place("optimizer.pt", 0, "F32", (blocks,)),
        "qmap1": Place("optimizer.pt", 0, "F32", (256,)),
    }
    group = NamedGroup(("weight",), {"lr": 0.1}, rule_for("bitsandbytes.optim.Lion"))
    entry = TensorPlan(("weight",), tuple(map(Axis.parse, axes)))
    return carry_state(group, state, "weight", Direction(Plan({"weight": entry})), True)


def test_the_parts_of_a_tensor_in_a_file_move_by_whole_blocks():
    carried, faults = in_a_file((3, 512), ("out: 3x2", "in: 512x2"))
    assert not faults
    made = {key: value.making for key, value in carried.items() if isinstance(value, Moment)}
    assert {key: of.wide_shape for key, of in made.items()} == {
        "state1": (6, 1024),
        "absmax1": (24,),
        "qmap1": (256,),
    }
    assert str(made["absmax1"].axes[0]) == "3x2 * 2x2"
    assert made["state1"].scale.is_one


@pytest.mark.parametrize(
    ("shape", "axes"), [((4, 100), ("out: 4x2", "in: 100x2")), ((4, 256), ("out: 4x2+1", "in: 256"))]
)
def test_a_tensor_in_a_file_whose_blocks_do_not_stay_whole_is_refused(shape, axes):
    """A code of zero in the padding would be the most negative number of the table."""
    _, [fault] = in_a_file(shape, axes)
    assert (fault.code, fault.where) == ("state.blocks_not_whole", "weight")


def test_the_axis_of_blocks_agrees_with_the_axes_of_entries():
    axes = Axis.parse("out: 2x3"), Axis.parse("in: 4x2 * 128")
    blocks = block_axis(axes, 256)
    assert blocks is not None
    for wide in range(6 * 1024):
        row, column = divmod(wide, 1024)
        flat = int(axes[0].source(row) or 0) * 512 + int(axes[1].source(column) or 0)
        assert blocks.source(wide // 256) == flat // 256
    assert block_axis((Axis.parse("in: 4x2 * 192"),), 256) is None, "control: a block that reads two"


def test_values_are_rounded_to_the_nearest_number_of_the_table():
    torch.manual_seed(0)
    x, table = torch.randn(1000), dynamic_map(True)
    codes, scales = quantise(x, table)
    coded = folded({"state1": codes, "absmax1": scales, "qmap1": table})["state1"]
    assert isinstance(coded, Coded)
    found, apart = coded.write(x, torch.rand(1000))  # scales that differ within every block
    assert torch.equal(found["absmax1"], scales)
    back = dequantise(found["state1"], found["absmax1"], table)
    assert torch.allclose(back, dequantise(codes, scales, table), atol=1e-6)
    assert apart == pytest.approx(float((back - x).abs().max() / x.abs().max()))


def test_quantised_state_is_not_loaded_into_shards():
    run, _ = trained("AdamW", ONE_SCALE[0])
    making = Making((Axis.parse("out: 64x2"), Axis.parse("in: 64x2")))
    carried = {"step": 3, "state1": Moment(folded(state_of(run))["state1"], making)}
    weight = run.model.get_parameter("2.weight")
    source: Any = None
    state, fillings, [fault] = state_fillings("AdamW", weight, "2.weight", carried, {}, source)
    assert (fault.code, fault.where) == ("state.quantised_in_blocks", "2.weight")
    assert (state, fillings) == ({"step": 3}, []), "control: a number is loaded"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qmap1": 1.0},
        {"qmap1": torch.zeros(2, 128)},
        {"qmap1": torch.zeros(256), "absmax1": torch.ones(9)},
    ],
)
def test_state_that_is_no_codes_with_scales_and_a_table_is_refused(more):
    state = {"state1": torch.zeros(4, 4, dtype=torch.uint8), "absmax1": torch.ones(1), **more}
    group = NamedGroup(("weight",), {"lr": 0.1}, rule_for("bitsandbytes.optim.Lion"))
    entry = TensorPlan(("weight",), (Axis.parse("4x2"), Axis.parse("4x2")))
    _, faults = carry_state(group, state, "weight", Direction(Plan({"weight": entry})), True)
    assert any(fault.code == "state.unknown_key" and "absmax1" in fault.what for fault in faults)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("widths", [ONE_SCALE, SEVERAL], ids=str)
def test_the_state_of_torchao_is_carried(kind, widths, monkeypatch, tmp_path):
    torchao = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)
    model, x = make(widths[0]), torch.randn(32, 3)
    run = mu.Run(model, getattr(torchao, kind)(model.parameters(), lr=3e-3))
    for _ in range(6):
        model.zero_grad()
        model(x).square().mean().backward()
        run.optimizer.step()
    with pytest.warns(UserWarning, match="quantised"):
        wide = mu.grow(run, lambda: make(widths[1]))
    torch.save(run.optimizer.state_dict(), tmp_path / "optimizer.pt")
    refusal(
        lambda: read_tree(tmp_path / "optimizer.pt"), "archive.made_of_several_tensors", where="optimizer.pt"
    )
    base, grown = (state_of(of)["exp_avg"] for of in (run, wide))
    assert type(grown) is type(base)
    right = base.dequantize().repeat_interleave(2, -1).repeat_interleave(2, -2) / 2
    most = {"AdamW8bit": 0.008, "AdamW4bit": 0.1, "AdamWFp8": 0.07}[kind]
    apart = float((grown.dequantize() - right).abs().max() / right.abs().max())
    assert apart == 0 if widths == ONE_SCALE else 0 < apart < most
