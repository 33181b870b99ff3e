"""The flagship promise: same batch, same loss, same gradients, same training, whatever the layout.

The reference is transformers' LlamaForCausalLM in float64, one process, one batch, losses written as a plain sum over
tokens, and torch's AdamW. No layout is compared with another layout of ours.
"""

from pathlib import Path

import pytest
import torch
from tiny_model import LR, assemble, make_batch, make_config, train_on_ranks, write_tiny_llama

LAYOUTS = {
    "one process": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "PP2 uneven": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
    "DP2 distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "DP2 overlapped": (
        2,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "TP2 PP2 SP": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "TP2 CP2 SP": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}),
    "PP2 CP2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    "PP2 DP2": (4, {"pipeline_model_parallel_size": 2}),
}
MICRO_BATCH_SIZES = {"one process": (1, 2, 4), "PP2": (1, 2, 4), "DP2": (1, 2, 4)}
CASES = [
    pytest.param(tied, layout, size, id=f"{'tied' if tied else 'untied'}-{layout}-micro-batch {size}")
    for tied in (False, True)
    for layout in LAYOUTS
    for size in (MICRO_BATCH_SIZES.get(layout, (2,)) if not tied else (2,))
]
BATCHES = [make_batch(seed) for seed in (1, 2, 3)]


def dense_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(batch["lengths"].tolist()):
        for position in range(length):
            weight = batch["loss_mask"][row, position].double()
            if weight:
                log_probabilities = logits[row, position].log_softmax(-1)
                total = total - weight * log_probabilities[batch["labels"][row, position]]
    return total / batch["loss_mask"].double().sum()


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    from transformers import LlamaForCausalLM

    directory = write_tiny_llama(tmp_path_factory.mktemp("model"), tied=request.param)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, gradients = [], None
    for batch in BATCHES:
        optimizer.zero_grad()
        loss = dense_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        if gradients is None:
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {
        "model": directory,
        "losses": losses,
        "gradients": gradients,
        "parameters": parameters,
    }


def relative_norm(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("reference", "layout", "micro_batch_size"), CASES, indirect=["reference"])
def test_layout_gives_the_dense_result(ranks, reference: dict, layout: str, micro_batch_size: int) -> None:
    world_size, settings = LAYOUTS[layout]
    optimizer = {"use_distributed_optimizer": settings.get("use_distributed_optimizer", False)}
    parallel = {name: value for name, value in settings.items() if name != "use_distributed_optimizer"}
    model: Path = reference["model"]
    config = make_config(model, micro_batch_size, parallel=parallel, optimizer=optimizer)

    results = ranks.run(world_size, train_on_ranks, config, BATCHES)

    for result in results:
        assert result["metrics"]["loss"] == pytest.approx(reference["losses"][0], rel=1e-5)
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["metrics"] == results[0]["metrics"], "metrics differ between ranks"
    for key in ("gradients", "parameters"):
        whole = assemble(results, key, model)
        assert whole.keys() == reference[key].keys()
        errors = {name: relative_norm(whole[name], expected) for name, expected in reference[key].items()}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < 1e-4, f"{key} of {worst} are off by {errors[worst]:.2e}"
