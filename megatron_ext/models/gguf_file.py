"""Reading llama.cpp's GGUF files: metadata as a config.json, tensors by name, dequantised and un-permuted.
Which names a family has is in its `GGUFTable`; slicing and checking is the business of `sources`.
"""

import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, ReaderField
from gguf.quants import dequantize
from torch import Tensor

from megatron_ext.models.families.base import Family, GGUFTable, HFConfig

_TOKEN_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}


_MAX_NAME, _MAX_DIMS = 65535, 8  # GGUF's limit for names; above llama.cpp's 4 dimensions


class _MetadataReader(GGUFReader):
    """Steps over the elements of arrays: those are the vocabulary, and take seconds on every rank. Lengths are
    checked before anything of that length is read.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it ends too early, or a length in it is wrong")
        return super()._get(offset, dtype, count, override_order)

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        length = int(self._get(orig_offs, np.uint64)[0])
        if length > _MAX_NAME:
            raise ValueError(f"the name of a tensor has {length} bytes")
        dims = int(self._get(orig_offs + 8 + length, np.uint32)[0])
        if dims > _MAX_DIMS:
            raise ValueError(f"a tensor has {dims} dimensions")
        return super()._get_tensor_info_field(orig_offs)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        element, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count, end = GGUFValueType(element[0]), int(length[0]), orig_offs + 12
        if kind == GGUFValueType.STRING:
            order = ">" if self.endianess == GGUFEndian.BIG else "<"
            for _ in range(count):
                end += 8 + struct.unpack_from(order + "Q", self.data, end)[0]
        elif kind in self.gguf_scalar_to_np:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [element, length], [], [GGUFValueType.ARRAY, kind]


@lru_cache(maxsize=4)
def open_gguf(path: Path) -> GGUFReader:
    """The reader of a GGUF file (memory-mapped), kept; its array fields have a length but no elements.

    Raises:
        ValueError: the file is not a GGUF file, ends too early or is damaged.
    """
    try:
        with np.errstate(over="raise"):
            return _MetadataReader(path)
    except Exception as error:  # damaged bytes surface as whatever the value they stand for leads to
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is not a readable GGUF file ({reason}); download it again") from error


def _value(path: Path, key: str) -> Any:
    """The value of a metadata field, None if the file lacks it."""
    field = open_gguf(path).fields.get(key)
    try:
        return None if field is None else field.contents()
    except (UnicodeDecodeError, IndexError) as error:
        raise ValueError(f"{path}: the value of {key} cannot be read ({error}); download it again") from error


def gguf_architecture(path: Path) -> str:
    """llama.cpp's name of the architecture."""
    architecture = _value(path, "general.architecture")
    if architecture is None:
        raise ValueError(f"{path} does not name its architecture (general.architecture); download it again")
    return architecture


def gguf_config(path: Path, family: Family, table: GGUFTable) -> dict[str, Any]:
    """The file's metadata as the config.json of the same model.

    Raises:
        ValueError: the file uses what cannot be represented (RoPE scaling, experts).
    """
    reader = open_gguf(path)
    prefix = table.architecture + "."
    names = {tensor.name for tensor in reader.tensors}
    _refuse_unsupported(path, prefix, names)
    raw: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    raw.update(table.constants)
    for key, hf_key in table.fields.items():
        if prefix + key in reader.fields:
            raw[hf_key] = _value(path, prefix + key)
    for key, hf_key in _TOKEN_IDS.items():
        if f"tokenizer.ggml.{key}" in reader.fields:
            raw[hf_key] = _value(path, f"tokenizer.ggml.{key}")
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    if "vocab_size" not in raw and tokens is not None and tokens.types[0] == GGUFValueType.ARRAY:
        raw["vocab_size"] = int(tokens.parts[-1][0])  # the array's length
    raw["tie_word_embeddings"] = "output.weight" not in names
    return raw


def _refuse_unsupported(path: Path, prefix: str, names: set[str]) -> None:
    """Llama 3's RoPE scaling is a tensor in GGUF; ignoring it means wrong frequencies without an error."""
    if "rope_freqs.weight" in names or _value(path, prefix + "rope.scaling.type") not in (None, "none"):
        raise ValueError(f"{path} scales RoPE, which is not read from GGUF files; use the model's HF directory")
    if _value(path, prefix + "expert_count") not in (None, 0):
        raise ValueError(f"{path} is a mixture of experts, which is not supported; use a dense model")


class GGUFTensors:
    """The tensors of one file under their Hugging Face names."""

    def __init__(self, hf: HFConfig) -> None:
        assert hf.family.gguf is not None
        self._hf = hf
        self._permuted = hf.family.gguf.permuted
        self._tensors = {}
        for tensor in open_gguf(hf.path).tensors:
            pattern, layer = _split_layer(tensor.name, r"blk\.(\d+)\.", "blk.{layer}.")
            # A name that the table lacks stays as it is and is reported as unexpected.
            name = hf.family.gguf.tensors.get(pattern, tensor.name)
            self._tensors[name.replace("{layer}", layer)] = tensor

    def keys(self) -> list[str]:
        """Names of all stored tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as in transformers; GGUF stores it reversed."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def untrainable_dtype(self, name: str) -> str | None:
        """The stored type, if it is one that cannot be dequantised."""
        kind = self._tensors[name].tensor_type
        return None if _can_dequantize(kind) else kind.name

    def read(self, name: str) -> Tensor:
        """The dequantised tensor in transformers' layout, fp32."""
        stored = self._tensors[name]
        values = dequantize(stored.data, stored.tensor_type)  # of an fp32 tensor, a read-only view of the file
        weight = torch.from_numpy(np.require(values, requirements="W")).view(self.shape(name))
        pattern, _ = _split_layer(name, r"\.layers\.(\d+)\.", ".layers.{layer}.")
        if pattern not in self._permuted:
            return weight
        # llama.cpp stores each head's rows as (even, odd) pairs; transformers as two halves.
        heads = getattr(self._hf, self._permuted[pattern])
        return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@lru_cache
def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    block = np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8)
    try:
        dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def _split_layer(name: str, number: str, pattern: str) -> tuple[str, str]:
    found = re.search(number, name)
    return (name, "") if found is None else (name.replace(found[0], pattern), found[1])
