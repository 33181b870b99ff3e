"""Order, split over ranks, resuming, and exact coverage in evaluation; the references are plain lists."""

import json

import pytest
import torch

from megatron_ext.data import EncodedSample, EvalLoader, SampleOrder, TrainLoader

PAD = 3


class FakeSamples:
    """Sample i has a length of its own and tells its index in each of its tokens."""

    def __init__(self, num_samples, fingerprint="f0"):
        self.fingerprint = fingerprint
        self.lengths = [3 + 7 * index % 11 for index in range(num_samples)]
        self.max_length = max(self.lengths, default=0)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        return EncodedSample([100 + index] * length, [200 + index] * length, [1.0] * length)


def train_loader(dataset, dp_rank=0, dp_size=1, **changes):
    options = dict(global_batch_size=8, micro_batch_size=1, seed=5, seq_length=16, pad_id=PAD)
    return TrainLoader(dataset, dp_rank=dp_rank, dp_size=dp_size, **options | changes)


def eval_loader(dataset, dp_rank=0, dp_size=1, **changes):
    options = dict(global_batch_size=8, micro_batch_size=1, seq_length=16, pad_id=PAD)
    return EvalLoader(dataset, dp_rank=dp_rank, dp_size=dp_size, **options | changes)


def joined(lists):
    return [entry for entries in lists for entry in entries]


def ids(micro_batches):
    return [sample_id for micro_batch in micro_batches for sample_id in micro_batch.sample_ids.tolist()]


def steps_of(dataset, dp_size, num_steps, **options):
    """Each step's sample ids, read over the ranks in turn."""
    loaders = [train_loader(dataset, rank, dp_size, **options) for rank in range(dp_size)]
    return [joined(ids(loader.next_step()) for loader in loaders) for _ in range(num_steps)]


def check_rows(dataset, micro_batches):
    """Every row holds its own sample, then padding; filler rows hold padding alone."""
    assert len({micro_batch.input_ids.shape for micro_batch in micro_batches}) == 1
    for micro_batch in micro_batches:
        for row, sample_id in enumerate(micro_batch.sample_ids.tolist()):
            length = 0 if sample_id < 0 else dataset.lengths[sample_id]
            padding = micro_batch.input_ids.shape[1] - length
            assert micro_batch.lengths[row] == length
            assert micro_batch.input_ids[row].tolist() == [100 + sample_id] * length + [PAD] * padding
            assert micro_batch.labels[row].tolist() == [200 + sample_id] * length + [0] * padding
            assert micro_batch.loss_mask[row].tolist() == [1.0] * length + [0.0] * padding


# -- order ---------------------------------------------------------------------------------------------------


def test_each_epoch_is_another_permutation_of_all_samples():
    order = SampleOrder(10, seed=1, shuffle=True)
    epochs = [order.take(10 * epoch, 10) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_stream_does_not_depend_on_how_it_is_cut():
    whole = SampleOrder(7, seed=3, shuffle=True).take(0, 50)
    assert len(whole) == 50
    for start in range(40):
        for count in (1, 6, 7, 9):
            assert SampleOrder(7, seed=3, shuffle=True).take(start, count) == whole[start : start + count]
    backwards = SampleOrder(7, seed=3, shuffle=True)
    assert [backwards.take(position, 1)[0] for position in reversed(range(50))] == whole[::-1]


def test_seeds_and_epochs_do_not_mix():
    epochs = {
        tuple(SampleOrder(20, seed=seed, shuffle=True).take(20 * epoch, 20)) for seed in range(5) for epoch in range(5)
    }
    assert len(epochs) == 25


def test_the_order_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    SampleOrder(20, seed=0, shuffle=True).take(0, 50)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_shuffle_the_file_order_repeats():
    assert SampleOrder(3, seed=9, shuffle=False).take(2, 6) == [2, 0, 1, 2, 0, 1]


def test_the_order_of_a_seed_is_fixed():
    """Checkpoints of earlier versions resume on the same samples: this list never changes."""
    assert SampleOrder(8, seed=1234, shuffle=True).take(0, 16) == FIXED_ORDER


FIXED_ORDER = [2, 4, 3, 1, 0, 7, 5, 6, 5, 3, 7, 2, 1, 6, 4, 0]


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [5, 8, 21])
def test_the_samples_of_a_step_are_the_same_list_for_every_layout(num_samples):
    dataset = FakeSamples(num_samples)
    stream = SampleOrder(num_samples, seed=5, shuffle=True).take(0, 56)
    expected = [stream[first : first + 8] for first in range(0, 56, 8)]
    for dp_size, micro_batch_size in [(1, 1), (1, 8), (2, 1), (2, 2), (2, 4), (4, 2), (8, 1)]:
        assert steps_of(dataset, dp_size, 7, micro_batch_size=micro_batch_size) == expected


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 2), (2, 4), (4, 1)])
def test_ranks_have_equally_many_micro_batches_with_their_own_rows(dp_size, micro_batch_size):
    dataset = FakeSamples(21)
    for rank in range(dp_size):
        loader = train_loader(dataset, rank, dp_size, micro_batch_size=micro_batch_size)
        assert loader.num_micro_batches == 8 // dp_size // micro_batch_size
        for _ in range(6):
            step = loader.next_step()
            assert [len(micro_batch.sample_ids) for micro_batch in step] == [
                micro_batch_size
            ] * loader.num_micro_batches
            check_rows(dataset, step)


def test_padded_length_is_the_ranks_longest_row_rounded_up_or_seq_length():
    dataset = FakeSamples(21)
    for rank, multiple in [(0, 1), (1, 1), (0, 4), (1, 4), (1, 8)]:
        loader = train_loader(dataset, rank, 2, pad_multiple=multiple)
        for _ in range(5):
            step = loader.next_step()
            longest = max(dataset.lengths[index] for index in ids(step))
            expected = next(length for length in range(multiple, 17, multiple) if length >= longest)
            assert {micro_batch.input_ids.shape for micro_batch in step} == {(1, expected)}
    (first, *_) = train_loader(dataset, pad_to="seq_length", pad_multiple=4).next_step()
    assert first.input_ids.shape == (1, 16)


@pytest.mark.parametrize("shuffle", [True, False])
def test_resume_continues_the_stream_at_every_step_and_under_another_layout(shuffle):
    dataset = FakeSamples(21)
    whole = steps_of(dataset, 1, 9, shuffle=shuffle)
    loader = train_loader(dataset, shuffle=shuffle)
    for done in range(6):
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["consumed_samples"] == 8 * done
        rows = []
        for rank in range(4):
            resumed = train_loader(dataset, rank, 4, micro_batch_size=2, shuffle=shuffle)
            resumed.load_state_dict(state)
            rows.append([ids(resumed.next_step()) for _ in range(3)])
        assert [joined(step) for step in zip(*rows, strict=True)] == whole[done : done + 3]
        loader.next_step()


def test_resume_with_another_global_batch_size_goes_on_in_the_stream():
    dataset = FakeSamples(21)
    loader = train_loader(dataset)
    loader.next_step()
    resumed = train_loader(dataset, global_batch_size=6)
    resumed.load_state_dict(loader.state_dict())
    assert ids(resumed.next_step()) == SampleOrder(21, seed=5, shuffle=True).take(8, 6)


def test_resume_is_refused_naming_each_difference():
    state = train_loader(FakeSamples(21)).state_dict()
    for other, named, unnamed in [
        (
            train_loader(FakeSamples(21, "f1")),
            ["fingerprint was f0 and is now f1"],
            ["seed was", "num_samples was"],
        ),
        (train_loader(FakeSamples(20, "f1")), ["num_samples was 21 and is now 20"], ["seed was"]),
        (train_loader(FakeSamples(21), seed=6), ["seed was 5 and is now 6"], ["fingerprint was"]),
        (train_loader(FakeSamples(21), shuffle=False), ["shuffle was True and is now False"], ["seed was"]),
        (
            train_loader(FakeSamples(21), seed=6, shuffle=False),
            ["seed was", "shuffle was"],
            ["fingerprint was"],
        ),
    ]:
        with pytest.raises(ValueError, match="cannot be continued on other data") as error:
            other.load_state_dict(state)
        assert all(text in str(error.value) for text in named)
        assert not any(text in str(error.value) for text in unnamed)
        assert other.consumed_samples == 0


def test_a_damaged_state_is_refused():
    loader = train_loader(FakeSamples(21))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="missing or unknown entries \\(seed\\)"):
        loader.load_state_dict({key: value for key, value in state.items() if key != "seed"})
    with pytest.raises(ValueError, match="missing or unknown entries \\(epoch\\)"):
        loader.load_state_dict(state | {"epoch": 1})
    for consumed in (-8, 1.5, True, None):
        with pytest.raises(ValueError, match=r"consumed_samples .* is not a count"):
            loader.load_state_dict(state | {"consumed_samples": consumed})


WRONG = {
    "global_batch_size 6 is not a positive multiple.*multiple of 4": dict(
        global_batch_size=6, micro_batch_size=2, dp_size=2
    ),
    "global_batch_size 0": dict(global_batch_size=0),
    "micro_batch_size 0": dict(micro_batch_size=0),
    "dp_rank 2 is outside 0 to 1": dict(dp_rank=2, dp_size=2),
    "pad_multiple 0": dict(pad_multiple=0),
    "seq_length 16 is not divisible by 3.*use 18": dict(pad_multiple=3),
    "pad_to 'max'": dict(pad_to="max"),
    "pad_id -1": dict(pad_id=-1),
    "sample of 13 positions, more than seq_length 12": dict(seq_length=12),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_sizes_are_refused(message):
    with pytest.raises(ValueError, match=message):
        train_loader(FakeSamples(21), **WRONG[message])


def test_an_empty_data_set_is_refused():
    for build in (train_loader, eval_loader):
        with pytest.raises(ValueError, match="empty"):
            build(FakeSamples(0))


# -- evaluation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 7, 8, 9, 21])
@pytest.mark.parametrize(
    ("dp_size", "micro_batch_size", "global_batch_size", "multiple"),
    [
        (1, 1, 8, 1),
        (1, 8, 8, 1),
        (2, 2, 8, 1),
        (4, 1, 8, 2),
        (8, 3, 8, 1),
        (2, 4, 5, 1),
        (3, 2, 7, 3),
        (2, 1, 100, 4),
    ],
)
def test_evaluation_covers_each_sample_once_in_order_on_ranks_in_step(
    num_samples, dp_size, micro_batch_size, global_batch_size, multiple
):
    dataset = FakeSamples(num_samples)
    loaders = [
        eval_loader(
            dataset,
            rank,
            dp_size,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            micro_batches_multiple=multiple,
        )
        for rank in range(dp_size)
    ]
    seen = []
    num_steps = 0
    for step in zip(*loaders, strict=True):
        assert len({len(micro_batches) for micro_batches in step}) == 1
        assert len(step[0]) % multiple == 0 and len(step[0]) > 0
        for micro_batches in step:
            assert {len(micro_batch.sample_ids) for micro_batch in micro_batches} == {micro_batch_size}
            check_rows(dataset, micro_batches)
        seen += [sample_id for micro_batches in step for sample_id in ids(micro_batches) if sample_id >= 0]
        num_steps += 1
    assert seen == list(range(num_samples))
    assert num_steps == len(loaders[0]) == -(-num_samples // global_batch_size)


def test_evaluation_can_be_repeated():
    loader = eval_loader(FakeSamples(9), 1, 2)
    assert [ids(step) for step in loader] == [ids(step) for step in loader] == [[4, 5, 6, 7], [-1]]


def test_a_rank_of_fillers_alone_has_the_smallest_length():
    (step,) = eval_loader(FakeSamples(1), 1, 2, pad_multiple=4)
    assert step[0].input_ids.tolist() == [[PAD] * 4] and step[0].lengths.tolist() == [0]
    assert step[0].loss_mask.sum() == 0


def test_wrong_evaluation_sizes_are_refused():
    for name in ("global_batch_size", "micro_batches_multiple", "micro_batch_size"):
        with pytest.raises(ValueError, match=f"{name} 0 is not positive"):
            eval_loader(FakeSamples(3), **{name: 0})
