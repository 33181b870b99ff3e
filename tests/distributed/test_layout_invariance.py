"""The flagship promise: same batch, same loss, same gradients, same training, whatever the layout.

The reference is transformers' LlamaForCausalLM in float64, one process, one batch, two losses written as plain sums
over tokens, and torch's AdamW. No layout is compared with another layout of ours.
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
# a chunk size that divides nothing; the other implementation has all logits at once
IMPLEMENTATIONS = {"chunked": {"chunk_tokens": 7}, "materialized": {}}
CASES = [
    pytest.param(
        tied, implementation, layout, size, id=f"{'tied' if tied else 'untied'}-{implementation}-{layout}-{size}"
    )
    for tied in (False, True)
    for implementation in IMPLEMENTATIONS
    for layout in LAYOUTS
    for size in (MICRO_BATCH_SIZES.get(layout, (2,)) if not tied and implementation == "chunked" else (2,))
]
Z_WEIGHT = 0.05
LOSSES = {"lm_loss": {"type": "cross_entropy"}, "z_loss": {"type": "z_loss", "weight": Z_WEIGHT}}
BATCHES = [make_batch(seed) for seed in (1, 2, 3)]


def dense_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    logits = model(input_ids=batch["input_ids"]).logits
    cross_entropy = squared = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(batch["lengths"].tolist()):
        for position in range(length):
            weight = batch["loss_mask"][row, position].double()
            if weight:
                denominator = logits[row, position].exp().sum().log()
                cross_entropy = cross_entropy + weight * (
                    denominator - logits[row, position, batch["labels"][row, position]]
                )
                squared = squared + weight * denominator**2
    total = batch["loss_mask"].double().sum()
    losses = {"lm_loss": cross_entropy / total, "z_loss": squared / total}
    return {**losses, "loss": losses["lm_loss"] + Z_WEIGHT * losses["z_loss"]}


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    from transformers import LlamaForCausalLM

    directory = write_tiny_llama(tmp_path_factory.mktemp("model"), tied=request.param)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, first, gradients = [], None, None
    for batch in BATCHES:
        optimizer.zero_grad()
        values = dense_losses(model, batch)
        values["loss"].backward()
        losses.append(values["loss"].item())
        if gradients is None:
            first = {name: value.item() for name, value in values.items()}
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {
        "model": directory,
        "losses": losses,
        "first": first,
        "gradients": gradients,
        "parameters": parameters,
    }


def relative_norm(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("reference", "implementation", "layout", "micro_batch_size"), CASES, indirect=["reference"])
def test_layout_gives_the_dense_result(
    ranks, reference: dict, implementation: str, layout: str, micro_batch_size: int
) -> None:
    world_size, settings = LAYOUTS[layout]
    optimizer = {"use_distributed_optimizer": settings.get("use_distributed_optimizer", False)}
    parallel = {name: value for name, value in settings.items() if name != "use_distributed_optimizer"}
    model: Path = reference["model"]
    logits = {"implementation": implementation, **IMPLEMENTATIONS[implementation]}
    config = make_config(model, micro_batch_size, parallel=parallel, optimizer=optimizer, losses=LOSSES, logits=logits)

    results = ranks.run(world_size, train_on_ranks, config, BATCHES)

    for result in results:
        for name, value in reference["first"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-5)
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["metrics"] == results[0]["metrics"], "metrics differ between ranks"
    for key in ("gradients", "parameters"):
        whole = assemble(results, key, model)
        assert whole.keys() == reference[key].keys()
        errors = {name: relative_norm(whole[name], expected) for name, expected in reference[key].items()}
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < 1e-4, f"{key} of {worst} are off by {errors[worst]:.2e}"
