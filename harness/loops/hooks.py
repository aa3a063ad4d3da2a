"""Hooks of parameters, modules, optimizers and of torch itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import mupscale as mu
from harness.data import INPUTS, OUTPUTS, TOKENS, cross_entropy, text
from harness.loops.situation import *
from harness.runs import step as stepped


@situation(Exact(), "S2")
def gradient_scaled_by_a_hook() -> Pair:
    run = trained(optimizer=sgd)
    run.model.get_parameter("head.weight").register_hook(lambda gradient: 0.1 * gradient)  # type: ignore[no-untyped-call]
    return grown(run)


@situation(Exact(), "S2")
def gradient_scaled_after_it_is_accumulated() -> Pair:
    run = trained(optimizer=sgd)

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.1)

    run.model.get_parameter("head.weight").register_post_accumulate_grad_hook(scale)  # type: ignore[no-untyped-call]
    return grown(run)


def masked(run: mu.Run) -> RemovableHandle:
    """Only the first half of the units trains; the mask is as wide as the model."""
    bias = run.model.get_parameter("inp.bias")
    mask = (torch.arange(len(bias)) < len(bias) // 2).to(bias.dtype)
    return bias.register_hook(lambda gradient: gradient * mask)  # type: ignore[no-any-return, no-untyped-call]


@situation(Refused("model.hook_not_exact", "register_hook("), "S2")
def gradient_masked_by_the_shape_of_the_base() -> Pair:
    run = trained(optimizer=sgd)
    masked(run)
    return grown(run)


@gradient_masked_by_the_shape_of_the_base.remedy
def _() -> Pair:
    run = trained(optimizer=sgd)
    masked(run).remove()
    pair = grown(run)
    for half in (pair.base, pair.wide):
        masked(half)
    return pair


def stepped_in_backward(run: mu.Run) -> list[RemovableHandle]:
    """Every parameter is stepped as soon as it has its gradient; the hook holds the optimizers of its run."""
    own = {p: o for o in run.optimizers for group in o.param_groups for p in group["params"]}

    def act(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    return [p.register_post_accumulate_grad_hook(act) for p in own]


def backward_alone(run: mu.Run, number: int) -> Tensor:
    found = loss(run.model, number)
    found.backward()  # type: ignore[no-untyped-call]
    return found.detach()


def one_each(model: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]


@situation(Refused("model.hook_holds_base", "remove()"), "S2")
def optimizer_in_backward() -> Pair:
    run = trained(optimizer=one_each)
    stepped_in_backward(run)
    return grown(run, step=backward_alone)


@optimizer_in_backward.remedy
def _() -> Pair:
    run = trained(optimizer=one_each)
    for handle in stepped_in_backward(run):
        handle.remove()
    pair = grown(run, step=backward_alone)
    for half in (pair.base, pair.wide):
        for optimizer in half.optimizers:
            optimizer.zero_grad()
        stepped_in_backward(half)
    return pair


def with_module_hook(register: Callable[[nn.Module], Any], in_factory: bool = False) -> Pair:
    """A hook on one module of the base, put there after building; the factory knows of it or not."""

    def make(width: int) -> nn.Module:
        model = Net(width)
        if in_factory:
            register(model.mid)
        return model

    run = trained()
    register(run.model.get_submodule("mid"))
    return grown(run, make)


MODULE_HOOKS: dict[str, Callable[[Any], Any]] = {
    "output_scaled_by_a_forward_hook": lambda m: m.register_forward_hook(lambda module, args, out: 0.5 * out),
    "input_scaled_by_a_pre_hook": lambda m: m.register_forward_pre_hook(
        lambda module, args: (0.5 * args[0],)
    ),
    "gradient_scaled_by_a_backward_hook": lambda m: m.register_full_backward_hook(
        lambda module, into, out: (0.5 * into[0],)
    ),
}
for name, register in MODULE_HOOKS.items():
    hooked = situation(Refused("proof.attribute_not_carried"), name=name)
    hooked(partial(with_module_hook, register)).remedy(partial(with_module_hook, register, in_factory=True))


@situation(Exact())
def hook_that_only_looks() -> Pair:
    """Activations are kept for a plot; nothing changes."""
    seen: list[float] = []
    return with_module_hook(
        lambda m: m.register_forward_hook(lambda module, args, out: seen.append(float(out.detach().norm())))
    )


@situation(Exact())
def hook_of_state_dicts() -> Pair:
    """Names of old checkpoints are translated when they are loaded."""
    return with_module_hook(lambda m: m.register_load_state_dict_pre_hook(lambda *a: None))  # type: ignore[no-untyped-call]


@situation(Warned())
def gradients_clamped_by_a_step_hook() -> Pair:
    run = trained(optimizer=sgd)

    def clamp(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-1e-3, 1e-3)

    run.optimizer.register_step_pre_hook(clamp)
    return grown(run)


@situation(Warned())
def weights_kept_small_by_a_step_hook() -> Pair:
    run = trained(optimizer=sgd)

    def shrink(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)

    run.optimizer.register_step_post_hook(shrink)
    return grown(run)


@situation(Warned(), "S11")
def step_patched_on_the_optimizer() -> Pair:
    run = trained()
    optimizer = run.optimizer
    plain = optimizer.step

    def patched(*args: Any, **options: Any) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-1e-3, 1e-3)
        return plain(*args, **options)

    optimizer.step = patched  # type: ignore[method-assign]
    return grown(run)


class Words(nn.Module):
    """An embedding with a readout, for hooks on the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(TOKENS, width),
            nn.LayerNorm(width),
            nn.Linear(width, TOKENS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))  # type: ignore[no-any-return]


def words_loss(model: nn.Module, number: int = PROOF) -> Tensor:
    tokens, labels = text(number)
    return cross_entropy(model(tokens), labels)


def words_step(run: mu.Run, number: int) -> Tensor:
    found = words_loss(run.model, number)
    stepped(run, found)
    return found.detach()


def neftune(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """The noise of transformers' `neftune_noise_alpha`: as long as the width, in training only."""
    if not module.training:
        return out
    size = module.neftune_noise_alpha / (out.shape[1] * out.shape[2]) ** 0.5
    return out + torch.zeros_like(out).uniform_(-size, size)


def with_neftune(run: mu.Run) -> RemovableHandle:
    embed: Any = run.model.get_submodule("embed")
    embed.neftune_noise_alpha = 5.0
    return embed.register_forward_hook(neftune)  # type: ignore[no-any-return]


@situation(Refused("proof.attribute_not_carried"), "S16")
def neftune_on_the_embedding() -> Pair:
    """Noise of the width of the model is not the same noise at another width, in the factory neither."""
    run = trained(Words, step=words_step)
    with_neftune(run)
    return grown(run, Words, words_step, loss=words_loss)


@neftune_on_the_embedding.remedy
def _() -> Pair:
    """Growth without the noise is exact; it is put on again for the training that follows."""
    run = trained(Words, step=words_step)
    with_neftune(run).remove()
    return grown(run, Words, words_step, loss=words_loss)


def softsigns(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Softsign(), nn.Linear(width, OUTPUTS))


def patch_class() -> None:
    """The module is torch's and its code is not any more."""

    def rooted(self: nn.Module, x: Tensor) -> Any:
        return nn.functional.softsign(x) / x.shape[-1] ** 0.5

    nn.Softsign.forward = rooted  # type: ignore[assignment, method-assign]


def hook_every_module() -> None:
    def rooted(module: nn.Module, args: Any, out: Tensor) -> Any:
        return out / out.shape[-1] ** 0.5 if isinstance(module, nn.Softsign) else out

    nn.modules.module.register_module_forward_hook(rooted)


def changed_torch(change: Callable[[], None], **options: Any) -> Pair:
    """Modules of torch, which decide a plan without a loss unless something has changed what they do."""
    change()
    return grown(trained(softsigns), softsigns, **{"loss": None, **options})


for name, change in {
    "class_of_torch_is_patched": patch_class,
    "hook_of_every_module": hook_every_module,
}.items():
    changed = situation(Refused("proof.missing", "loss=lambda model"), "S15", name)
    changed(partial(changed_torch, change)).remedy(partial(changed_torch, change, loss=loss))


@situation(Exact())
def optimizer_with_hooks_of_its_state_dict() -> Pair:
    """Hooks that run only when the state is saved change nothing."""
    run = trained(optimizer=adamw)
    run.optimizer.register_state_dict_post_hook(lambda optimizer, state: None)
    return grown(run)
