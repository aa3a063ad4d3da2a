"""The compiled kernel gives the bits of the portable code, is used where it repays itself, and can be done without."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mupscale as mu
from harness.closeness import assert_bitwise, assert_close
from harness.profiles import examples
from harness.refusals import refusal
from harness.strategies import making
from mupscale.errors import Fault
from mupscale.tensors import compiled
from mupscale.tensors.compiled import Kernel, kernel_for, load_kernel
from mupscale.tensors.expand import expand, expand_
from mupscale.tensors.noise import TensorNoise
from mupscale.tensors.philox import Stream, normals, quantiles
from mupscale.tensors.spectral import spectral_norms, streamed_spectral_norm

numba = pytest.importorskip("numba")

KNOWN = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def kernel() -> Kernel:
    found = load_kernel()
    assert isinstance(found, Kernel), found
    return found


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def test_the_loop_gives_the_known_answer_of_random123():
    table, out = quantiles(), np.zeros((1, 4), np.float32)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.uint64)
    kernel().loop(out, zero, one, np.zeros(4, np.uint32), table.numpy())
    want = torch.stack([table[word & 0xFFFF] + table[word >> 16] for word in KNOWN])
    assert_bitwise(torch.from_numpy(out[0]), want)


@examples(150)
@given(st.data())
def test_runs_from_anywhere_have_the_bits_of_the_portable_code(data: Any):
    far = st.sampled_from([0, 1 << 32, 1 << 34, 1 << 40, (1 << 62) - 4096])
    near = st.integers(-9, 2000)
    count = data.draw(st.integers(0, 4))
    starts = torch.tensor([max(0, data.draw(far) + data.draw(near)) for _ in range(count)], dtype=torch.int64)
    length = data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 63, 1023, 1024, 1025, 2050]))
    stream = Stream(data.draw(st.integers(-5, 1 << 40)), "w")
    stds, before = seeded(count).abs(), seeded(count, length)
    z = normals(stream, starts, length)
    assert_bitwise(kernel().normals(stream, starts, length), z)
    assert_bitwise(kernel().add_(before.clone(), stream, starts, stds), before + z * stds[:, None])


AXES = {
    "matrix": ["out: 50x2", "in: 40x3"],
    "padded": ["out: 50x2+1", "in: 10x3 * 4"],
    "experts": ["out: 6", "out: 20x2", "in: 12x2 * 2"],
    "convolution": ["out: 9x2", "in: 8x2", "out: 3", "out: 3"],
    "vector": ["out: 70x3"],
    "number": [],
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize("size", ["one size", "stacked", "paired"])
def test_noisy_tensors_have_the_same_bits(kind: str, dtype: torch.dtype, size: str, monkeypatch: Any):
    grown = [mu.rules.Axis.parse(text) for text in AXES[kind]]
    if (size == "stacked" and not grown) or (size == "paired" and len(grown) < 2):
        pytest.skip("there is no such noise")
    std = tuple(0.1 + 0.01 * i for i in range(grown[0].wide)) if size == "stacked" else 0.3
    paired = max(d for d, a in enumerate(grown) if a.k > 1) if size == "paired" else None
    added = TensorNoise(Stream(4, kind), std, paired)
    base, shape = seeded(*(a.base for a in grown)).to(dtype), [a.wide for a in grown]
    start, sizes = [n // 3 for n in shape], [n - n // 3 - (n > 4) for n in shape]
    found: list[list[Tensor]] = []
    for choice in ("portable", "compiled"):
        monkeypatch.setenv(compiled.VARIABLE, choice)
        strided = torch.zeros([2 * n for n in shape], dtype=dtype)[tuple(slice(0, None, 2) for _ in shape)]
        part = torch.empty(sizes, dtype=dtype)
        noisy = making(grown, "1/3", noise=added)
        found.append(
            [
                expand(base, noisy),
                expand_(strided, base, noisy),
                expand_(part, base, noisy, out_start=start),
                added.slice(grown, start, sizes, base),
            ]
        )
    for what, one, other in zip(("whole", "strided", "part", "slice"), *found, strict=True):
        assert_bitwise(one, other, what)
    assert_bitwise(found[0][0], found[0][1].contiguous(), "a view that is written into")
    assert not torch.equal(found[0][0], expand(base, making(grown, "1/3"))), "control: there is noise"


def test_bfloat16_is_rounded_in_the_loop_and_has_the_bits_of_three_steps(monkeypatch: Any):
    """Scale, noise and rounding at once give what they give one after the other, for every kind of scale."""
    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    grown = [mu.rules.Axis.parse(text) for text in AXES["matrix"]]
    sizes = torch.logspace(-39, 38, 50 * 40, dtype=torch.float64).view(50, 40)
    base = (seeded(50, 40).double().sign() * sizes).bfloat16()
    used, real = [], Kernel.round_

    def counted(self: Kernel, *given: Any, **options: Any) -> bool:
        used.append(real(self, *given, **options))
        return used[-1]

    monkeypatch.setattr(Kernel, "round_", counted)
    for scale in ("1", "1/2", "1/3", "3/2", "2^(-1/2)"):
        for std in (1e-38, 1e-3, tuple(0.01 * (i + 1) for i in range(100))):
            added = TensorNoise(Stream(1, scale), std)
            exact = expand_(torch.empty(100, 120), base.float(), making(grown, scale, noise=added))
            assert_bitwise(
                expand(base, making(grown, scale, noise=added)), exact.bfloat16(), f"{scale} {std}"
            )
    assert used == [True] * 15
    rows = expand_(torch.empty(7, 120).bfloat16(), base, making(grown, "1/3", noise=added), out_start=[9, 0])
    assert_bitwise(rows, expand(base, making(grown, "1/3", noise=added))[9:16], "a slice")
    assert len(used) == 17
    whole = expand(base, making(grown, "1/3", noise=TensorNoise(Stream(1, "w"), 0.1, without_row=4)))
    assert_bitwise(whole[4], (base[2].float() / 3).bfloat16().repeat_interleave(3), "a row without noise")
    assert len(used) == 17, "control: other noise takes three steps"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.3e38])
def test_numbers_that_are_not_finite_have_the_bits_of_the_portable_code(value: float, monkeypatch: Any):
    """Torch rounds NaN to bits that depend on where it lies; so it is left to torch, in the compiled case too."""
    grown = [mu.rules.Axis.parse(text) for text in AXES["matrix"]]
    base = seeded(50, 40).bfloat16()
    base[::7, ::3] = value
    found = []
    for choice in ("portable", "compiled"):
        monkeypatch.setenv(compiled.VARIABLE, choice)
        found.append(expand(base, making(grown, "3/2", noise=TensorNoise(Stream(1, "w"), 0.1))))
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))


def test_a_rounding_loop_that_gives_other_bits_is_not_used(monkeypatch: Any):
    right = compiled._load_rounding()
    assert right is not None

    def wrong(out: Any, *given: Any) -> bool:
        done = right(out, *given)
        out[0, 5] ^= 1
        return done

    def blind(out: Any, *given: Any) -> bool:
        right(out, *given)
        return True

    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    grown, base = [mu.rules.Axis.parse(text) for text in AXES["matrix"]], seeded(50, 40).bfloat16()
    noisy = making(grown, "1/2", noise=TensorNoise(Stream(1, "w"), 0.1))
    want = expand(base, noisy)
    for loop, taken in ((wrong, False), (blind, False), (right, True)):
        monkeypatch.setattr(compiled, "_compile", lambda *_, loop=loop: loop)
        assert (compiled._load_rounding.__wrapped__() is not None) == taken, loop.__name__
    monkeypatch.setattr(compiled, "_load_rounding", lambda: None)
    assert_bitwise(expand(base, noisy), want, "three steps in place of one")


def test_a_corner_of_a_tensor_of_2_to_the_36_entries(monkeypatch: Any):
    grown = [mu.rules.Axis.fixed(1 << 20), mu.rules.Axis.fixed(1 << 16)]
    start, like = [(1 << 20) - 7, (1 << 16) - 301], torch.zeros(7, 301)
    for std in (0.3, tuple([0.1] * (1 << 20))):
        found = []
        for choice in ("portable", "compiled"):
            monkeypatch.setenv(compiled.VARIABLE, choice)
            added = TensorNoise(Stream(0, "large"), std)
            found += [added.add_(like.clone(), grown, start), added.slice(grown, start, like.shape, like)]
        for other in found[1:]:
            assert_bitwise(other, found[0])


def test_threads_that_share_a_tensor_give_the_bits_of_one():
    stream, count = Stream(0, "shared"), 1 << 18
    want = kernel().normals(stream, torch.tensor([0]), count)[0]
    found = torch.zeros(count)

    def fill(at: int) -> None:
        part = found[at : at + 10007].unsqueeze(0)
        kernel().add_(part, stream, torch.tensor([at]), torch.ones(1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(0, count, 10007)))
    assert_bitwise(found, want)


def test_the_kernel_is_taken_once_a_process_has_drawn_enough(monkeypatch: Any):
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    monkeypatch.setattr(compiled, "_work", compiled._Work())
    enough = compiled._REPAID
    assert kernel_for(enough // 2) is None
    assert kernel_for(enough // 2 - 1) is None
    assert kernel_for(1) is kernel()
    monkeypatch.setenv(compiled.VARIABLE, "portable")
    assert kernel_for(enough) is None
    monkeypatch.setattr(compiled, "_work", compiled._Work())
    monkeypatch.delenv(compiled.VARIABLE)
    compiled.expect(enough - 1)
    assert kernel_for(1) is None
    compiled.expect(enough)
    assert kernel_for(1) is kernel(), "it was asked for enough numbers"
    monkeypatch.setattr(compiled, "_work", compiled._Work())
    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    assert kernel_for(1) is kernel()


def test_a_kernel_that_cannot_be_had_is_an_error_only_where_it_is_asked_for(monkeypatch: Any):
    monkeypatch.setenv(compiled.VARIABLE, "fast")
    refusal(lambda: kernel_for(1), "kernel.unknown_choice", where=[compiled.VARIABLE, "'fast'"])
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiled, "load_kernel", load_kernel.__wrapped__)
    monkeypatch.setenv(compiled.VARIABLE, "compiled")
    refusal(lambda: kernel_for(1), "extra.missing", where=["numba", "mupscale[fast]"])
    monkeypatch.delenv(compiled.VARIABLE)
    assert kernel_for(compiled._REPAID) is None


def reason(monkeypatch: Any, **numba: Any) -> str:
    """The code of the fault for which there is no kernel, with a numba that is like this."""
    extending = SimpleNamespace(register_jitable=lambda function: function)
    given: dict[str, Any] = {"config": SimpleNamespace(DISABLE_JIT=0), "extending": extending, **numba}
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(**given))
    found = load_kernel.__wrapped__()
    return found.code if isinstance(found, Fault) else ""


def test_a_numba_that_fails_or_gives_other_bits_is_not_used(monkeypatch: Any):
    right = kernel().loop

    def wrong(out: Any, starts: Any, stds: Any, key: Any, table: Any) -> None:
        right(out, starts, stds, key, table)
        out[-1, -1] = np.nextafter(out[-1, -1], np.float32(9))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no linker")

    def uncached(*_: Any, cache: bool = False, **__: Any) -> Any:
        if cache:
            raise RuntimeError("no locator available")
        return lambda _: right

    def compiles_to(loop: Any) -> Any:
        return lambda *_, **__: lambda _: loop

    assert reason(monkeypatch, njit=compiles_to(wrong)) == "kernel.other_bits"
    assert reason(monkeypatch, njit=broken) == "kernel.failed_to_compile"
    disabled = SimpleNamespace(DISABLE_JIT=1)
    assert reason(monkeypatch, config=disabled) == "kernel.compiling_disabled"
    assert not reason(monkeypatch, njit=uncached), "a cache that cannot be written is done without"
    assert not reason(monkeypatch, njit=compiles_to(right)), "control: the right loop is taken"


def test_importing_the_package_loads_no_numba():
    code = "import sys, mupscale, mupscale.tensors.noise; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("shape", "stacked"), [((90, 70), False), ((40, 6, 3, 3), False), ((3, 50, 31), True)], ids=str
)
def test_a_spectral_norm_is_the_same_when_the_matrix_is_read_in_blocks(
    shape: Any, stacked: bool, monkeypatch: Any
):
    weight = seeded(*shape)
    flat = weight.flatten(0, 1) if stacked else weight
    exact = torch.linalg.matrix_norm(weight.flatten(2) if stacked else weight.flatten(1), 2)
    reads: list[int] = []

    def rows(start: int, stop: int) -> Tensor:
        reads.append(stop - start)
        return flat[start:stop].clone()

    whole = spectral_norms(weight, stacked)
    assert_close(streamed_spectral_norm(rows, shape, stacked), whole, 1e-6)
    assert len(reads) == (shape[0] if stacked else 1), "what fits in a block is read once"
    if stacked:
        alone = torch.stack([spectral_norms(matrix) for matrix in weight])
        assert_close(whole, alone, 1e-6, "a matrix does not depend on the others of its stack")
    monkeypatch.setattr("mupscale.tensors.spectral._BLOCK", 7 * flat[0].numel())
    reads.clear()
    assert_close(streamed_spectral_norm(rows, shape, stacked), whole, 1e-6)
    assert max(reads) == 7
    assert_close(whole, exact, 1e-3)
    assert float((spectral_norms(weight[:, 1:], stacked) / whole - 1).abs().max()) > 1e-3, (
        "control: a column less"
    )


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_spectral_norm_of_any_size(size: float):
    assert_close(spectral_norms(size * torch.diag(torch.tensor([2.0, 1.0]))), torch.tensor(2 * size), 1e-6)


@pytest.mark.parametrize("rank", [1, 5, 40])
def test_a_spectral_norm_of_any_rank(rank: int):
    weight = seeded(60, rank) @ seeded(rank, 50)
    assert_close(spectral_norms(weight), torch.linalg.matrix_norm(weight, 2), 1e-3)


def test_a_spectral_norm_of_equal_singular_values_and_of_blocks_of_unequal_size(monkeypatch: Any):
    assert float(spectral_norms(torch.zeros(6, 4))) == 0.0
    assert spectral_norms(torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])).isnan()
    turned = torch.linalg.qr(seeded(80, 80).double())[0]
    assert_close(spectral_norms(turned), torch.tensor(1.0, dtype=torch.float64), 1e-9)
    weight = seeded(64, 48).double()
    weight[40:] *= 1e200  # its square is too large for a float
    monkeypatch.setattr("mupscale.tensors.spectral._BLOCK", 8 * 48)
    assert_close(spectral_norms(weight), torch.linalg.matrix_norm(weight, 2), 1e-3)


def test_the_norm_of_an_empty_tensor_is_zero() -> None:
    for shape, stacked, norms in (((3, 0), False, ()), ((0, 3), False, ()), ((2, 3, 0), True, (2,))):
        found = spectral_norms(torch.zeros(shape), stacked)
        assert tuple(found.shape) == norms
        assert not found.any()
