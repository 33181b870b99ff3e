"""Packing: nothing lost, nothing twice, no row too long; and packed rows hold what the samples hold."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_ext.context_parallel import packed_order, restore_packed_order, shard_sequence
from megatron_ext.data import EncodedSample, EvalLoader, SampleOrder, TrainLoader, collate, collate_packed
from megatron_ext.data.packing import aligned, count_fitting, pack
from megatron_ext.token_weights import token_weights

PAD = 3


class FakeSamples:
    """Sample i tells its index in each of its tokens."""

    fingerprint = "f0"

    def __init__(self, lengths):
        self.lengths = lengths
        self.max_length = max(lengths)

    def __len__(self):
        return len(self.lengths)

    def length(self, index):
        return self.lengths[index]

    def __getitem__(self, index):
        length = self.lengths[index]
        mask = [float((index + position) % 3 > 0) for position in range(length)]
        return EncodedSample([100 + index] * length, [200 + index] * length, mask)


# -- which sequences share a row -----------------------------------------------------------------------------


@st.composite
def bins(draw):
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    capacity = multiple * draw(st.integers(1, 20))
    lengths = draw(st.lists(st.integers(0, capacity), max_size=60))
    return lengths, multiple, capacity, draw(st.integers(1, 9))


@hypothesis_settings(deadline=None)
@given(bins())
def test_every_sequence_is_in_one_row_and_no_row_overflows_after_alignment(case):
    lengths, multiple, capacity, rows_multiple = case
    rows = pack(lengths, capacity=capacity, multiple=multiple, rows_multiple=rows_multiple)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sizes = [-(-max(length, 1) // multiple) * multiple for length in lengths]
    used = [sum(sizes[index] for index in row) for row in rows]
    assert all(total <= capacity for total in used)
    assert len(rows) % rows_multiple == 0
    assert all(row == sorted(row) for row in rows)
    filled = [row for row in rows if row]
    assert rows == sorted(filled) + [[]] * (len(rows) - len(filled))
    assert rows == pack(lengths, capacity=capacity, multiple=multiple, rows_multiple=rows_multiple)


@hypothesis_settings(deadline=None)
@given(bins())
def test_rows_are_few(case):
    """All rows but one are more than half full together with any other (a bound that every fitting rule keeps)."""
    lengths, multiple, capacity, _ = case
    rows = pack(lengths, capacity=capacity, multiple=multiple)
    total = sum(aligned(length, multiple) for length in lengths)
    assert len(rows) <= max(1, 2 * -(-total // capacity)) if lengths else rows == []


def test_rows_that_rounding_adds_are_used():
    assert pack([4, 4, 4, 4], capacity=8) == [[0, 1], [2, 3]]
    assert pack([4, 4, 4, 4], capacity=8, rows_multiple=4) == [[0], [1], [2], [3]]
    assert pack([8, 8, 4], capacity=8, rows_multiple=2) == [[0], [1], [2], []]


def test_the_fullest_row_that_has_room_is_taken():
    assert pack([5, 7, 3, 1], capacity=8) == [[0, 2], [1, 3]]


def test_unaligned_lengths_would_fit():
    """Three of 5 are 15, but 24 when each is a multiple of 8."""
    assert pack([5, 5, 5], capacity=16, multiple=8) == [[0, 1], [2]]


def test_a_sequence_longer_than_a_row_is_our_mistake():
    with pytest.raises(AssertionError, match="a sequence of 12 does not fit a row of 10"):
        pack([9], capacity=10, multiple=4)


@hypothesis_settings(deadline=None)
@given(bins())
def test_as_many_are_counted_as_first_fit_places(case):
    lengths, multiple, capacity, num_rows = case
    count = count_fitting(lengths, capacity=capacity, multiple=multiple, num_rows=num_rows)
    used = [0] * num_rows
    for index, length in enumerate(lengths):
        size = aligned(length, multiple)
        places = [row for row in range(num_rows) if used[row] + size <= capacity]
        if not places:
            assert count == index
            return
        used[places[0]] += size
    assert count == len(lengths)


# -- one packed row ------------------------------------------------------------------------------------------


def test_a_packed_row_written_out():
    samples = FakeSamples([3, 1, 4])
    batch = collate_packed([samples[0], samples[1]], [0, 1], multiple=4, padded_length=12, pad_id=PAD)
    assert batch.input_ids.tolist() == [[100, 100, 100, PAD, 101, PAD, PAD, PAD] + [PAD] * 4]
    assert batch.labels.tolist() == [[200, 200, 200, 0, 201, 0, 0, 0] + [0] * 4]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 1, 0, 0, 0] + [0] * 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 8] and batch.cu_seqlens.dtype == torch.int32
    assert batch.lengths.tolist() == [3, 1] and batch.sample_ids.tolist() == [0, 1]
    assert batch.sequence_of_position().tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]]
    assert batch.is_token().int().tolist() == [[1, 1, 1, 0, 1, 0, 0, 0] + [0] * 4]
    assert batch.spans() == [(0, slice(0, 3)), (0, slice(4, 5))]


def test_a_filler_row_holds_padding_alone():
    batch = collate_packed([], [], multiple=4, padded_length=8, pad_id=PAD)
    assert batch.input_ids.tolist() == [[PAD] * 8] and batch.loss_mask.sum() == 0
    assert batch.cu_seqlens.tolist() == [0, 4]
    assert batch.lengths.tolist() == [0] and batch.sample_ids.tolist() == [-1]
    assert not batch.is_token().any()


def test_unpacked_rows_answer_the_same_questions():
    samples = FakeSamples([3, 1])
    batch = collate([samples[0], samples[1]], [0, 1], padded_length=4, pad_id=PAD)
    assert batch.sequence_of_position().tolist() == [[0] * 4, [1] * 4]
    assert batch.is_token().int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch.spans() == [(0, slice(0, 3)), (1, slice(0, 1))]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_tokens_weigh_what_they_weigh_in_rows_of_their_own(reduction):
    samples = FakeSamples([5, 1, 2, 8, 3])
    ids = range(5)
    packed = collate_packed([samples[i] for i in ids], ids, multiple=4, padded_length=40, pad_id=PAD)
    alone = collate([samples[i] for i in ids], ids, padded_length=8, pad_id=PAD)
    expected, found = token_weights(alone, reduction), token_weights(packed, reduction)
    for (row, span), (_, own) in zip(packed.spans(), alone.spans(), strict=True):
        index = packed.sequence_of_position()[row, span][0]
        assert torch.equal(found[row, span], expected[index, own])
    assert found.dtype == torch.float32 and found.sum() == pytest.approx(expected.sum().item())
    assert not found[~packed.is_token()].any()


# -- context parallelism -------------------------------------------------------------------------------------


@hypothesis_settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_sequence_is_cut_on_its_own(cp_size, sizes):
    sizes = [size * 2 * cp_size for size in sizes]
    bounds = torch.tensor([0, *sizes]).cumsum(0).int()
    row = torch.randn(sum(sizes), 2)
    order = packed_order(bounds, cp_size)
    for rank in range(cp_size):
        parts = [shard_sequence(part[None], rank, cp_size)[0] for part in row.split(sizes)]
        assert torch.equal(row[order[rank]], torch.cat(parts))
    assert torch.equal(restore_packed_order(row[order], bounds), row)


# -- training ------------------------------------------------------------------------------------------------

LENGTHS = [3 + 7 * index % 11 for index in range(21)]


def train_loader(dataset, dp_rank=0, dp_size=1, **changes):
    options = dict(global_batch_size=8, micro_batch_size=1, seed=5, seq_length=16, pad_id=PAD, packing=True)
    return TrainLoader(dataset, dp_rank=dp_rank, dp_size=dp_size, **options | changes)


def eval_loader(dataset, dp_rank=0, dp_size=1, **changes):
    options = dict(global_batch_size=4, micro_batch_size=1, seq_length=16, pad_id=PAD, packing=True)
    return EvalLoader(dataset, dp_rank=dp_rank, dp_size=dp_size, **options | changes)


def check_rows(dataset, micro_batches, multiple, pad_multiple, capacity):
    """Every sequence of every row is its own sample; returns the ids."""
    (shape,) = {batch.input_ids.shape for batch in micro_batches}
    assert shape[0] == 1 and shape[1] <= capacity and shape[1] % pad_multiple == 0
    seen = []
    for batch in micro_batches:
        assert (batch.cu_seqlens % multiple == 0).all() and batch.cu_seqlens[-1] <= shape[1]
        for sample_id, (_, span) in zip(batch.sample_ids.tolist(), batch.spans(), strict=True):
            if sample_id < 0:
                assert batch.sample_ids.tolist() == [-1] and batch.lengths.tolist() == [0]
                continue
            sample = dataset[sample_id]
            assert batch.input_ids[0, span].tolist() == sample.input_ids
            assert batch.labels[0, span].tolist() == sample.labels
            assert batch.loss_mask[0, span].tolist() == sample.loss_mask
            assert batch.position_ids[0, span].tolist() == list(range(len(sample)))
            seen.append(sample_id)
        padding = ~batch.is_token()
        assert (batch.input_ids[padding] == PAD).all() and not batch.loss_mask[padding].any()
        assert not batch.labels[padding].any()
    return seen


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=30),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 8), (1, 2)]),
)
def test_a_step_has_its_samples_once_on_ranks_with_equally_many_micro_batches(
    lengths, global_batch_size, micro_batch_size, dp_size, micro_batches_multiple, multiples
):
    multiple, pad_multiple = multiples
    dataset = FakeSamples(lengths)
    options = dict(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        micro_batches_multiple=micro_batches_multiple,
        packing_multiple=multiple,
        pad_multiple=pad_multiple,
    )
    loaders = [train_loader(dataset, rank, dp_size, **options) for rank in range(dp_size)]
    for step in range(3):
        batches = [loader.next_step() for loader in loaders]
        (count,) = {len(own) for own in batches}
        assert count > 0 and count % micro_batches_multiple == 0
        seen = [i for own in batches for i in check_rows(dataset, own, multiple, pad_multiple, 16 * micro_batch_size)]
        stream = SampleOrder(len(lengths), seed=5, shuffle=True).take(step * global_batch_size, global_batch_size)
        assert sorted(seen) == sorted(stream)


def test_resume_continues_with_the_same_rows_and_without_packing_with_the_same_samples():
    dataset = FakeSamples(LENGTHS)
    whole = [train_loader(dataset)]
    steps = [[batch.sample_ids.tolist() for batch in whole[0].next_step()] for _ in range(6)]
    for done in range(1, 5):
        loader = train_loader(dataset)
        for _ in range(done):
            loader.next_step()
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["consumed_samples"] == 8 * done
        resumed, unpacked = train_loader(dataset), train_loader(dataset, packing=False)
        resumed.load_state_dict(state)
        unpacked.load_state_dict(state)
        for expected in steps[done:]:
            assert [batch.sample_ids.tolist() for batch in resumed.next_step()] == expected
            ids = [i for batch in unpacked.next_step() for i in batch.sample_ids.tolist()]
            assert sorted(ids) == sorted(i for row in expected for i in row)


def test_packing_takes_fewer_micro_batches():
    dataset = FakeSamples(LENGTHS)
    steps = [train_loader(dataset).next_step() for _ in range(3)]
    assert all(len(step) < 8 for step in steps)
    assert train_loader(dataset).num_micro_batches is None
    assert train_loader(dataset, packing=False).num_micro_batches == 8


def test_pad_to_seq_length_makes_all_rows_as_long_as_a_micro_batch():
    batches = train_loader(FakeSamples(LENGTHS), micro_batch_size=2, pad_to="seq_length").next_step()
    assert {batch.input_ids.shape for batch in batches} == {(1, 32)}


def test_any_global_batch_size_will_do_and_sizes_that_cannot_go_together_are_refused():
    dataset = FakeSamples(LENGTHS)
    train_loader(dataset, 1, 3, global_batch_size=7, micro_batch_size=2)
    with pytest.raises(ValueError, match="global_batch_size 0 is not a positive"):
        train_loader(dataset, global_batch_size=0)
    with pytest.raises(ValueError, match="packing_multiple 0 is not positive"):
        train_loader(dataset, packing_multiple=0)
    with pytest.raises(ValueError, match="packing_multiple 4 does not divide pad_multiple 2"):
        train_loader(dataset, packing_multiple=4, pad_multiple=2)


# -- evaluation ----------------------------------------------------------------------------------------------


@hypothesis_settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 8)]),
)
def test_evaluation_sees_each_sample_once(
    lengths, global_batch_size, micro_batch_size, dp_size, micro_batches_multiple, multiples
):
    multiple, pad_multiple = multiples
    dataset = FakeSamples(lengths)
    loaders = [
        eval_loader(
            dataset,
            rank,
            dp_size,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            micro_batches_multiple=micro_batches_multiple,
            packing_multiple=multiple,
            pad_multiple=pad_multiple,
        )
        for rank in range(dp_size)
    ]
    seen, last = [], -1
    for step in zip(*loaders, strict=True):
        (count,) = {len(own) for own in step}
        assert count > 0 and count % micro_batches_multiple == 0
        ids = [i for own in step for i in check_rows(dataset, own, multiple, pad_multiple, 16 * micro_batch_size)]
        assert sorted(ids) == list(range(last + 1, last + 1 + len(ids)))
        last += len(ids)
        seen += ids
    assert sorted(seen) == list(range(len(lengths)))
    assert all(len(loader) == len(list(loader)) for loader in loaders)
