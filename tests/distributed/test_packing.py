"""Packed rows give what their conversations give one by one: loss, gradients, metrics and per-token outputs.

The reference is transformers' LlamaForCausalLM in float64 on the unpacked conversations, each alone, with the losses
written as plain sums over tokens. What is packed where comes from the loader, as in training.
"""

import math
import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_model import SEQ_LENGTH, VOCAB_SIZE, Run, assemble, make_config, write_tiny_llama

from megatron_ext.data import EncodedSample, MicroBatch, TrainLoader
from toy_run import ToyRun, read_metrics

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
    "TP2 CP2 SP": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}),
    "PP2 CP2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "CP2 DP2": (4, {"context_parallel_size": 2}),
    "CP4": (4, {"context_parallel_size": 4}),
}
CASES = [
    *[(layout, 1, "token_mean") for layout in LAYOUTS],
    *[(layout, 2, "sequence_mean") for layout in ("one process", "PP2 VPP2", "DP2", "TP2 CP2 SP")],
    *[("one process", 8, "token_mean"), ("CP2", 1, "sequence_mean")],
]
Z_WEIGHT = 0.05
LOSSES = {"lm_loss": {"type": "cross_entropy"}, "z_loss": {"type": "z_loss", "weight": Z_WEIGHT}}
LENGTHS = [5, 1, SEQ_LENGTH, 17, 2, 11, 9, 1, 24, 3, 8]  # one fills a row, some are of one token


class Conversations:
    """Random conversations with every kind of mask: full, fractional, with holes, one token, the first token, none."""

    fingerprint = "conversations"
    max_length = SEQ_LENGTH

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.samples = []
        for index, length in enumerate(LENGTHS):
            ids, labels = torch.randint(1, VOCAB_SIZE, (2, length), generator=generator)
            mask = (torch.rand(length, generator=generator) < 0.6).float()
            if index % 3 == 0:
                mask = torch.ones(length)
            elif index % 3 == 2:
                mask *= torch.rand(length, generator=generator)
            self.samples.append(EncodedSample(ids.tolist(), labels.tolist(), mask.tolist()))
        self.samples[4] = replace(self.samples[4], loss_mask=[0.0, 0.0])
        self.samples[6] = replace(self.samples[6], loss_mask=[0.0] * 8 + [1.0])
        self.samples[8] = replace(self.samples[8], loss_mask=[1.0] + [0.0] * 23)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> EncodedSample:
        return self.samples[index]

    def length(self, index: int) -> int:
        return LENGTHS[index]


def next_step(run: Run, pad_id: int = 0) -> list[MicroBatch]:
    config, parallel = run.config, run.parallel
    loader = TrainLoader(
        Conversations(),
        global_batch_size=len(LENGTHS),
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        seed=5,
        pad_multiple=config.sequence_multiple,
        seq_length=SEQ_LENGTH,
        pad_id=pad_id,
        micro_batches_multiple=parallel.pp_size if parallel.vp_size > 1 else 1,
        packing=True,
        packing_multiple=config.packing_multiple,
    )
    return loader.next_step()


def outcome(run: Run, micro_batches: list[MicroBatch], **arguments: Any) -> dict[str, Any]:
    run.wrapper.zero_grad()
    result = run.wrapper.forward_backward_mini_batch(micro_batches, **arguments)
    return {
        "metrics": dict(result.metrics),
        "outputs": result.loss_fn_outputs,
        "gradients": run.gradients(),
        "sample_ids": [i for batch in micro_batches for i in batch.sample_ids.tolist() if i >= 0],
        "fillers": sum((batch.sample_ids < 0).sum().item() for batch in micro_batches),
        "tp_rank": run.parallel.tp_rank,
        "dp_rank": run.parallel.dp_rank,
    }


# ------------------------------------------------------------------------------------------------- the reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dense(model) -> dict[str, dict[str, Any]]:
    """By reduction: metrics and gradients; and the log-probabilities of each conversation's labels."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    samples = Conversations().samples
    results: dict[str, dict[str, Any]] = {}
    for reduction in ("token_mean", "sequence_mean"):
        reference.zero_grad()
        cross_entropy = squared = entropy = torch.zeros((), dtype=torch.float64)
        mask_sums = [math.fsum(torch.tensor(sample.loss_mask).tolist()) for sample in samples]
        logprobs = []
        for sample, mask_sum in zip(samples, mask_sums, strict=True):
            logits = reference(input_ids=torch.tensor([sample.input_ids])).logits[0]
            denominators = logits.exp().sum(-1).log()
            chosen = logits[range(len(sample)), sample.labels] - denominators
            logprobs.append(chosen.detach())
            for position, weight in enumerate(torch.tensor(sample.loss_mask).tolist()):
                if weight == 0:
                    continue
                probabilities = logits[position].detach().softmax(-1)
                entropy = entropy - weight * (probabilities * probabilities.log()).sum()
                share = weight / sum(mask_sums)
                if reduction == "sequence_mean":
                    share = weight / mask_sum / sum(total > 0 for total in mask_sums)
                cross_entropy = cross_entropy - share * chosen[position]
                squared = squared + share * denominators[position] ** 2
        total = cross_entropy + Z_WEIGHT * squared
        total.backward()
        metrics = {
            "lm_loss": cross_entropy.item(),
            "z_loss": squared.item(),
            "loss": total.item(),
            "entropy": entropy.item() / sum(mask_sums),
            "num_tokens": sum(weight != 0 for sample in samples for weight in sample.loss_mask),
            "num_input_tokens": sum(LENGTHS),
        }
        gradients = {name: parameter.grad.clone() for name, parameter in reference.named_parameters()}
        results[reduction] = {"metrics": metrics, "gradients": gradients, "logprobs": logprobs}
    return results


def relative_norm(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def check(results: list[dict[str, Any]], expected: dict[str, Any], model) -> None:
    for result in results:
        assert result["metrics"] == results[0]["metrics"], "metrics differ between ranks"
        for name, value in expected["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-6), name
        assert len(result["outputs"]) == len(result["sample_ids"])
        for sample_id, output in zip(result["sample_ids"], result["outputs"], strict=True):
            sample = Conversations()[sample_id]
            for value in output.values():
                assert value.shape == (len(sample),) and value.dtype == torch.float32
            assert output["loss_mask"].tolist() == torch.tensor(sample.loss_mask).tolist()
            reference = expected["logprobs"][sample_id].float()
            torch.testing.assert_close(output["logprobs"], reference, rtol=1e-4, atol=1e-4)
    by_replica = {result["dp_rank"]: result["sample_ids"] for result in results}
    assert sorted(i for ids in by_replica.values() for i in ids) == list(range(len(LENGTHS)))
    gradients = assemble(results, "gradients", model)
    assert gradients.keys() == expected["gradients"].keys()
    errors = {name: relative_norm(gradients[name], value) for name, value in expected["gradients"].items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 1e-5, f"the gradient of {worst} is off by {errors[worst]:.1e}"


# -------------------------------------------------------------------------------------------------- every layout


def config_of(directory, layout: str, micro_batch_size: int = 1, reduction: str = "token_mean", /, **sections: Any):
    world_size, parallel = LAYOUTS[layout]
    training = {"loss_reduction": reduction, "global_batch_size": len(LENGTHS)}
    config = make_config(
        directory,
        micro_batch_size,
        parallel=parallel,
        training=training,
        losses=LOSSES,
        data={"packing": True},
        logging={"token_metrics": True},
        **sections,
    )
    return world_size, config


def run_step(config) -> dict[str, Any]:
    run = Run(config)
    return outcome(run, next_step(run))


@pytest.mark.parametrize(("layout", "micro_batch_size", "reduction"), CASES)
def test_packed_rows_give_the_dense_result(
    ranks, model, dense, layout: str, micro_batch_size: int, reduction: str
) -> None:
    world_size, config = config_of(model, layout, micro_batch_size, reduction)
    check(ranks.run(world_size, run_step, config), dense[reduction], model)


def run_implementations(config) -> list[dict[str, Any]]:
    """One step with its gate open, closed, and on rows padded with another id; then without gradients."""
    run = Run(config)
    batches = next_step(run)
    results = [outcome(run, batches), outcome(run, batches, return_per_token_outputs=False)]
    results.append(outcome(run, next_step(run, pad_id=VOCAB_SIZE - 1)))
    results.append(outcome(run, batches, forward_only=True))
    return results


@pytest.mark.parametrize("layout", ["one process", "TP2 CP2 SP", "PP2 CP2"])
def test_neither_the_gate_nor_pad_ids_change_anything(ranks, model, dense, layout: str) -> None:
    world_size, config = config_of(model, layout, logits={"implementation": "materialized"})
    answers = ranks.run(world_size, run_implementations, config)
    check([answer[0] for answer in answers], dense["token_mean"], model)
    for opened, closed, repadded, evaluated in answers:
        assert closed["outputs"] == [{} for _ in opened["outputs"]]
        assert opened["metrics"] == closed["metrics"] == repadded["metrics"]
        assert evaluated["metrics"] == pytest.approx(opened["metrics"], rel=1e-6)
        assert not any(gradient.any() for gradient in evaluated["gradients"].values())
        for name, gradient in opened["gradients"].items():
            assert torch.equal(gradient, closed["gradients"][name]), f"the gate changed the gradient of {name}"
            assert torch.equal(gradient, repadded["gradients"][name]), f"padding changed the gradient of {name}"
        for one, other, third in zip(opened["outputs"], repadded["outputs"], evaluated["outputs"], strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name])
                torch.testing.assert_close(value, third[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=["full", "selective"],
)
def test_recomputation_knows_the_boundaries(ranks, model, dense, recompute: dict[str, Any]) -> None:
    world_size, config = config_of(model, "CP2", model=recompute)
    check(ranks.run(world_size, run_step, config), dense["token_mean"], model)


# ------------------------------------------------------------------------------------------------------- fillers


def run_few(config) -> dict[str, Any]:
    """A step of three conversations; a filler is added to what the loader gave."""
    run = Run(config)
    loader = TrainLoader(
        Conversations(),
        global_batch_size=3,
        micro_batch_size=1,
        dp_rank=run.parallel.dp_rank,
        dp_size=run.parallel.dp_size,
        seed=0,
        shuffle=False,
        pad_multiple=config.sequence_multiple,
        pad_to="seq_length",
        seq_length=SEQ_LENGTH,
        pad_id=0,
        packing=True,
        packing_multiple=config.packing_multiple,
    )
    batches = loader.next_step()
    filler = replace(
        batches[0],
        loss_mask=torch.zeros(1, SEQ_LENGTH),
        lengths=torch.zeros(1, dtype=torch.int64),
        sample_ids=torch.tensor([-1]),
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
    )
    return outcome(run, [filler, *batches, filler])


def test_ranks_without_a_conversation_take_part(ranks, model, dense) -> None:
    config = make_config(model, 1, data={"packing": True})
    results = ranks.run(4, run_few, config)
    assert [result["sample_ids"] for result in results] == [[0, 1], [2], [], []]
    assert [result["fillers"] for result in results] == [2, 2, 3, 3]
    samples = Conversations().samples[:3]
    masks = [torch.tensor(sample.loss_mask, dtype=torch.float64) for sample in samples]
    logprobs = dense["token_mean"]["logprobs"]
    loss = -sum((mask @ logprobs[i]).item() for i, mask in enumerate(masks)) / sum(mask.sum().item() for mask in masks)
    (alone,) = ranks.run(1, run_few, config)
    for result in (*results, alone):
        assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-6)
        for name, gradient in alone["gradients"].items():
            assert relative_norm(result["gradients"][name], gradient.double()) < 1e-5, name


# ----------------------------------------------------------------------------------------------------- positions


def rotated_queries(config) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each conversation: the first layer's queries in a packed row, and alone."""
    from megatron_ext.data import collate

    run = Run(config)
    queries: list[torch.Tensor] = []
    attention = next(module for module in run.chunks[0].modules() if type(module).__name__ == "TorchCoreAttention")
    attention.register_forward_pre_hook(lambda _module, arguments: queries.append(arguments[0].detach().clone()))
    pairs = []
    for batch in next_step(run):
        run.wrapper.forward([batch], return_per_token_outputs=False)
        packed = queries.pop()
        for sample_id, (_, span) in zip(batch.sample_ids.tolist(), batch.spans(), strict=True):
            sample = Conversations()[sample_id]
            alone = collate([sample], [sample_id], padded_length=SEQ_LENGTH, pad_id=0)
            run.wrapper.forward([alone], return_per_token_outputs=False)
            pairs.append((packed[span], queries.pop()[: len(sample), 0]))
    return pairs


def test_rotary_positions_restart_with_each_conversation(ranks, model) -> None:
    """Attention would not show it: it depends on differences of positions."""
    world_size, config = config_of(model, "one process")
    (pairs,) = ranks.run(world_size, rotated_queries, config)
    assert len(pairs) == len(LENGTHS)
    for packed, alone in pairs:
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------------- what is refused


def bounds(*values: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.tensor(values, dtype=torch.int32)}


IMPOSSIBLE: list[tuple[dict[str, torch.Tensor], str]] = [
    (bounds(4, 8, 16, 32), r"micro-batch 1: cu_seqlens \[4, 8, 16, 32\] does not start at 0"),
    (bounds(0, 16, 8, 32), r"cu_seqlens \[0, 16, 8, 32\] does not ascend"),
    (bounds(0, 8, 8, 32), "does not ascend"),
    (bounds(0, 8, 16, 36), "ends behind the row of 32 positions"),
    (bounds(0, 8, 32), "bounds 2 sequences, but lengths has 3 entries"),
    (bounds(0, 8, 16, 24, 32), "bounds 4 sequences, but lengths has 3 entries"),
    (bounds(0, 4, 16, 32), "gives sequence 0 4 positions, but its length is 7"),
    (bounds(0, 10, 18, 32), "gives sequence 0 10 positions, not a multiple of 4, as context parallelism needs"),
    (bounds(0), "is not a list of integers with a start for each sequence"),
    ({"cu_seqlens": torch.tensor([0.0, 8, 16, 32])}, "is not a list of integers"),
    ({"sample_ids": torch.tensor([0, 1])}, "bounds 3 sequences, but sample_ids has 2 entries"),
    ({"lengths": torch.tensor([7, -1, 3])}, "its length is -1"),
    ({"input_ids": torch.zeros(2, 32, dtype=torch.int64)}, "input_ids has 2 rows; put all sequences into one row"),
]


def refusals(config, changes: list[dict[str, torch.Tensor]]) -> list[str]:
    run = Run(config)
    good = MicroBatch(
        input_ids=torch.zeros(1, SEQ_LENGTH, dtype=torch.int64),
        labels=torch.zeros(1, SEQ_LENGTH, dtype=torch.int64),
        position_ids=torch.zeros(1, SEQ_LENGTH, dtype=torch.int64),
        loss_mask=torch.zeros(1, SEQ_LENGTH),
        lengths=torch.tensor([7, 8, 3]),
        sample_ids=torch.tensor([0, 1, 2]),
        cu_seqlens=torch.tensor([0, 8, 16, 20], dtype=torch.int32),
    )
    run.wrapper.forward([good])
    messages = []
    for change in changes:
        rows = len(change.get("input_ids", good.input_ids))
        batches = [replace(good, input_ids=good.input_ids.expand(rows, -1)), replace(good, **change)]
        with pytest.raises(ValueError) as error:
            run.wrapper.forward(batches if rows == 1 else batches[1:])
        messages.append(str(error.value))
    mask, labels = good.loss_mask.clone(), good.labels.clone()
    mask[0, 9], labels[0, 9] = 1.0, VOCAB_SIZE
    with pytest.raises(ValueError) as error:
        run.wrapper.forward([good, replace(good, loss_mask=mask, labels=labels)])
    return [*messages, str(error.value)]


def test_impossible_boundaries_are_refused(ranks, model) -> None:
    _, config = config_of(model, "CP2")
    for messages in ranks.run(2, refusals, config, [change for change, _ in IMPOSSIBLE]):
        *messages, outside = messages
        for message, (_, expected) in zip(messages, IMPOSSIBLE, strict=True):
            assert re.search(expected, message), message
        assert "micro-batch 1, row 0 (sample 1): labels holds 250" in outside


# ---------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def train_toy(ranks, toy: ToyRun):
    """Train six steps of 7 of the 24 conversations, so that no step ends with an epoch; returns the log folder."""
    from test_training_runs import train

    def start(layout: str, name: str, **changes: Any):
        world_size, parallel = LAYOUTS[layout]
        settings = {key: str(value).lower() for key, value in parallel.items()}
        settings |= {"global_batch_size": 7, "micro_batch_size": 1, "lr_decay_iters": 6}
        log = toy.folder / name.replace(" ", "_")
        ranks.run(world_size, train, toy.flags(**(settings | {"log_dir": log} | changes)))
        return log

    return start


@pytest.fixture(scope="module")
def unpacked(train_toy):
    return train_toy("one process", "unpacked", eval_before_training="true")


NAMES = ("loss", "grad_norm", "num_tokens", "num_input_tokens", "consumed_samples")


@pytest.mark.parametrize("layout", ["one process", "PP2 VPP2", "CP2", "DP2"])
def test_runs_are_those_of_unpacked_rows_also_when_resumed(train_toy, toy: ToyRun, unpacked, layout: str) -> None:
    """Resumed in the middle of an epoch."""
    packing = {"packing": "true", "micro_batch_size": 2}
    save = toy.folder / f"saved {layout}".replace(" ", "_")
    before = train_toy(layout, f"before {layout}", **packing, train_iters=3, save=save, eval_before_training="true")
    after = train_toy(layout, f"after {layout}", **packing, load=save)
    records = read_metrics(before) + read_metrics(after)
    expected = read_metrics(unpacked)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5, 6]
    for record, reference in zip(records, expected, strict=True):
        assert {name: record[name] for name in NAMES} == pytest.approx(
            {name: reference[name] for name in NAMES}, rel=1e-4
        )
    for log, which in ((before, 0), (after, -1)):
        found, reference = read_metrics(log, "validation")[which], read_metrics(unpacked, "validation")[which]
        for name in ("loss", "num_tokens", "num_input_tokens"):
            assert found[name] == pytest.approx(reference[name], rel=1e-6 if which == 0 else 1e-4)


@pytest.mark.parametrize("layout", ["PP2", "CP2"])
def test_a_teacher_reads_packed_rows_too(train_toy, toy: ToyRun, layout: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    teacher = toy.folder / "teacher"
    if not teacher.exists():
        shutil.copytree(toy.model, teacher)
        torch.manual_seed(7)
        LlamaForCausalLM(LlamaConfig.from_pretrained(teacher)).save_pretrained(teacher)
    distil = {"teacher_path": teacher, "losses.kl": "{type: forward_kl, weight: 0.5}", "train_iters": 2}
    rows = train_toy("one process", f"distil rows {layout}", **distil)
    packed = train_toy(layout, f"distil packed {layout}", **distil, packing="true", micro_batch_size=2)
    for found, expected in zip(read_metrics(packed), read_metrics(rows), strict=True):
        for name in ("kl", "loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
