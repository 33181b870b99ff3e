"""What a packed row is to Megatron-Core: one sequence of a batch of 1, with the boundaries that attention and rotary
embeddings have to respect. Owns which boundaries are possible; who shares a row is decided in `data/`.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ext.data import MicroBatch


def bounds_of(batch: MicroBatch) -> torch.Tensor:
    """[n + 1] or [n + 2] int32: where the sequences of a packed row begin, and its end.

    They cover the whole row, as Megatron's rotary embedding needs: padding behind the last sequence is one more.
    """
    assert batch.cu_seqlens is not None
    row_length = batch.input_ids.size(1)
    if int(batch.cu_seqlens[-1]) == row_length:
        return batch.cu_seqlens
    return torch.cat((batch.cu_seqlens, batch.cu_seqlens.new_tensor([row_length])))


def packed_seq_params(bounds: torch.Tensor, device: torch.device) -> PackedSeqParams:
    """Boundaries on `device`, as Megatron wants them: of whole rows, whatever part of them a CP rank has.

    Padding counts as the end of the sequence before it, where the causal order hides it from every token; told apart
    from it (`cu_seqlens_q_padded`), it would cost Transformer Engine its flash kernels.
    """
    starts = bounds.to(device, torch.int32, non_blocking=True)
    # Not the row's length, as is often given: Megatron's rotary embedding then takes positions from the row's start.
    longest = int(bounds.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def packing_problem(batch: MicroBatch, multiple: int) -> str | None:
    """What is wrong with a packed micro-batch, None if nothing is.

    Args:
        multiple: what the layout needs of the length of each sequence.
    """
    rows, row_length = batch.input_ids.shape
    bounds = batch.cu_seqlens
    assert bounds is not None
    shown = f"cu_seqlens {_abridged(bounds)}"
    if rows != 1:
        return f"cu_seqlens is set, but input_ids has {rows} rows; put all sequences into one row of a [1, s] tensor"
    if bounds.dim() != 1 or bounds.numel() < 2 or bounds.is_floating_point():
        return f"{shown} is not a list of integers with a start for each sequence and the end of the last one"
    sizes = bounds.diff()
    if bounds[0] != 0:
        return f"{shown} does not start at 0; the first sequence begins the row"
    if (sizes <= 0).any():
        return f"{shown} does not ascend; leave out empty sequences"
    if bounds[-1] > row_length:
        return f"{shown} ends behind the row of {row_length} positions; lengthen the row"
    for name, values in (("lengths", batch.lengths), ("sample_ids", batch.sample_ids)):
        if values.shape != sizes.shape:
            return f"{shown} bounds {len(sizes)} sequences, but {name} has {values.numel()} entries; give one for each"
    wrong = ((batch.lengths < 0) | (batch.lengths > sizes)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        return (
            f"{shown} gives sequence {i} {int(sizes[i])} positions, but its length is {int(batch.lengths[i])}; "
            "give each sequence room for its tokens"
        )
    if (sizes % multiple).any():
        i = int((sizes % multiple).nonzero()[0])
        return (
            f"{shown} gives sequence {i} {int(sizes[i])} positions, not a multiple of {multiple}, as context "
            "parallelism needs of each sequence; pad them"
        )
    return None


def _abridged(bounds: torch.Tensor) -> str:
    values = bounds.tolist()
    return str(values) if not isinstance(values, list) or len(values) <= 12 else f"[{str(values[:12])[1:-1]}, ...]"
