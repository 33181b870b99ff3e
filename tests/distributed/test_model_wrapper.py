"""forward_backward_mini_batch: accumulation, masks, the gate and evaluation, on several layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_model import SEQ_LENGTH, Run, assemble, make_batch, make_config, split_batch, write_tiny_llama

LAYOUTS = {
    "one process": (1, {}, {}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, {}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {}),
    "CP2": (2, {"context_parallel_size": 2}, {}),
    "DP2": (2, {}, {}),
    "DP2 distributed optimizer": (2, {}, {"use_distributed_optimizer": True}),
    "DP2 overlapped": (
        2,
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"use_distributed_optimizer": True},
    ),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {}),
    "PP2 CP2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}, {}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def config_of(directory, layout: str, micro_batch_size: int = 2, /, **sections: Any):
    world_size, parallel, optimizer = LAYOUTS[layout]
    return world_size, make_config(directory, micro_batch_size, parallel=parallel, optimizer=optimizer, **sections)


def outcome(run: Run, result: Any) -> dict[str, Any]:
    return {
        "metrics": dict(result.metrics),
        "outputs": result.loss_fn_outputs,
        "gradients": run.gradients(),
        "tp_rank": run.parallel.tp_rank,
        "dp_rank": run.parallel.dp_rank,
        "pp_rank": run.parallel.pp_rank,
    }


# ---------------------------------------------------------------------------------------------- accumulation


def accumulate(config, batches: list, zero_with_megatron: bool) -> list[dict[str, Any]]:
    """Gradients of one call with everything, and of one call per batch."""
    run = Run(config)
    together = [micro_batch for batch in batches for micro_batch in run.split(batch)]
    results = []
    for calls in ([together], [run.split(batch) for batch in batches]):
        if zero_with_megatron:  # callers may know Megatron's way only
            for chunk in run.chunks:
                chunk.zero_grad_buffer()
        else:
            run.wrapper.zero_grad()
        for micro_batches in calls:
            result = run.wrapper.forward_backward_mini_batch(micro_batches, return_per_token_outputs=False)
        results.append(outcome(run, result))
    return results


@layouts
def test_several_calls_accumulate_like_one(ranks, model, layout: str) -> None:
    world_size, config = config_of(model, layout)
    empty = make_batch(4)  # leaves gradients of zero, and is first
    empty["loss_mask"] = torch.zeros_like(empty["loss_mask"])
    answers = ranks.run(world_size, accumulate, config, [empty, make_batch(1), make_batch(2), make_batch(3)], False)
    check_accumulation(answers, model)


def test_gradients_zeroed_by_the_caller_are_not_counted(ranks, model) -> None:
    world_size, config = config_of(model, "DP2")
    check_accumulation(ranks.run(world_size, accumulate, config, [make_batch(1), make_batch(2)], True), model)


def check_accumulation(answers: list, model) -> None:
    one_call, several_calls = (assemble([answer[i] for answer in answers], "gradients", model) for i in range(2))
    for name, expected in one_call.items():
        error = (several_calls[name] - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name} is off by {error:.1e}"


# ------------------------------------------------------------------------------------------------------ masks


def masked_steps(config, masks: list[torch.Tensor]) -> list[dict[str, Any]]:
    run = Run(config)
    results = []
    for mask in masks:
        run.wrapper.zero_grad()
        batch = make_batch(1)
        batch["loss_mask"] = batch["loss_mask"] * mask
        result = run.wrapper.forward_backward_mini_batch(run.split(batch))
        results.append(outcome(run, result))
        run.optimizer.step()
    return results


@layouts
def test_batches_without_a_trained_token(ranks, model, layout: str) -> None:
    world_size, config = config_of(model, layout)
    nothing = torch.zeros(8, 1)
    half = torch.ones(8, 1)
    half[4:] = 0.0  # all of DP rank 1
    for answer in ranks.run(world_size, masked_steps, config, [nothing, half, nothing]):
        empty, some, empty_again = answer
        for result in (empty, empty_again):
            assert result["metrics"]["loss"] == 0.0 and result["metrics"]["num_tokens"] == 0.0
            assert all(not gradient.any() for gradient in result["gradients"].values())
        assert some["metrics"]["loss"] > 0.0 and some["metrics"]["num_tokens"] > 0.0
        assert all(torch.isfinite(gradient).all() for gradient in some["gradients"].values())


def nan_at_masked(config) -> dict[str, Any]:
    """Logits that overflow at a masked position: its label's loss is not a number."""
    run = Run(config)
    run.wrapper.zero_grad()
    batch = make_batch(1)
    head = run.wrapper.losses

    class Poisoned:
        names, weights, token_metrics, shard = head.names, head.weights, head.token_metrics, head.shard
        reported_per_token = head.reported_per_token

        def __call__(self, **arguments: Any):
            losses = head(**arguments)
            poison = torch.zeros_like(losses.values)
            poison[:, 0, 0] = float("nan")
            return losses._replace(values=losses.values + poison)

    run.wrapper.losses = Poisoned()
    batch["loss_mask"][::2, 0] = 0.0
    return outcome(run, run.wrapper.forward_backward_mini_batch(run.split(batch), return_per_token_outputs=False))


def test_nan_at_a_masked_position_stays_there(ranks, model) -> None:
    _, config = config_of(model, "one process")
    (result,) = ranks.run(1, nan_at_masked, config)
    assert result["metrics"]["loss"] == result["metrics"]["loss"], "the loss is NaN"
    assert all(torch.isfinite(gradient).all() for gradient in result["gradients"].values())


# -------------------------------------------------------------------------------------------------- the gate


def run_both_gates(config, batch: dict, forward_only: bool) -> list[dict[str, Any]]:
    run = Run(config)
    micro_batches = run.split(batch)
    # the last row of every rank only tops up
    last = micro_batches[-1]
    sample_ids = last.sample_ids.clone()
    sample_ids[-1] = -1
    mask, lengths = last.loss_mask.clone(), last.lengths.clone()
    mask[-1], lengths[-1] = 0.0, 0
    micro_batches[-1] = replace(last, sample_ids=sample_ids, loss_mask=mask, lengths=lengths)
    results = []
    for is_open in (True, False):
        run.wrapper.zero_grad()
        result = run.wrapper.forward_backward_mini_batch(
            micro_batches, forward_only=forward_only, return_per_token_outputs=is_open
        )
        results.append(outcome(run, result))
    return results


@pytest.fixture(scope="module")
def dense_logprobs(model) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    batch = make_batch(1)
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        logits = reference(input_ids=batch["input_ids"]).logits
    return logits.log_softmax(-1).gather(2, batch["labels"][..., None]).squeeze(2)


@layouts
@pytest.mark.parametrize("forward_only", [False, True], ids=["train", "forward_only"])
def test_gate(ranks, model, dense_logprobs: torch.Tensor, layout: str, forward_only: bool) -> None:
    world_size, config = config_of(model, layout)
    batch = make_batch(1)
    answers = ranks.run(world_size, run_both_gates, config, batch, forward_only)
    num_replicas = 1 + max(answer[0]["dp_rank"] for answer in answers)
    per_rank = 8 // num_replicas
    rows_of_rank = {r: range(r * per_rank, (r + 1) * per_rank - 1) for r in range(num_replicas)}

    for opened, closed in answers:
        assert opened["metrics"] == closed["metrics"], "the gate changed a metric"
        for name, gradient in opened["gradients"].items():
            assert torch.equal(gradient, closed["gradients"][name]), f"the gate changed the gradient of {name}"
            assert not forward_only or not gradient.any(), "evaluation left a gradient"
        rows = rows_of_rank[opened["dp_rank"]]
        assert closed["outputs"] == [{} for _ in rows]
        assert len(opened["outputs"]) == len(rows)
        for row, output in zip(rows, opened["outputs"], strict=True):
            length = int(batch["lengths"][row])
            assert output.keys() == {"logprobs", "elementwise_loss", "loss_mask"}
            for value in output.values():
                assert value.shape == (length,) and value.dtype == torch.float32 and value.device.type == "cpu"
            expected = dense_logprobs[row, :length].float()
            torch.testing.assert_close(output["logprobs"], expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(output["elementwise_loss"], -expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(output["loss_mask"], batch["loss_mask"][row, :length])


# ------------------------------------------------------------------------------------------------ evaluation


def evaluate_between_steps(config, evaluate: bool) -> dict[str, Any]:
    run = Run(config)
    run.step(make_batch(1))
    modes = None
    if evaluate:
        frozen = next(iter(run.chunks[0].modules()))
        frozen.training = False  # a mode of its own, to be found again
        before = [module.training for chunk in run.chunks for module in chunk.modules()]
        run.wrapper.forward(run.split(make_batch(2)))
        modes = before == [module.training for chunk in run.chunks for module in chunk.modules()]
        frozen.training = True
    return {"loss": run.step(make_batch(3))["loss"], "modes": modes, "random": torch.rand(2)}


def test_evaluation_leaves_training_as_it_was(ranks, model) -> None:
    dropout = {"model": {"attention_dropout": 0.1, "hidden_dropout": 0.1}}
    world_size, config = config_of(model, "PP2", **dropout)
    disturbed = ranks.run(world_size, evaluate_between_steps, config, True)
    undisturbed = ranks.run(world_size, evaluate_between_steps, config, False)
    for with_evaluation, without in zip(disturbed, undisturbed, strict=True):
        assert with_evaluation["loss"] == without["loss"]
        assert torch.equal(with_evaluation["random"], without["random"])
        assert with_evaluation["modes"]


def dropout_losses(config) -> tuple[float, float]:
    run = Run(config)
    batch = run.split(make_batch(1))
    return run.wrapper.forward(batch).metrics["loss"], run.wrapper.forward(batch).metrics["loss"]


def test_evaluation_has_no_dropout(ranks, model) -> None:
    _, config = config_of(model, "one process", model={"attention_dropout": 0.5, "hidden_dropout": 0.5})
    ((first, second),) = ranks.run(1, dropout_losses, config)
    assert first == second


# ------------------------------------------------------------------------------------------------------ losses


def weighted_losses(config) -> dict[str, Any]:
    run = Run(config)
    run.wrapper.zero_grad()
    return outcome(run, run.wrapper.forward_backward_mini_batch(run.split(make_batch(1))))


@pytest.mark.parametrize("layout", ["one process", "PP2", "DP2"])
def test_weights_scale_the_total_and_0_only_logs(ranks, model, layout: str) -> None:
    def run(**losses: float):
        named = {name: {"type": "cross_entropy", "weight": weight} for name, weight in losses.items()}
        world_size, config = config_of(model, layout, losses=named)
        answers = ranks.run(world_size, weighted_losses, config)
        return answers[0]["metrics"], assemble(answers, "gradients", model)

    plain_metrics, plain = run(lm_loss=1.0)
    metrics, gradients = run(lm_loss=0.5, again=0.25, logged=0.0)
    assert metrics["lm_loss"] == metrics["again"] == metrics["logged"] == plain_metrics["lm_loss"]
    assert metrics["loss"] == pytest.approx(0.75 * plain_metrics["loss"])
    for name, gradient in plain.items():
        assert (gradients[name] - 0.75 * gradient).norm() < 1e-6 * gradient.norm()
    metrics, gradients = run(logged=0.0)
    # without a gradient the softmax is measured in another way
    assert metrics["logged"] == pytest.approx(plain_metrics["lm_loss"], rel=1e-7) and metrics["loss"] == 0.0
    assert all(not gradient.any() for gradient in gradients.values())


def bad_batches(config) -> list[str]:
    run = Run(config)
    good = run.split(make_batch(1))
    short = replace(good[0], **{name: getattr(good[0], name)[:, :16] for name in ("input_ids", "labels", "loss_mask")})
    odd = split_batch({k: v[:, :-1] if v.dim() == 2 else v for k, v in make_batch(1).items()}, 0, 1, 2)
    packed = [replace(good[0], cu_seqlens=torch.tensor([0, SEQ_LENGTH], dtype=torch.int32))]
    messages = []
    for batches in ([], [good[0], short], odd, packed):
        with pytest.raises(ValueError) as error:
            run.wrapper.forward_backward_mini_batch(batches)
        messages.append(str(error.value))
    return messages


def test_unusable_batches_are_refused(ranks, model) -> None:
    world_size, config = config_of(model, "CP2")
    for messages in ranks.run(world_size, bad_batches, config):
        reasons = ["is empty", "have shapes", "not divisible by 4", "cu_seqlens"]
        for message, expected in zip(messages, reasons, strict=True):
            assert expected in message
