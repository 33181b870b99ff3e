"""The torch core attention against softmax(QK^T)V written out in float64, alone and over context-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch

HEADS, GROUPS, DIM = 6, 2, 8


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """[s, b, heads, d] and [s, b, groups, d] to [s, b, heads * d], one head, row and query at a time."""
    s, b, heads, d = query.shape
    out = torch.zeros_like(query)
    for head in range(heads):
        group = head // (heads // key.size(2))
        for row in range(b):
            for position in range(s):
                last = position + 1 if causal else s
                scores = key[:last, row, group] @ query[position, row, head] / d**0.5
                out[position, row, head] = torch.softmax(scores, 0) @ value[:last, row, group]
    return out.reshape(s, b, heads * d)


def build_attention(group, mask_type=None):
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ext.platform.attention import TorchCoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        context_parallel_size=group.size(),
        attention_dropout=0.0,
    )
    return TorchCoreAttention(
        config, 1, mask_type or AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=group)
    )


def attend_on_ranks(tensors: list[torch.Tensor], upstream: torch.Tensor, lengths: list[int] | None, causal: bool):
    """Each rank's output and input gradients for its part of the sequences."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_ext.context_parallel import shard_sequence

    group = dist.group.WORLD
    parallel_state.initialize_model_parallel(context_parallel_size=group.size(), create_gloo_process_groups=False)

    def own_part(tensor: torch.Tensor) -> torch.Tensor:
        pieces = [tensor] if lengths is None else tensor.split(lengths)
        parts = [shard_sequence(piece.transpose(0, 1), group.rank(), group.size()).transpose(0, 1) for piece in pieces]
        return torch.cat(parts)

    inputs = [own_part(tensor).clone().requires_grad_() for tensor in tensors]
    attention = build_attention(group, AttnMaskType.causal if causal else AttnMaskType.no_mask)
    if lengths is None:
        out = attention(*inputs, None)
    else:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
        out = attention(*[tensor.squeeze(1) for tensor in inputs], None, packed_seq_params=packed)
        out = out.reshape(out.size(0), 1, -1)
    out.backward(own_part(upstream))
    return [out.detach(), *[tensor.grad for tensor in inputs]], own_part


def run_attention(tensors, upstream, lengths, causal):
    values, own_part = attend_on_ranks(tensors, upstream, lengths, causal)
    positions = own_part(torch.arange(tensors[0].size(0)).view(-1, 1)).flatten()
    return values, positions


def random_tensors(s: int, b: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(s + b)
    tensors = [torch.randn(s, b, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return tensors, torch.randn(s, b, HEADS * DIM)


def check(results: list, tensors: list[torch.Tensor], upstream: torch.Tensor, expected: torch.Tensor, inputs) -> None:
    expected.backward(upstream.double())
    references = [expected.detach(), *[tensor.grad for tensor in inputs]]
    for i, reference in enumerate(references):
        whole = torch.empty_like(reference)
        for values, positions in results:
            whole[positions] = values[i].double()
        error = (whole - reference).norm() / reference.norm()
        assert error < 1e-5, f"tensor {i} is off by {error:.1e}"


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_unpacked(ranks, cp_size: int, causal: bool) -> None:
    tensors, upstream = random_tensors(16, 2)
    inputs = [tensor.double().requires_grad_() for tensor in tensors]
    expected = dense_attention(*inputs, causal=causal)
    results = ranks.run(cp_size, run_attention, tensors, upstream, None, causal)
    check(results, tensors, upstream, expected, inputs)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_sequences_do_not_see_each_other(ranks, cp_size: int) -> None:
    lengths = [8, 4, 12]
    tensors, upstream = random_tensors(sum(lengths), 1)
    inputs = [tensor.double().requires_grad_() for tensor in tensors]
    pieces = zip(*[tensor.split(lengths) for tensor in inputs], strict=True)
    expected = torch.cat([dense_attention(*piece) for piece in pieces])
    results = ranks.run(cp_size, run_attention, tensors, upstream, lengths, True)
    check(results, tensors, upstream, expected, inputs)
