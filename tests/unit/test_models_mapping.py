"""Weight layouts against layouts written out by hand, row by row."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_ext.models.mapping import (
    GatedMLP,
    GroupedQKV,
    Replicated,
    Rule,
    Sharded,
    VocabRows,
    canonical_name,
    expand,
)

HEADS, GROUPS, HEAD_DIM, HIDDEN, FFN, VOCAB = 8, 4, 2, 6, 8, 10
SIZES = SimpleNamespace(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    ffn_hidden_size=FFN,
    num_attention_heads=HEADS,
    num_query_groups=GROUPS,
    head_dim=HEAD_DIM,
    q_size=HEADS * HEAD_DIM,
    kv_size=GROUPS * HEAD_DIM,
)


def numbered(rows: int, columns: int, start: int) -> Tensor:
    """A matrix in which every element is different, also from those of other starts."""
    return torch.arange(start, start + rows * columns, dtype=torch.float32).view(rows, columns)


def shard_all(rule: Rule, tensors: list[Tensor], tp_size: int, local_rows: int) -> list[Tensor]:
    reads = [lambda slices, tensor=tensor: tensor[slices] for tensor in tensors]
    return [rule.shard(reads, SIZES, local_rows, rank, tp_size) for rank in range(tp_size)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_qkv_rows_are_queries_key_value_of_each_group(tp_size: int) -> None:
    query, key, value = numbered(16, HIDDEN, 0), numbered(8, HIDDEN, 1000), numbered(8, HIDDEN, 2000)
    rule = GroupedQKV("qkv", ("q", "k", "v"))
    groups_per_rank = GROUPS // tp_size
    expected = []
    for rank in range(tp_size):
        rows = []
        for group in range(rank * groups_per_rank, (rank + 1) * groups_per_rank):
            for head in (2 * group, 2 * group + 1):  # 8 heads share 4 groups
                rows += [query[head * HEAD_DIM + i] for i in range(HEAD_DIM)]
            rows += [key[group * HEAD_DIM + i] for i in range(HEAD_DIM)]
            rows += [value[group * HEAD_DIM + i] for i in range(HEAD_DIM)]
        expected.append(torch.stack(rows))
    shards = shard_all(rule, [query, key, value], tp_size, local_rows=32 // tp_size)
    for shard, wanted in zip(shards, expected, strict=True):
        assert torch.equal(shard, wanted)
    for merged, original in zip(rule.merge(expected, SIZES), (query, key, value), strict=True):
        assert torch.equal(merged, original)


def test_qkv_bias_has_the_layout_of_the_weight() -> None:
    bias = [torch.arange(16.0), 100 + torch.arange(8.0), 200 + torch.arange(8.0)]
    rule = GroupedQKV("qkv", ("q", "k", "v"), trailing=())
    second = shard_all(rule, bias, tp_size=4, local_rows=8)[1]
    assert second.tolist() == [4, 5, 6, 7, 102, 103, 202, 203]
    assert rule.shapes(SIZES) == ((16,), (8,), (8,))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rank_has_gate_and_up_of_the_same_rows(tp_size: int) -> None:
    gate, up = numbered(FFN, HIDDEN, 0), numbered(FFN, HIDDEN, 1000)
    rule = GatedMLP("fc1", ("gate", "up"))
    rows = FFN // tp_size
    expected = []
    for rank in range(tp_size):
        mine = range(rank * rows, (rank + 1) * rows)
        expected.append(torch.stack([gate[row] for row in mine] + [up[row] for row in mine]))
    shards = shard_all(rule, [gate, up], tp_size, local_rows=2 * rows)
    for shard, wanted in zip(shards, expected, strict=True):
        assert torch.equal(shard, wanted)
    for merged, original in zip(rule.merge(expected, SIZES), (gate, up), strict=True):
        assert torch.equal(merged, original)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_row_parallel_layers_split_columns(tp_size: int) -> None:
    weight = numbered(HIDDEN, FFN, 0)
    rule = Sharded("fc2", ("down",), ("hidden_size", "ffn_hidden_size"), dim=1)
    columns = FFN // tp_size
    expected = [
        torch.tensor([[weight[i, j].item() for j in range(r * columns, (r + 1) * columns)] for i in range(HIDDEN)])
        for r in range(tp_size)
    ]
    for shard, wanted in zip(shard_all(rule, [weight], tp_size, HIDDEN), expected, strict=True):
        assert torch.equal(shard, wanted)
    assert torch.equal(rule.merge(expected, SIZES)[0], weight)


def test_column_parallel_layers_split_rows() -> None:
    weight = numbered(FFN, HIDDEN, 0)
    rule = Sharded("column", ("column",), ("ffn_hidden_size", "hidden_size"), dim=0)
    assert torch.equal(shard_all(rule, [weight], 4, 2)[3], weight[6:8])


@pytest.mark.parametrize(
    ("tp_size", "padded", "expected_rows"),
    [
        (1, 10, [list(range(10))]),
        (1, 12, [[*range(10), None, None]]),
        (2, 12, [list(range(6)), [6, 7, 8, 9, None, None]]),
        (4, 16, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, None, None], [None] * 4]),
    ],
)
def test_vocabulary_is_padded_with_zeros_at_its_end(
    tp_size: int, padded: int, expected_rows: list[list[int | None]]
) -> None:
    weight = numbered(VOCAB, HIDDEN, 1)
    rule = VocabRows("embedding", ("embed",))
    expected = [
        torch.stack([torch.zeros(HIDDEN) if row is None else weight[row] for row in rows]) for rows in expected_rows
    ]
    shards = shard_all(rule, [weight], tp_size, local_rows=padded // tp_size)
    for shard, wanted in zip(shards, expected, strict=True):
        assert torch.equal(shard, wanted)
    trained = [shard + 0.5 for shard in expected]  # training may move the padding; it must not come out
    (merged,) = rule.merge(trained, SIZES)
    assert torch.equal(merged, weight + 0.5)
    assert merged.is_contiguous()


def test_replicated_weights_are_read_whole_by_every_rank() -> None:
    weight = torch.arange(6.0)
    rule = Replicated("norm", ("norm",), ("hidden_size",))
    assert all(torch.equal(shard, weight) for shard in shard_all(rule, [weight], 4, 6))


def test_a_rank_reads_only_its_share() -> None:
    read = []

    def count(slices: tuple[slice, ...], tensor: Tensor) -> Tensor:
        part = tensor[slices]
        read.append(part.numel() / tensor.numel())
        return part

    for rule in (
        GroupedQKV("qkv", ("q", "k", "v")),
        GatedMLP("fc1", ("gate", "up")),
        Sharded("fc2", ("down",), ("hidden_size", "ffn_hidden_size"), dim=1),
    ):
        tensors = [torch.zeros(shape) for shape in rule.shapes(SIZES)]
        rule.shard([lambda s, t=tensor: count(s, t) for tensor in tensors], SIZES, 0, 1, 4)
    assert read == [0.25] * 6


def test_fused_norm_names_become_plain_ones() -> None:
    layer = "decoder.layers.3."
    assert canonical_name(layer + "self_attention.linear_qkv.layer_norm_weight") == layer + "input_layernorm.weight"
    assert canonical_name(layer + "mlp.linear_fc1.layer_norm_weight") == layer + "pre_mlp_layernorm.weight"
    assert canonical_name(layer + "mlp.linear_fc1.weight") == layer + "mlp.linear_fc1.weight"


def test_rules_expand_layer_by_layer() -> None:
    rules = [
        Replicated("first", ("hf.first",), ()),
        Replicated("layers.{layer}.a", ("hf.{layer}.a",), ()),
        Replicated("layers.{layer}.b", ("hf.{layer}.b",), ()),
        Replicated("last", ("hf.last",), ()),
    ]
    weights = list(expand(rules, 2))
    assert [weight.hf[0] for weight in weights] == [
        "hf.first",
        "hf.0.a",
        "hf.0.b",
        "hf.1.a",
        "hf.1.b",
        "hf.last",
    ]
    assert weights[3].megatron == "layers.1.a"
