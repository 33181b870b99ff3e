"""The loss head inside Megatron-Core: where its weight gradient goes, hooks, loss scaling, reductions, metrics."""

from typing import Any

import pytest
import torch
from tiny_model import Run, assemble, make_batch, make_config, write_tiny_llama

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = {
    "one process": (1, {}, {}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, {}),
    "DP2": (2, {}, {}),
    "DP2 overlapped": (2, OVERLAPPED, {"use_distributed_optimizer": True}),
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def config_of(directory, layout: str, micro_batch_size: int = 2, /, **sections: Any):
    world_size, parallel, optimizer = LAYOUTS[layout]
    return world_size, make_config(directory, micro_batch_size, parallel=parallel, optimizer=optimizer, **sections)


def one_step(config, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    run = Run(config)
    run.wrapper.zero_grad()
    result = run.wrapper.forward_backward_mini_batch(run.split(batch), return_per_token_outputs=False)
    parallel = run.parallel
    return {
        "metrics": dict(result.metrics),
        "gradients": run.gradients(),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
    }


# ------------------------------------------------------------------------------------------------- main_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_gradients_reach_main_grad_once(ranks, model, layout: str) -> None:
    """Several micro-batches: a gradient that was lost, or added twice, is off by far more than bf16's rounding."""
    batch = make_batch(1)
    world_size, exact_config = config_of(model, "one process")
    (exact,) = ranks.run(1, one_step, exact_config, batch)
    expected = assemble([exact], "gradients", model)
    chunked = {"implementation": "chunked", "chunk_tokens": 5}  # several chunks, so that dW is a sum
    world_size, config = config_of(model, layout, 1, training={"bf16": True}, logits=chunked)

    results = ranks.run(world_size, one_step, config, batch)

    found = assemble(results, "gradients", model)
    assert found.keys() == expected.keys()
    for result in results:
        assert result["metrics"]["loss"] == pytest.approx(exact["metrics"]["loss"], rel=1e-2)
    for name, gradient in expected.items():
        error = ((found[name].float() - gradient).norm() / gradient.norm()).item()
        assert error < 5e-2, f"gradient of {name} is off by {error:.1e}"


def output_layer_gradient(config, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return Run.gradients(_stepped(config, batch))["output_layer.weight"]


def _stepped(config, batch: dict[str, torch.Tensor]) -> Run:
    run = Run(config)
    run.wrapper.zero_grad()
    run.wrapper.forward_backward_mini_batch(run.split(batch), return_per_token_outputs=False)
    return run


def test_bf16_weight_gradient_is_summed_in_fp32(ranks, untied) -> None:
    """Eight micro-batches into main_grad: closer to one micro-batch than sums rounded to bf16 would be."""
    batch = make_batch(1)
    gradients = []
    for micro_batch_size in (8, 1):
        _, config = config_of(untied, "one process", micro_batch_size, training={"bf16": True})
        (gradient,) = ranks.run(1, output_layer_gradient, config, batch)
        gradients.append(gradient)
    together, apart = gradients
    assert together.dtype == torch.float32
    # all eight values of a bf16 sum would be representable in bf16
    assert not torch.equal(apart, apart.bfloat16().float())
    assert (apart - together).norm() / together.norm() < 1e-2


# ----------------------------------------------------------------------------------------------------- hooks


def hook_calls(config) -> int:
    run = Run(config)
    calls = []
    for chunk in run.chunks:
        for name, module in chunk.named_modules():
            if name.endswith("output_layer"):
                module.register_forward_pre_hook(lambda *_: calls.append(1))
    run.step(make_batch(1))
    return len(calls)


@pytest.mark.parametrize("implementation", ["chunked", "materialized"])
def test_the_output_layers_hooks_run(ranks, untied, implementation: str) -> None:
    """DDP waits in them for parameters that are still being gathered (overlap_param_gather)."""
    _, config = config_of(untied, "one process", logits={"implementation": implementation})
    assert ranks.run(1, hook_calls, config) == [4]  # micro-batches


# ---------------------------------------------------------------------------------------------- loss scaling


def scaled_gradients(config, scale: float) -> dict[str, Any]:
    run = Run(config)
    run.optimizer.get_loss_scale = lambda: torch.tensor([scale])
    for chunk in run.chunks:
        from megatron.core.utils import get_model_config

        get_model_config(chunk).grad_scale_func = lambda loss: loss * scale
    run.wrapper.zero_grad()
    run.wrapper.forward_backward_mini_batch(run.split(make_batch(1)), return_per_token_outputs=False)
    return {"gradients": run.gradients(), "tp_rank": run.parallel.tp_rank, "pp_rank": run.parallel.pp_rank}


@pytest.mark.parametrize("layout", ["one process", "TP2 SP", "PP2"])
def test_a_loss_scale_scales_every_gradient(ranks, model, layout: str) -> None:
    world_size, config = config_of(model, layout)
    plain = assemble(ranks.run(world_size, scaled_gradients, config, 1.0), "gradients", model)
    scaled = assemble(ranks.run(world_size, scaled_gradients, config, 1024.0), "gradients", model)
    for name, gradient in plain.items():
        assert (scaled[name] - 1024.0 * gradient).norm() < 1e-5 * (1024.0 * gradient).norm(), name


# ----------------------------------------------------------------------------------- reductions and metrics


@pytest.fixture(scope="module")
def dense(untied) -> dict[str, torch.Tensor]:
    """[rows, s] float64 each: what transformers makes of every token."""
    from transformers import LlamaForCausalLM

    batch = make_batch(1)
    reference = LlamaForCausalLM.from_pretrained(untied, dtype=torch.float64)
    with torch.no_grad():
        logits = reference(input_ids=batch["input_ids"]).logits
    log_probabilities = logits.log_softmax(-1)
    return {
        "losses": -log_probabilities.gather(2, batch["labels"][..., None]).squeeze(2),
        "correct": (logits.argmax(-1) == batch["labels"]).double(),
        "entropy": -(log_probabilities.exp() * log_probabilities).sum(-1),
    }


@pytest.mark.parametrize("implementation", ["chunked", "materialized"])
@pytest.mark.parametrize("layout", ["one process", "TP2 SP", "PP2", "DP2"])
def test_token_metrics_are_token_means(ranks, untied, dense, layout: str, implementation: str) -> None:
    batch = make_batch(1)
    # make some labels right
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(untied, dtype=torch.float64)
    with torch.no_grad():
        best = reference(input_ids=batch["input_ids"]).logits.argmax(-1)
    batch["labels"][:, ::3] = best[:, ::3]
    mask = batch["loss_mask"].double()
    accuracy = ((best == batch["labels"]) * mask).sum() / mask.sum()
    entropy = (dense["entropy"] * mask).sum() / mask.sum()
    world_size, config = config_of(
        untied, layout, logging={"token_metrics": True}, logits={"implementation": implementation}
    )
    for result in ranks.run(world_size, one_step, config, batch):
        assert 0.2 < accuracy < 0.8
        assert result["metrics"]["token_accuracy"] == pytest.approx(accuracy.item(), rel=1e-6)
        assert result["metrics"]["entropy"] == pytest.approx(entropy.item(), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_sequence_mean(ranks, untied, dense, layout: str, micro_batch_size: int) -> None:
    batch = make_batch(1)
    mask = batch["loss_mask"].double()
    sums = mask.sum(1)
    has_any = sums > 0
    assert not has_any.all()
    means = (dense["losses"] * mask).sum(1)[has_any] / sums[has_any]
    world_size, config = config_of(untied, layout, micro_batch_size, training={"loss_reduction": "sequence_mean"})
    results = ranks.run(world_size, one_step, config, batch)
    for result in results:
        assert result["metrics"]["loss"] == pytest.approx(means.mean().item(), rel=1e-5)
        assert result["metrics"]["num_tokens"] == (mask != 0).sum().item()
    whole_config = config_of(untied, "one process", 8, training={"loss_reduction": "sequence_mean"})[1]
    expected = assemble(ranks.run(1, one_step, whole_config, batch), "gradients", untied)
    found = assemble(results, "gradients", untied)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 1e-4 * gradient.norm(), name


# ------------------------------------------------------------------------------------------------- bad input


def refused(config, dp_rank: int, name: str, value: float) -> str:
    run = Run(config)
    batches = run.split(make_batch(1))
    if run.parallel.dp_rank == dp_rank:
        mask = batches[1].loss_mask
        row, position = mask.nonzero()[0].tolist()
        getattr(batches[1], name)[row, position] = value
    with pytest.raises(ValueError) as error:
        run.wrapper.forward_backward_mini_batch(batches)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("labels", 250, "labels holds 250; the vocabulary has 250 tokens"),
        ("labels", -100, "labels holds -100; the vocabulary has 250 tokens"),
        ("loss_mask", -0.5, "loss_mask holds -0.5; a weight has to be a finite number of at least 0"),
        ("loss_mask", float("nan"), "loss_mask holds nan; a weight has to be"),
    ],
)
def test_bad_tokens_are_refused_on_every_rank(ranks, untied, name: str, value: float, expected: str) -> None:
    world_size, config = config_of(untied, "DP2")
    first, second = ranks.run(world_size, refused, config, 1, name, value)
    assert first == "micro_batches of another data-parallel rank have impossible labels or masks"
    assert "micro-batch 1, row" in second and expected in second


def ignored_labels(config) -> dict[str, float]:
    run = Run(config)
    batch = make_batch(1)
    batch["labels"][batch["loss_mask"] == 0] = -100
    return run.step(batch)


@pytest.mark.parametrize("implementation", ["chunked", "materialized"])
def test_labels_of_untrained_tokens_may_be_anything(ranks, untied, dense, implementation: str) -> None:
    world_size, config = config_of(untied, "TP2 SP", logits={"implementation": implementation})
    mask = make_batch(1)["loss_mask"].double()
    expected = (dense["losses"] * mask).sum() / mask.sum()
    for metrics in ranks.run(world_size, ignored_labels, config):
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
