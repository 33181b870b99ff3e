"""Everything Megatron-Core needs replaced to train on a CPU; the only room that patches third-party code for it.

Megatron-Core 0.19.2 writes `device="cuda"` and `torch.cuda.current_device()` into its buffers, keeps its random
state in the CUDA generators, orders its work with streams and checks tensor types against "torch.cuda.*". None of
that changes what is computed. Each substitution below says what it stands in for. All of it is installed once, before
megatron.core is first imported, and never in a process that uses a GPU. It can go when Megatron-Core takes its
device from the process groups.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megatron_ext.platform.optional_packages import block

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


# Factories that Megatron-Core calls with device="cuda" or pin_memory=True, and their like.
_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "zeros",
    "zeros_like",
]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return create


def _substitute_tensor_functions() -> None:
    """Create on the CPU what is asked for on the GPU, and report CUDA type names.

    The type names are for clip_grads.py, optimizer.py and distrib_optimizer.py (0.19.2), which accept gradients and
    parameters only if `tensor.type()` is "torch.cuda.FloatTensor" and the like. Functions are replaced one by one: a
    TorchFunctionMode does the same at 9 microseconds for every torch call of the process, in one thread only.
    """
    # `with torch.device(...)` recognises factories by identity, in a table made at first use: let it be the originals
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    tensor_type, tensor_to = torch.Tensor.type, torch.Tensor.to

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return tensor_to(self, *args, **kwargs)

    torch.Tensor.type = type_name
    torch.Tensor.to = to
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


class _NoStream(contextlib.nullcontext):
    """Stands in for torch.cuda.Stream and torch.cuda.Event: CPU work is already in program order."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: "_NoStream | None" = None) -> "_NoStream":
        return event if event is not None else _NoStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_NoStream") -> float:
        return 0.0


class _CpuGenerators:
    """torch.cuda.default_generators: whatever the index, the one CPU generator."""

    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def _seeding() -> Callable[[int], None]:
    # not torch.manual_seed, which calls back into torch.cuda.manual_seed_all
    return lambda seed: torch.default_generator.manual_seed(int(seed)) and None


def _returning(value: Any) -> Callable[..., Any]:
    """A new function each time: torch._dynamo keeps a table by function and refuses one that stands for two."""
    return lambda *_, **__: value


def _call_now(function: Callable[[], None], **_: Any) -> None:
    function()


def _substitute_cuda_functions() -> None:
    """Replace attributes of torch.cuda; `from torch.cuda import X` in megatron.core then binds these."""
    no_operation = ["synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "set_stream"]
    no_operation += ["_lazy_init", "ipc_collect"]
    counters = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]
    replaced: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda device=None: _NoStream(),
        "default_stream": lambda device=None: _NoStream(),
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "device": lambda device=None: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "default_generators": _CpuGenerators(),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _seeding(),
        "manual_seed_all": _seeding(),
        "_lazy_call": _call_now,
        "memory_stats": lambda device=None: {},
        **{name: _returning(None) for name in no_operation},
        **{name: _returning(0) for name in counters},
    }
    for name, substitute in replaced.items():
        setattr(torch.cuda, name, substitute)
    torch.cuda.random.get_rng_state = _get_rng_state
    torch.cuda.random.set_rng_state = _set_rng_state
    torch.cuda.nvtx.range_push = _returning(None)
    torch.cuda.nvtx.range_pop = _returning(None)
    torch.cuda.nvtx.range = lambda *_, **__: contextlib.nullcontext()


def _accept_tensor_split_sizes() -> None:
    """all_to_all_single on gloo wants lists; under expert parallelism Megatron-Core passes CPU tensors."""
    original = dist.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), group=group, async_op=async_op
        )

    dist.all_to_all_single = all_to_all_single


def _import_megatron_without_compilation() -> None:
    """`megatron.core.jit` decorates small functions with torch.compile: minutes of C++ builds for nothing here."""
    original = torch.compile

    def uncompiled(model: Any = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = uncompiled
    try:
        from megatron.core import jit

        jit.disable_jit_fuser()
    finally:
        torch.compile = original


_installed = False


def install() -> None:
    """Install the substitutions for the rest of the process. A second call changes nothing.

    Raises:
        RuntimeError: megatron.core is already imported, so its modules hold torch's own functions.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron_ext.platform.setup('cpu') has to run before megatron.core is imported")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with GPUs was told to leave them alone
    block("transformer_engine", "apex", "amp_C", "fused_weight_gradient_mlp_cuda")
    _substitute_cuda_functions()
    _substitute_tensor_functions()
    _accept_tensor_split_sizes()
    _import_megatron_without_compilation()
    _installed = True
