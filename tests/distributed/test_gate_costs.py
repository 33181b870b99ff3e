"""The gate of the per-token outputs: what it costs open and closed, by counting, and that it changes no number."""

import gc
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from test_model_wrapper import config_of, run_both_gates
from tiny_model import SEQ_LENGTH, VOCAB_SIZE, Run, make_batch, write_tiny_llama

from toy_run import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from traffic import POINT_TO_POINT, Traffic

COUNTED_LAYOUTS = ["one process", "TP2 SP", "PP2", "PP2 VPP2", "CP2", "DP2", "TP2 PP2", "PP2 CP2"]
forward_only_or_not = pytest.mark.parametrize("forward_only", [False, True], ids=["train", "forward_only"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


# ------------------------------------------------------------------------------------------------- counting


def count_traffic(config, forward_only: bool) -> list[dict[str, Any]]:
    """Of a step with the gate closed, of one with it open, and of a closed one with half the micro-batches.

    As on a device: the loss head must not look at values that are still being computed.
    """
    from megatron_ext.losses import looking
    from megatron_ext.platform import attention

    with (
        mock.patch.object(attention, "causal_lower_right", plain_mask),
        mock.patch.object(looking, "is_free", lambda _: False),
    ):
        return _count_traffic(Run(config), forward_only)


def plain_mask(queries: int, keys: int) -> torch.Tensor:
    """In place of a kind of tensor that cannot be made while operations are watched."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def _count_traffic(run: Run, forward_only: bool) -> list[dict[str, Any]]:
    whole = run.split(make_batch(1))
    results = []
    for micro_batches, is_open in ((whole, False), (whole, False), (whole, True), (whole[: len(whole) // 2], False)):
        run.wrapper.zero_grad()
        with Traffic() as traffic:
            run.wrapper.forward_backward_mini_batch(
                micro_batches, forward_only=forward_only, return_per_token_outputs=is_open
            )
        counts = {name: n for name, n in traffic.collectives.items() if name not in POINT_TO_POINT}
        results.append({"collectives": counts, "reads": dict(traffic.reads), "bytes": traffic.num_bytes})
    parallel = run.parallel
    place = {"is_last": parallel.is_last_stage, "tp": parallel.tp_size, "pp": parallel.pp_size, "cp": parallel.cp_size}
    return [*results[1:], place]  # the first call of all also sets things up


def differences(more: dict[str, int], fewer: dict[str, int]) -> dict[str, int]:
    names = more.keys() | fewer.keys()
    found = {name: more.get(name, 0) - fewer.get(name, 0) for name in names}
    return {name: difference for name, difference in found.items() if difference}


@forward_only_or_not
@pytest.mark.parametrize("layout", COUNTED_LAYOUTS)
def test_the_gate_by_count(ranks, model, layout: str, forward_only: bool) -> None:
    world_size, config = config_of(model, layout, 1)
    for closed, opened, half, place in ranks.run(world_size, count_traffic, config, forward_only):
        more = differences(opened["collectives"], closed["collectives"])
        if place["tp"] > 1:  # the values of untrained tokens take part in the softmax over the vocabulary
            more = {name: n for name, n in more.items() if name not in ("allreduce_", "_allgather_base_")} | (
                {"_allgather_base_": 1} if place["cp"] > 1 and place["is_last"] else {}
            )
        expected = {}
        if place["pp"] > 1:
            expected["broadcast_"] = 1
        if place["cp"] > 1 and place["is_last"]:
            expected["_allgather_base_"] = 1
        assert more == expected, "one broadcast over the pipeline and one gathering over the context, a step"
        reads = differences(opened["reads"], closed["reads"])
        del reads["tolist"]  # of lengths, on the host
        assert reads == {"cpu": 1}, "one copy to the host, a step"
        assert closed["reads"].keys().isdisjoint({"cpu", "numpy"})
        if place["tp"] == place["cp"] == 1:
            assert closed["collectives"] == half["collectives"]


def test_a_closed_gate_communicates_nothing_but_metrics(ranks, model) -> None:
    """Forward only and without TP, every collective is known: token counts, sums of losses, nothing else."""
    expected = {
        "one process": [{}],
        "DP2": [{"allreduce_": 2}] * 2,
        "PP2": [{"broadcast_": 1}] * 2,
        "CP2": [{"allreduce_": 1}] * 2,
    }
    for layout, counts in expected.items():
        world_size, config = config_of(model, layout, 1)
        answers = ranks.run(world_size, count_traffic, config, True)
        found = [closed["collectives"] for closed, *_ in answers]
        if layout == "CP2":  # attention gathers keys and values, in every layer
            found = [{name: n for name, n in one.items() if name == "allreduce_"} for one in found]
        assert found == counts, layout


def kept_tensors(config, is_open: bool) -> list[int]:
    """How many tensors with a number for each token live when each micro-batch's loss has been computed."""
    run = Run(config)
    micro_batches = run.split(make_batch(1))
    tokens = micro_batches[0].input_ids.numel() // run.parallel.cp_size
    counts = []
    loss_func = run.wrapper._loss_func

    def counting(*arguments: Any) -> Any:
        outcome = loss_func(*arguments)
        gc.collect()
        live = [value for value in gc.get_objects() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        counts.append(sum(value.numel() % tokens == 0 and 0 < value.numel() <= 8 * tokens for value in live))
        return outcome

    run.wrapper._loss_func = counting
    run.wrapper.forward(micro_batches, return_per_token_outputs=is_open)
    return counts


@pytest.mark.parametrize("layout", ["one process", "PP2", "CP2"])
def test_a_closed_gate_keeps_no_tensor_per_token(ranks, model, layout: str) -> None:
    world_size, config = config_of(model, layout, 2)
    closed, opened = (ranks.run(world_size, kept_tensors, config, is_open)[-1] for is_open in (False, True))
    assert len(closed) == 4
    assert len(set(closed)) == 1, f"with the gate closed the number of tensors grows: {closed}"
    assert [count - opened[0] for count in opened] == [0, 1, 2, 3], "open: one tensor for each micro-batch"


# ------------------------------------------------------------------------------------------ the same numbers

WEIGHTS = {"lm_loss": 0.7, "smooth": 0.2, "z": 1e-3, "logged": 0.0}
LOSSES = {
    "lm_loss": {"type": "cross_entropy", "weight": WEIGHTS["lm_loss"]},
    "smooth": {"type": "cross_entropy", "weight": WEIGHTS["smooth"], "label_smoothing": 0.1},
    "z": {"type": "z_loss", "weight": WEIGHTS["z"]},
    "logged": {"type": "cross_entropy", "weight": WEIGHTS["logged"]},
}


@pytest.fixture(scope="module")
def dense(model) -> dict[str, torch.Tensor]:
    """Each loss of each token, from transformers' logits in float64."""
    from transformers import LlamaForCausalLM

    batch = make_batch(1)
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = reference(input_ids=batch["input_ids"]).logits  # [rows, s, vocabulary]
    every = logits.log_softmax(-1)
    logprobs = every.gather(2, batch["labels"][..., None]).squeeze(2)
    return {
        "logprobs": logprobs,
        "lm_loss": -logprobs,
        "smooth": -0.9 * logprobs - 0.1 * every.sum(-1) / VOCAB_SIZE,
        "z": logits.logsumexp(-1) ** 2,
        "logged": -logprobs,
    }


@forward_only_or_not
@pytest.mark.parametrize("implementation", ["chunked", "materialized"])
@pytest.mark.parametrize("layout", ["one process", "TP2 SP", "PP2", "CP2", "DP2"])
def test_the_gate_changes_no_number(
    ranks, model, dense: dict[str, torch.Tensor], layout: str, implementation: str, forward_only: bool
) -> None:
    """As test_gate, with several losses, token metrics and both ways to make logits."""
    world_size, config = config_of(
        model, layout, losses=LOSSES, logits={"implementation": implementation}, logging={"token_metrics": True}
    )
    answers = ranks.run(world_size, run_both_gates, config, make_batch(1), forward_only)
    total = sum(weight * dense[name] for name, weight in WEIGHTS.items())
    expected = {"logprobs": dense["logprobs"], "elementwise_loss": total, "z": dense["z"]}
    per_rank = 8 // (1 + max(answer[0]["dp_rank"] for answer in answers))
    for opened, closed in answers:
        assert opened["metrics"] == closed["metrics"], "the gate changed a metric"
        assert {"token_accuracy", "entropy", *LOSSES} <= opened["metrics"].keys()
        for name, gradient in opened["gradients"].items():
            assert torch.equal(gradient, closed["gradients"][name]), f"the gate changed the gradient of {name}"
        assert closed["outputs"] == [{}] * (per_rank - 1)  # the last row is a filler
        first = opened["dp_rank"] * per_rank
        for row, output in enumerate(opened["outputs"], start=first):
            length = len(output["loss_mask"])
            assert output.keys() == {"loss_mask", *expected}
            assert length == int(make_batch(1)["lengths"][row]) <= SEQ_LENGTH
            for name, values in expected.items():
                torch.testing.assert_close(output[name], values[row, :length].float(), rtol=1e-4, atol=1e-4)
