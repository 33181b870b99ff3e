"""Counts what a piece of code communicates and reads: collectives with their bytes, and reads of a tensor on the host.

Observes from outside, through torch's modes; nothing is patched. For benchmarks and tests: everything becomes slower.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

HOST_READS = frozenset({"cpu", "item", "numpy", "tolist", "__bool__", "__float__", "__int__", "__index__"})
POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})


class _Reads(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function: Callable, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in HOST_READS:
            self.counts[name] += 1
        return function(*arguments, **(options or {}))


class _Collectives(TorchDispatchMode):
    def __init__(self, counts: Counter[str], sizes: Counter[str]) -> None:
        super().__init__()
        self.counts = counts
        self.sizes = sizes

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator.namespace == "c10d":
            name = operator._opname
            self.counts[name] += 1
            tensors = [value for value in tree_flatten((arguments, options))[0] if isinstance(value, torch.Tensor)]
            self.sizes[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return operator(*arguments, **(options or {}))


class Traffic:
    """A context manager. `collectives` and `reads` count calls by name, `sizes` the bytes of the tensors involved.

    Gathered tensors count with what is sent and what is received; a broadcast counts on every rank.
    """

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self._modes = (_Reads(self.reads), _Collectives(self.collectives, self.sizes))

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    def __enter__(self) -> "Traffic":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
