"""A deviation is named by its cause: batches, random numbers, attributes, the loss itself, the scale of attention."""

import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refused

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


def mlp(width):
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 3))


def adamw(model):
    return mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def on(run, batch, extra=None):
    x, y = batch
    run.optimizer.zero_grad()
    loss = F.mse_loss(run.model(x), y)
    if extra is not None:
        loss = loss + extra(run.model)
    loss.backward()
    run.optimizer.step()
    return loss


def step(run, i):
    return on(run, (X, Y))


def loader(count=20):
    return [
        (torch.randn(8, 6, generator=g), torch.randn(8, 3, generator=g))
        for g in (torch.Generator().manual_seed(i) for i in range(count))
    ]


def cause_of(*args, **kwargs):
    failure = mu.verify(*args, steps=3, **kwargs).failure
    assert failure is not None
    return failure


def test_a_step_that_draws_its_own_batch_is_named_and_batches_is_the_way():
    drawn = iter(loader())
    failure = cause_of(adamw(mlp(8)), lambda: mlp(16), step=lambda run, i: on(run, next(drawn)))
    assert (failure.where, failure.step) == ("the batch", 0)
    assert "different batches" in failure.cause
    assert "batches=loader" in failure.cause
    certificate = mu.verify(adamw(mlp(8)), lambda: mlp(16), step=on, batches=iter(loader()), steps=3)
    assert certificate.holds
    assert len(set(certificate.base_losses)) == 3, "control: every step has its own batch"


def test_a_batch_that_a_step_changes_is_whole_for_the_other_run():
    def popping(run, batch):
        return on(run, (batch.pop("x").mul_(2), batch.pop("y")))

    batches = [{"x": x, "y": y} for x, y in loader(3)]
    assert mu.verify(adamw(mlp(8)), lambda: mlp(16), step=popping, batches=batches, steps=3).holds
    assert set(batches[0]) == {"x", "y"}


def test_batches_that_cannot_be_used_are_refused():
    with refused("proof.too_few_batches", where="steps=2"):
        mu.verify(adamw(mlp(8)), lambda: mlp(16), step=on, batches=loader(2), steps=3)
    with refused("proof.batches_without_step"):
        mu.verify(mlp(8), lambda: mlp(16), loss=lambda model: model(X).sum(), batches=loader())


def test_a_loss_that_draws_its_own_batch_is_named():
    drawn = iter(loader(4000))

    def loss(model):
        x, y = next(drawn)
        return F.mse_loss(model(x), y)

    assert "two calls on one model" in cause_of(mlp(8), lambda: mlp(16), loss=loss).cause
    with refused("search.loss_not_repeatable"):
        mu.infer_plan(mlp(8), lambda: mlp(16), loss=loss)


def test_random_numbers_of_a_growing_shape_are_named():
    class Noisy(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.out = nn.Linear(6, width), nn.Linear(width, 3)

        def forward(self, x):
            h = self.first(x)
            return self.out(h * (torch.rand_like(h) > 0.5))

    assert "shape grows with the width" in cause_of(adamw(Noisy(8)), lambda: Noisy(16), step=step).cause


def test_settings_and_hooks_that_differ_are_named():
    base = mlp(8)
    base[1].eps = 0.5
    assert "1.eps: 0.5 in the base" in cause_of(adamw(base), lambda: mlp(16), step=step).cause
    base = mlp(8)
    base[0].register_forward_hook(lambda module, args, output: output * 2)
    assert "0._forward_hooks: 1 hooks in the base" in cause_of(adamw(base), lambda: mlp(16), step=step).cause


def test_a_plain_tensor_is_carried_and_one_that_the_factory_gives_is_named():
    class Tabled(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.out, self.table = nn.Linear(6, width), nn.Linear(width, 3), torch.randn(6, 6)

        def forward(self, x):
            return self.out(torch.tanh(self.first(x @ self.table)))

    class Given(Tabled):
        def __init__(self, width, given):
            super().__init__(width)
            self.table = given

    assert mu.verify(adamw(Tabled(8)), lambda: Tabled(16), step=step, steps=3).holds
    failure = cause_of(adamw(Given(8, torch.eye(6))), lambda: Given(16, torch.ones(6, 6)), step=step)
    assert "table: other values" in failure.cause


def test_a_loss_that_depends_on_the_width_by_itself_is_named():
    def penalised(run, i):
        return on(run, (X, Y), lambda model: 1e-2 * sum(p.square().sum() for p in model.parameters()))

    failure = cause_of(adamw(mlp(8)), lambda: mlp(16), step=penalised)
    assert failure.where == "the loss itself"
    assert "depends on the width by itself" in failure.cause


class Heads(nn.Module):
    """Fused attention with a fixed number of heads and the scale of torch: 1/sqrt(head size)."""

    def __init__(self, width):
        super().__init__()
        self.n_head, self.embed, self.out = 2, nn.Linear(6, width), nn.Linear(width, 3)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        h = self.embed(x.view(4, 8, 6))
        q, k, v = self.qkv(h).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return self.out(h + self.proj(y.flatten(2))).flatten(0, 1)


def test_the_attention_scale_is_named_without_a_fold_that_was_not_tried():
    failure = cause_of(adamw(Heads(8)), lambda: Heads(16), step=step)
    assert "the attention scale" in failure.cause
    assert "fold" not in failure.cause


def test_a_wrong_plan_is_answered_with_the_plan_that_passes():
    right = mu.plans.plan_between(mlp, 8, 16)
    wrong = mu.plans.plan_between(mlp, 8, 16, declared=mu.Declared(folds={"3.weight": 2}))
    failure = cause_of(adamw(mlp(8)), lambda: mlp(16), plan=wrong, step=step)
    assert "infer_plan(base, wide, loss=loss) finds an exact plan" in failure.cause
    assert mu.verify(adamw(mlp(8)), lambda: mlp(16), plan=right, step=step, steps=3).holds
