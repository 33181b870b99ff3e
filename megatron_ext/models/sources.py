"""Where Hugging Face tensors come from: safetensors files, a GGUF file, or random numbers. A source reads
parts of tensors by their Hugging Face names; what they become in Megatron-Core is up to `mapping` and
`weights`.
"""

import hashlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ext.models.families.base import OUTPUT_LAYER, HFConfig
from megatron_ext.models.gguf_file import GGUFTensors
from megatron_ext.models.hf_config import read_json
from megatron_ext.models.rope import shown

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


class TensorSource(Protocol):
    """Named tensors of one model, readable in part."""

    def keys(self) -> list[str]:
        """Names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""

    def untrainable_dtype(self, name: str) -> str | None:
        """The stored dtype, read without the values, if it is one that cannot be trained."""

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """The sliced tensor in its stored dtype, on the CPU; dimensions beyond the slices are read whole."""


class SafetensorsSource:
    """model.safetensors, or several files with an index, of one directory. Reads only the bytes asked for."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._open: dict[str, safe_open] = {}
        self._file_of = self._read_index()

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> file name, checked against what the files hold."""
        index = self._directory / _INDEX
        if not index.is_file():
            if not (self._directory / _SINGLE).is_file():
                raise ValueError(
                    f"hf_path {self._directory} has neither {_SINGLE} nor {_INDEX}; download the model's "
                    "safetensors, or set random_init to start from random weights"
                )
            return dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        content = read_json(index, "a safetensors index")
        if not isinstance(content, dict) or "weight_map" not in content:
            raise ValueError(f"{index} is not a safetensors index (it has no weight_map); download it again")
        file_of = content["weight_map"]
        if not isinstance(file_of, dict):
            raise ValueError(f"{index}: weight_map {shown(file_of)} is not an object; download it again")
        for name, file in file_of.items():
            if not isinstance(file, str):
                raise ValueError(
                    f"{index}: weight_map places {name} in {shown(file)}, which is not a file name; download it again"
                )
        for file in sorted(set(file_of.values())):
            present = set(self._file(file).keys())
            for name in (name for name, where in file_of.items() if where == file):
                if name not in present:
                    raise ValueError(f"{self._directory / file} lacks {name}, which {_INDEX} places there")
        return file_of

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self._directory / name
            try:
                if not path.is_file():
                    raise ValueError(f"{path} is missing, but {_INDEX} names it; download the file")
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is truncated or not a safetensors file ({error}); download it again"
                ) from error
        return self._open[name]

    def keys(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self._file_of[name]).get_slice(name).get_shape())

    def untrainable_dtype(self, name: str) -> str | None:
        dtype = self._file(self._file_of[name]).get_slice(name).get_dtype()
        return None if dtype in _FLOATS else dtype

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        stored = self._file(self._file_of[name]).get_slice(name)
        return stored[slices] if slices else stored[:]


class GGUFSource:
    """The tensors of a GGUF file; one whole tensor is dequantised for each read."""

    def __init__(self, hf: HFConfig) -> None:
        self._tensors = GGUFTensors(hf)

    def keys(self) -> list[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(name)

    def untrainable_dtype(self, name: str) -> str | None:
        return self._tensors.untrainable_dtype(name)

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        return self._tensors.read(name)[slices]


class RandomSource:
    """Random initial weights, normal with std `initializer_range`; norms are 1 and biases 0.

    A tensor's values depend on seed, name and shape alone: every layout starts from the same model.
    """

    def __init__(self, hf: HFConfig, seed: int) -> None:
        self._std = hf.initializer_range
        self._seed = seed
        self._shapes = hf.tensor_shapes()

    def keys(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def untrainable_dtype(self, name: str) -> str | None:
        return None

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0)[slices]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, self._std, generator=generator)[slices]


def open_source(hf: HFConfig, random_init: bool, seed: int) -> TensorSource:
    """The weights of the configured model, checked for completeness by `check_source`."""
    if random_init:
        return RandomSource(hf, seed)
    if hf.kind == "config":
        raise ValueError(
            f"hf_path {hf.path} is a config without weights; give the model's directory, or set random_init"
        )
    source = GGUFSource(hf) if hf.kind == "gguf" else SafetensorsSource(hf.path)
    check_source(hf, source)
    return source


def check_source(hf: HFConfig, source: TensorSource) -> None:
    """Check that the source holds exactly the model's tensors, in the shapes that its config means and in
    dtypes that can be trained.

    Raises:
        ValueError: naming the missing, unexpected, misshapen or quantised tensors.
    """
    expected = hf.tensor_shapes()
    present = set(source.keys())
    problems = []
    if missing := [name for name in expected if name not in present]:
        problems.append(f"tensors are missing: {_some(missing)}")
    unexpected = [
        name
        for name in sorted(present - set(expected) - tied_copies(hf))
        if not name.endswith(hf.family.ignored_suffixes)
    ]
    if unexpected:
        problems.append(f"tensors are not part of {hf.family.architecture}: {_some(unexpected)}")
    misshapen = [
        f"{name} is {list(source.shape(name))} and not {list(shape)}"
        for name, shape in expected.items()
        if name in present and source.shape(name) != shape
    ]
    if misshapen:
        problems.append(f"shapes do not match the config: {_some(misshapen)}")
    untrainable = [
        f"{name} has dtype {dtype}"
        for name in (*expected, *sorted(tied_copies(hf)))
        if name in present and (dtype := source.untrainable_dtype(name)) is not None
    ]
    if untrainable:
        problems.append(f"tensors cannot be trained: {_some(untrainable)}; use the unquantised model")
    if problems:
        raise ValueError("\n".join(f"{hf.path}: {problem}" for problem in problems))


def tied_copies(hf: HFConfig) -> set[str]:
    """Tensors that some checkpoints of tied models hold a second time."""
    return {name for rule in hf.family.rules if hf.tied and rule.megatron == OUTPUT_LAYER for name in rule.hf}


def _some(items: list[str], limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
