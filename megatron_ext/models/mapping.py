"""The kinds of weight rules: how one Megatron-Core parameter is made of Hugging Face tensors and sharded
over tensor-parallel (TP) ranks, and back. Owns layouts only; which names a family has is in `families/`,
where tensors come from in `sources`. No process groups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

# Reads a part of one Hugging Face tensor; dimensions beyond the given slices are read whole.
ReadSlice = Callable[[tuple[slice, ...]], Tensor]

# Transformer Engine fuses a norm with the linear layer behind it and names it after that layer.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


class Dimensions(Protocol):
    """The sizes rules need; `HFConfig` has them, and any further size a rule's `shape` names."""

    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    q_size: int
    kv_size: int


def canonical_name(name: str) -> str:
    """A Megatron parameter name with Transformer Engine's fused norms under their unfused names."""
    for fused, plain in _FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def _part(total: int, tp_rank: int, tp_size: int) -> slice:
    """The rank's equal part of `total` rows or columns; divisibility is checked with the layout."""
    assert total % tp_size == 0, f"{total} is not divisible by TP {tp_size}"
    size = total // tp_size
    return slice(tp_rank * size, (tp_rank + 1) * size)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it holds.

    Attributes:
        megatron: parameter name in GPTModel, `{layer}` counting over the whole model from 0.
        hf: tensor names, `{layer}` as above.
    """

    megatron: str
    hf: tuple[str, ...]

    def shapes(self, sizes: Dimensions) -> tuple[tuple[int, ...], ...]:
        """The full shape of each Hugging Face tensor, in the order of `hf`."""
        raise NotImplementedError

    def shard(
        self, reads: Sequence[ReadSlice], sizes: Dimensions, local_rows: int, tp_rank: int, tp_size: int
    ) -> Tensor:
        """Read what this TP rank holds, and nothing else.

        Args:
            reads: one reader for each name in `hf`.
            local_rows: rows of the parameter on this rank (only the vocabulary's padding depends on it).
        """
        raise NotImplementedError

    def merge(self, shards: Sequence[Tensor], sizes: Dimensions) -> tuple[Tensor, ...]:
        """The full Hugging Face tensors, in the order of `hf`, from the shards of all TP ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class Replicated(Rule):
    """The whole tensor on every TP rank. `shape` names sizes, such as ("hidden_size",)."""

    shape: tuple[str, ...]

    def shapes(self, sizes: Dimensions) -> tuple[tuple[int, ...], ...]:
        return (tuple(getattr(sizes, size) for size in self.shape),)

    def shard(
        self, reads: Sequence[ReadSlice], sizes: Dimensions, local_rows: int, tp_rank: int, tp_size: int
    ) -> Tensor:
        return reads[0](())

    def merge(self, shards: Sequence[Tensor], sizes: Dimensions) -> tuple[Tensor, ...]:
        return (shards[0],)


@dataclass(frozen=True)
class Sharded(Rule):
    """Split evenly along `dim`; weights are [out, in]: 0 for column-parallel layers, 1 for row-parallel."""

    shape: tuple[str, ...]
    dim: int

    def shapes(self, sizes: Dimensions) -> tuple[tuple[int, ...], ...]:
        return (tuple(getattr(sizes, size) for size in self.shape),)

    def shard(
        self, reads: Sequence[ReadSlice], sizes: Dimensions, local_rows: int, tp_rank: int, tp_size: int
    ) -> Tensor:
        total = self.shapes(sizes)[0][self.dim]
        return reads[0]((slice(None),) * self.dim + (_part(total, tp_rank, tp_size),))

    def merge(self, shards: Sequence[Tensor], sizes: Dimensions) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards), dim=self.dim),)


@dataclass(frozen=True)
class VocabRows(Rule):
    """[vocab, hidden], padded and split by rows; padded rows are zero and never written out."""

    def shapes(self, sizes: Dimensions) -> tuple[tuple[int, ...], ...]:
        return ((sizes.vocab_size, sizes.hidden_size),)

    def shard(
        self, reads: Sequence[ReadSlice], sizes: Dimensions, local_rows: int, tp_rank: int, tp_size: int
    ) -> Tensor:
        start = min(tp_rank * local_rows, sizes.vocab_size)
        stop = min((tp_rank + 1) * local_rows, sizes.vocab_size)
        rows = reads[0]((slice(start, stop),))
        if stop - start == local_rows:
            return rows
        padded = rows.new_zeros(local_rows, sizes.hidden_size)
        padded[: stop - start] = rows
        return padded

    def merge(self, shards: Sequence[Tensor], sizes: Dimensions) -> tuple[Tensor, ...]:
        return (torch.cat(list(shards))[: sizes.vocab_size].contiguous(),)


@dataclass(frozen=True)
class GroupedQKV(Rule):
    """Query, key and value rows, interleaved by query group: [groups, heads/group + 2, head_dim, ...].

    `hf` is (query, key, value); `trailing` is ("hidden_size",) for the weight and () for a bias.
    """

    trailing: tuple[str, ...] = ("hidden_size",)

    def shapes(self, sizes: Dimensions) -> tuple[tuple[int, ...], ...]:
        rest = tuple(getattr(sizes, size) for size in self.trailing)
        return ((sizes.q_size, *rest), (sizes.kv_size, *rest), (sizes.kv_size, *rest))

    def shard(
        self, reads: Sequence[ReadSlice], sizes: Dimensions, local_rows: int, tp_rank: int, tp_size: int
    ) -> Tensor:
        local_groups = sizes.num_query_groups // tp_size
        parts = []
        for read, shape in zip(reads, self.shapes(sizes), strict=True):
            rows = read((_part(shape[0], tp_rank, tp_size),))
            parts.append(rows.view(local_groups, -1, sizes.head_dim, *shape[1:]))
        return torch.cat(parts, dim=1).flatten(0, 2)  # [local_groups * (heads/group + 2) * head_dim, ...]

    def merge(self, shards: Sequence[Tensor], sizes: Dimensions) -> tuple[Tensor, ...]:
        rows = torch.cat(list(shards))
        rest = rows.shape[1:]
        heads_per_group = sizes.num_attention_heads // sizes.num_query_groups
        grouped = rows.view(sizes.num_query_groups, heads_per_group + 2, sizes.head_dim, *rest)
        parts = grouped.split([heads_per_group, 1, 1], dim=1)
        return tuple(part.reshape(-1, *rest) for part in parts)


@dataclass(frozen=True)
class GatedMLP(Rule):
    """Gate and up projections, stacked as [2, ffn, hidden] and split along ffn: a rank has both for its rows.

    `hf` is (gate, up).
    """

    def shapes(self, sizes: Dimensions) -> tuple[tuple[int, ...], ...]:
        return ((sizes.ffn_hidden_size, sizes.hidden_size),) * 2

    def shard(
        self, reads: Sequence[ReadSlice], sizes: Dimensions, local_rows: int, tp_rank: int, tp_size: int
    ) -> Tensor:
        rows = _part(sizes.ffn_hidden_size, tp_rank, tp_size)
        return torch.cat([read((rows,)) for read in reads])

    def merge(self, shards: Sequence[Tensor], sizes: Dimensions) -> tuple[Tensor, ...]:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat(gates), torch.cat(ups)


@dataclass(frozen=True)
class Weight:
    """One parameter of a whole model: a rule with the layer filled in."""

    megatron: str
    hf: tuple[str, ...]
    rule: Rule


def expand(rules: Sequence[Rule], num_layers: int) -> Iterator[Weight]:
    """Every parameter of a model, layer by layer, in the order of the rules."""
    for in_layer, group in groupby(rules, key=lambda rule: "{layer}" in rule.megatron):
        layer_rules = list(group)
        for layer in range(num_layers) if in_layer else (0,):
            for rule in layer_rules:
                yield Weight(
                    rule.megatron.format(layer=layer),
                    tuple(name.format(layer=layer) for name in rule.hf),
                    rule,
                )
