"""Generative and self-supervised models of the zoo: autoencoders, flows, diffusion, generators, targets that average."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import INPUTS, regression
from harness.zoo.batches import copied, generator, latents, maps
from harness.zoo.convolution import conv
from harness.zoo.entry import Batch, Exact, Impossible, vector_model

SMALL = 1e-2
"""The weight of a penalty next to a reconstruction."""
KERNEL = Exact(folds={"encode.2.*": "2^(-1/2)"})


class Variational(nn.Module):
    """A VAE; its latent is fixed or grows."""

    def __init__(self, w: int, latent: int) -> None:
        super().__init__()
        self.a, self.code = nn.Linear(INPUTS, w), nn.Linear(w, 2 * latent)
        self.b, self.out = nn.Linear(latent, w), nn.Linear(w, INPUTS)

    def forward(self, x: Tensor) -> Any:
        mean, log = self.code(F.gelu(self.a(x))).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log / 2).exp()
        divergence = 0.5 * (mean.square() + log.exp() - 1 - log).sum(-1).mean()
        return self.out(F.gelu(self.b(z))), divergence


class Quantised(nn.Module):
    """VQ-VAE: the nearest of twelve codes, whose size grows."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.codes, self.out = nn.Linear(INPUTS, w), nn.Embedding(12, w), nn.Linear(w, INPUTS)

    def forward(self, x: Tensor) -> Any:
        z = self.a(x)
        code = self.codes((z[:, None] - self.codes.weight).square().mean(-1).argmin(-1))
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.out(z + (code - z).detach()), commitment


class Sparse(nn.Module):
    """A sparse autoencoder, with the sum of its activations or with the four largest of them."""

    def __init__(self, w: int, largest: bool) -> None:
        super().__init__()
        self.largest, self.a, self.out = largest, nn.Linear(INPUTS, w), nn.Linear(w, INPUTS)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.a(x))
        if self.largest:
            top = h.topk(4, -1)
            h = torch.zeros_like(h).scatter(-1, top.indices, top.values)
        return self.out(h), h.sum(-1).mean() if not self.largest else h.new_zeros(())


def penalised(found: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    return F.mse_loss(found[0], wanted) + SMALL * found[1]


class Flow(nn.Module):
    """RealNVP: two couplings; the loss is the density."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(2, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 4))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Any:
        x, volume = x[:, :4], x.new_zeros(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            x = torch.cat([moved * scale.tanh().exp() + shift, kept], -1)
            volume = volume + scale.tanh().sum(-1)
        return (0.5 * x.square().sum(-1) - volume).mean()


class Denoiser(nn.Module):
    """A diffusion net; its sines of the time are as many as its channels, or a fixed number."""

    def __init__(self, w: int, sines: int) -> None:
        super().__init__()
        self.sines, self.a, self.out = sines, conv(3, w), conv(w, 3)
        self.time = nn.Sequential(nn.Linear(sines, 4 * w), nn.SiLU(), nn.Linear(4 * w, w))
        self.norm, self.b = nn.GroupNorm(2, w), conv(w, w)

    def forward(self, x: Tensor) -> Any:
        half = self.sines // 2
        angle = 10.0 * torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(half).to(x.dtype) / half)
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        h = self.a(x)
        return self.out(h + self.b(F.silu(self.norm(h)) + time[:, :, None, None]))


class Generator(nn.Module):
    """DCGAN: a linear layer whose outputs are viewed as maps."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.f, self.norm = w, nn.Linear(INPUTS, 4 * w), nn.BatchNorm2d(w)
        self.up, self.out = nn.ConvTranspose2d(w, w, 4, 2, 1), nn.ConvTranspose2d(w, 3, 4, 2, 1)

    def forward(self, z: Tensor) -> Any:
        return torch.tanh(self.out(F.relu(self.norm(self.up(self.f(z).view(-1, self.w, 2, 2))))))


class ModulatedConv(nn.Module):
    """StyleGAN2: a style scales the kernel's inputs, and the kernel is brought back to length one."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.style, self.out = conv(3, w, 1), nn.Linear(3, w), conv(w, 3, 1)
        self.kernel = nn.Parameter(torch.randn(w, w, 3, 3) * 0.3)

    def forward(self, x: Tensor) -> Any:
        h, style = self.a(x), 1 + self.style(x.mean((2, 3)))
        kernel = self.kernel * style[:, None, :, None, None]
        kernel = kernel * (kernel.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        mixed = F.conv2d(h.flatten(0, 1)[None], kernel.flatten(0, 1), padding=1, groups=len(x))
        return self.out(F.leaky_relu(mixed.view_as(h), 0.2))


class TwoPlayers(nn.Module):
    """A generator and a critic in one model, whose loss is the critic's gradient penalty and score."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(INPUTS, w), nn.Softplus(), nn.Linear(w, INPUTS))
        self.judge = nn.Sequential(nn.Linear(INPUTS, w), nn.Softplus(), nn.Linear(w, 1))

    def forward(self, x: Tensor) -> Any:
        made = self.make(x.flip(-1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(made).sum(), made, create_graph=True)
        return self.judge(made).mean() - self.judge(x).mean() + (slope.norm(dim=-1) - 1).square().mean()


class SlowTarget(nn.Module):
    """BYOL: a target inside the model that follows the online net in each call."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(INPUTS, w), nn.BatchNorm1d(w), nn.ReLU(), nn.Linear(w, w))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predict = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w))

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return (
            2 - 2 * F.cosine_similarity(self.predict(self.online(x)), self.target(x.flip(-1)), dim=-1).mean()
        )


class Decorrelated(nn.Module):
    """Barlow twins: the correlations of all channels of two views, against the identity."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(INPUTS, w), nn.ReLU(), nn.Linear(w, w), nn.BatchNorm1d(w, affine=False)
        )

    def forward(self, x: Tensor) -> Any:
        c = self.encode(x).T @ self.encode(x.flip(-1)) / len(x)
        return (c - torch.eye(len(c), dtype=c.dtype)).square().sum()


class DeepKernel(nn.Module):
    """A Gaussian process on learned features: its kernel sees their distances."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(INPUTS, w), nn.Tanh(), nn.Linear(w, w))
        self.noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        z = self.encode(x)
        kernel = torch.exp(-0.5 * (z[:, None] - z).square().sum(-1))
        return kernel + self.noise.exp() * torch.eye(len(x), dtype=x.dtype)


def likelihood(kernel: Tensor, wanted: Tensor) -> Tensor:
    root = torch.linalg.cholesky(kernel)
    solved = torch.cholesky_solve(wanted, root)
    fit: Tensor = 0.5 * (wanted * solved).sum() / len(kernel) + root.diagonal().log().mean()
    return fit


def own(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a model that computes it itself."""
    loss: Tensor = model(batch[0])
    return loss


def wide_vectors(number: int) -> Batch:
    return (torch.randn(16, INPUTS, generator=generator(number)),)


STYLED = Exact(roles={"kernel": {0: "out", 1: "in"}}, folds={"kernel": "2^(1/2)", "out.weight": "2^(-1/2)"})
IMAGE = {"batch": maps(6, 6), "criterion": F.mse_loss}
MODELS = (
    vector_model("vae_latent_fixed", lambda w: Variational(w, 4), batch=copied, criterion=penalised),
    vector_model(
        "vae_latent_grows",
        lambda w: Variational(w, w // 2),
        Impossible("every copy of a latent draws its own noise"),
        batch=copied,
        criterion=penalised,
    ),
    vector_model("vqvae_codes_grow", Quantised, batch=copied, criterion=penalised),
    vector_model(
        "sparse_autoencoder_sum",
        lambda w: Sparse(w, largest=False),
        Exact(folds={"a.*": "1/2", "out.weight": "2"}),
        sizes=(16, 32),
        batch=copied,
        criterion=penalised,
    ),
    vector_model(
        "sparse_autoencoder_top",
        lambda w: Sparse(w, largest=True),
        Impossible("four of twice as many are kept"),
        sizes=(16, 32),
        batch=copied,
        criterion=penalised,
    ),
    vector_model("real_nvp", Flow, batch=wide_vectors, objective=own),
    vector_model("diffusion_sines_fixed", lambda w: Denoiser(w, 6), **IMAGE),
    vector_model(
        "diffusion_sines_grow",
        lambda w: Denoiser(w, w),
        Impossible("sines that the base does not have are read by trained weights"),
        **IMAGE,
    ),
    vector_model("dcgan_linear_view", Generator, Exact(layouts={"f.*": {0: 4}}), batch=latents, sizes=(4, 8)),
    vector_model("stylegan2_modulated", ModulatedConv, STYLED, sizes=(4, 8), **IMAGE),
    vector_model("gradient_penalty", TwoPlayers, batch=wide_vectors, objective=own),
    vector_model("byol_target_inside", SlowTarget, Exact(loss=False), batch=wide_vectors, objective=own),
    vector_model(
        "barlow_twins",
        Decorrelated,
        Impossible("correlations of copies are pushed to zero and to one"),
        batch=wide_vectors,
        objective=own,
    ),
    vector_model("deep_kernel", DeepKernel, KERNEL, batch=regression, criterion=likelihood),
)
