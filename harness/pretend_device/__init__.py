"""The torch devices "pretend:0" and "pretend:1" (torch's PrivateUse1): a second device on a machine without a GPU.

`load()` compiles `pretend.cpp` where no earlier process has done so (about 17 CPU seconds, g++ alone) and registers the
devices; where it cannot, it says why. One process has them from then on and cannot lose them: `torch.accelerator` finds
them, and trainers pick them. Tests that need them run in processes of their own (`pytest -m device`).

- The memory is the device's own. The host cannot read its addresses: code that reads a `data_ptr` crashes.
- Operators are computed by the CPU's kernels from copies, so results usually have the CPU's bits.
- Operands on several devices raise as on CUDA; CPU tensors without dimensions and CPU indices are allowed, as there.
- A CPU generator is refused, and a seed draws other numbers than on the CPU.
- `float64(False)` refuses float64 with the error of MPS.
- `module.to` keeps the parameters themselves (ties, optimizers), which torch does for CUDA but not for PrivateUse1.
- Missing: streams and asynchrony, LSTM and GRU, attention kernels other than math, torch.compile, torch.distributed.

Fork before the first backward pass: autograd starts a thread for each device then, and a fork does not have it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils import cpp_extension

from harness.native import NotBuiltError, library

NAME = "pretend"
COUNT = 2  # devices: mixing two is a fault of its own, and so is work for every device instead of the model's
_SOURCE = Path(__file__).with_name("pretend.cpp")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")  # -w: the warnings would be those of torch's headers
_original_apply = torch.nn.Module._apply


def load() -> str | None:
    """Register the devices in this process; None once they are there, else the reason why they cannot be."""
    if hasattr(torch, NAME):
        return None
    try:
        torch.ops.load_library(str(built()))
    except NotBuiltError as reason:
        return str(reason)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.nn.Module._apply = _keeping_parameters  # type: ignore[method-assign]
    _ops().start()
    return None


def float64(has: bool) -> None:
    """Whether the device has float64; without it, it refuses it with the error of MPS."""
    _ops().float64(has)


def set_device(index: int) -> None:
    """Make this device the current one, as `torch.cuda.set_device`."""
    _ops().set_device(index)


def rng_states() -> list[torch.Tensor]:
    """The state of every device's random numbers."""
    return [_ops().generator(index).get_state() for index in range(COUNT)]


def built() -> Path:
    """The compiled library for this torch and this source; made where it is missing."""
    flags = (*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    where = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    where += [f"-L{folder}" for folder in cpp_extension.library_paths()]
    linked = ("-lc10", "-ltorch_cpu", "-ltorch")
    return library(_SOURCE, (torch.__version__, *flags), (*flags, *where), linked)


class _Operators(Protocol):
    """What `pretend.cpp` registers for this module."""

    def start(self) -> None: ...
    def device(self) -> int: ...
    def set_device(self, to: int) -> None: ...
    def generator(self, of: int) -> torch.Generator: ...
    def float64(self, has: bool) -> None: ...


def _ops() -> _Operators:
    operators: _Operators = torch.ops.pretend
    return operators


def _index(device: Any = None) -> int:
    """The number of a device given as torch takes it: a number, a string, a `torch.device`, or None for the current one."""
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return _ops().device() if found is None else found


class _Current:
    """`with torch.pretend.device(1):`, as `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.to, self.before = _index(device), 0

    def __enter__(self) -> None:
        self.before = _ops().device()
        _ops().set_device(self.to)

    def __exit__(self, *error: object) -> None:
        _ops().set_device(self.before)


def _module() -> types.ModuleType:
    """`torch.pretend`, with the functions that torch expects of a device's module."""
    ops = _ops()
    generators = tuple(map(ops.generator, range(COUNT)))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: COUNT,
        "current_device": ops.device,
        "set_device": lambda to: ops.set_device(_index(to)),
        "device": _Current,
        "get_device_name": lambda device=None: NAME,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "default_generators": generators,
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[_index(device)].set_state(state),
        "manual_seed": lambda seed: generators[ops.device()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(functions)
    return module


def _keeping_parameters(
    self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """`module.to` between CPU and device keeps the parameters themselves, and so ties and optimizers, as on CUDA."""
    held = any(t.device.type == NAME for t in self.parameters())
    there = held or fn(torch.empty(0, device="cpu")).device.type == NAME
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or there)
    try:
        return _original_apply(self, fn, recurse)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
