"""Padding: shapes, kinds, and that lengths are stored rather than read off the ids."""

import pytest
import torch

from megatron_ext.data import FILLER, FILLER_ID, EncodedSample, collate

PAD = 2  # also the end-of-turn token of the samples
SAMPLES = [
    EncodedSample([1, PAD, 5], [PAD, 5, PAD], [0.0, 1.0, 1.0]),
    FILLER,
    EncodedSample([7, 8, PAD, PAD, 9], [8, PAD, PAD, 9, PAD], [1.0, 0.0, 0.0, 1.0, 1.0]),
]


def test_collate_pads_to_the_right():
    batch = collate(SAMPLES, [4, FILLER_ID, 0], padded_length=6, pad_id=PAD)
    assert batch.input_ids.tolist() == [[1, 2, 5, 2, 2, 2], [2] * 6, [7, 8, 2, 2, 9, 2]]
    assert batch.labels.tolist() == [[2, 5, 2, 0, 0, 0], [0] * 6, [8, 2, 2, 9, 2, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 0, 0], [0] * 6, [1, 0, 0, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch.lengths.tolist() == [3, 0, 5]
    assert batch.sample_ids.tolist() == [4, -1, 0]
    assert batch.cu_seqlens is None
    for tensor in (batch.input_ids, batch.labels, batch.position_ids, batch.lengths, batch.sample_ids):
        assert tensor.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32
    assert batch.position_ids.is_contiguous()


def test_fractional_weights_are_kept():
    batch = collate([EncodedSample([1, 2], [2, 3], [0.25, 0.5])], [0], padded_length=2, pad_id=0)
    assert batch.loss_mask.tolist() == [[0.25, 0.5]]


def test_a_sample_that_does_not_fit_is_our_own_mistake():
    with pytest.raises(AssertionError, match="length 5 does not fit into 4"):
        collate(SAMPLES, [0, -1, 1], padded_length=4, pad_id=0)


def test_to_moves_every_tensor():
    batch = collate(SAMPLES, [4, -1, 0], padded_length=6, pad_id=PAD)
    moved = batch.to("meta", non_blocking=True)
    names = [name for name, value in vars(batch).items() if value is not None]
    assert len(names) == 6
    assert all(vars(moved)[name].device.type == "meta" for name in names)
    assert moved.cu_seqlens is None and batch.input_ids.device.type == "cpu"
