"""Distillation through the whole model: the same losses and gradients whatever the layout, with a teacher of another
width and depth, against transformers in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import VOCAB_SIZE, assemble, make_batch, make_config, split_batch, write_tiny_llama

LAYOUTS = {
    "one process": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
    "TP2 PP2 SP": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "TP2 CP2 SP": (4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True}),
}
Z_WEIGHT, KL_WEIGHT = 0.05, 0.7
LOSSES = {
    "lm_loss": {"type": "cross_entropy"},
    "z_loss": {"type": "z_loss", "weight": Z_WEIGHT},
    "kl": {"type": "forward_kl", "weight": KL_WEIGHT, "temperature": 2.0, "scale_by_temperature_squared": True},
    "reverse": {"type": "reverse_kl", "weight": 0.3},
    "top": {"type": "jsd", "weight": 0.2, "beta": 0.3, "top_k": 5, "tail": "bucket"},
    "logged": {"type": "jsd", "weight": 0.0, "beta": 0.5},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    student = write_tiny_llama(tmp_path_factory.mktemp("student"), tied=False)
    teacher = write_tiny_llama(tmp_path_factory.mktemp("teacher"), tied=True, heads=6, layers=8)
    for folder in (student, teacher):
        write_tokenizer(folder)
    return student, teacher


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


def mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum()


def jsd(log_p: torch.Tensor, log_q: torch.Tensor, beta: float) -> torch.Tensor:
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    return beta * (log_p.exp() * (log_p - log_m)).sum(-1) + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1)


def with_tail(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    inside = log_p.gather(-1, ids)
    tail = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((inside, tail), dim=-1)


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    student, teacher = (LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in models)
    batch = make_batch(1)
    mask = batch["loss_mask"].double()
    z = student(input_ids=batch["input_ids"]).logits
    with torch.no_grad():
        teacher_logits = teacher(input_ids=batch["input_ids"]).logits
    log_q, log_p = z.log_softmax(-1), teacher_logits.log_softmax(-1)
    warm_q, warm_p = (z / 2).log_softmax(-1), (teacher_logits / 2).log_softmax(-1)
    ids = log_p.topk(5, dim=-1).indices
    values = {
        "lm_loss": mean(-log_q.gather(2, batch["labels"][..., None]).squeeze(2), mask),
        "z_loss": mean(z.logsumexp(-1) ** 2, mask),
        "kl": 4 * mean((warm_p.exp() * (warm_p - warm_q)).sum(-1), mask),
        "reverse": mean((log_q.exp() * (log_q - log_p)).sum(-1), mask),
        "top": mean(jsd(with_tail(log_p, ids), with_tail(log_q, ids), 0.3), mask),
        "logged": mean(jsd(log_p, log_q, 0.5), mask),
        "teacher_entropy": mean(-(log_p.exp() * log_p).sum(-1), mask),
        "teacher_agreement": mean((z.argmax(-1) == teacher_logits.argmax(-1)).double(), mask),
    }
    values["loss"] = sum(LOSSES[name].get("weight", 1.0) * values[name] for name in LOSSES)
    values["loss"].backward()
    return {
        "metrics": {name: value.item() for name, value in values.items()},
        "gradients": {name: parameter.grad for name, parameter in student.named_parameters()},
        "per_token": (warm_p.exp() * (warm_p - warm_q)).sum(-1).mul(4).detach(),
    }


def distil(config, per_token: bool) -> dict[str, Any]:
    from megatron_ext import platform
    from megatron_ext.losses import LossHead, VocabShard
    from megatron_ext.model_wrapper import MegatronModelWrapper
    from megatron_ext.models.factory import build_model
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.models.sources import open_source
    from megatron_ext.models.weights import load_hf_weights, local_parameters
    from megatron_ext.optimizer import build_optimizer
    from megatron_ext.parallel import create_context
    from megatron_ext.teacher import Teacher, plan_teacher

    parallel = create_context(config, platform.setup("cpu"))
    hf = load_hf_config(config.model.hf_path)
    chunks = build_model(hf, config, parallel)
    load_hf_weights(chunks, hf, open_source(hf, config.model.random_init, 1), parallel)
    plan = plan_teacher(config, hf)
    wrapper = MegatronModelWrapper(
        chunks,
        config,
        losses=LossHead.from_config(config, VocabShard(parallel.pg.tp, plan.vocab_size)),
        parallel=parallel,
        optimizer=build_optimizer(config, chunks, parallel),
        teacher=Teacher(plan, parallel),
    )
    wrapper.zero_grad()
    batches = split_batch(make_batch(1), parallel.dp_rank, parallel.dp_size, config.training.micro_batch_size)
    result = wrapper.forward_backward_mini_batch(batches, return_per_token_outputs=per_token)
    gradients = {name: parameter.main_grad.clone() for name, parameter in local_parameters(chunks).items()}
    evaluated = wrapper.forward(batches, return_per_token_outputs=False)
    return {
        "metrics": dict(result.metrics),
        "evaluated": dict(evaluated.metrics),
        "outputs": result.loss_fn_outputs,
        "gradients": gradients,
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "dp_rank": parallel.dp_rank,
    }


@pytest.mark.parametrize("implementation", ["chunked", "materialized"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_dense_result(ranks, models, reference, layout: str, implementation: str) -> None:
    student, teacher = models
    world_size, parallel = LAYOUTS[layout]
    logits = {"implementation": implementation, **({"chunk_tokens": 7} if implementation == "chunked" else {})}
    config = make_config(
        student, 2, parallel=parallel, losses=LOSSES, logits=logits, teacher={"teacher_path": str(teacher)}
    )

    results = ranks.run(world_size, distil, config, True)

    expected = reference["metrics"]
    for result in results:
        for name, value in expected.items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-5), name
            assert result["evaluated"][name] == pytest.approx(value, rel=1e-5), name
        rows = range(8) if result["dp_rank"] == 0 else range(4, 8)
        for row, outputs in zip(rows, result["outputs"], strict=False):
            assert outputs.keys() >= {"kl", "reverse", "top", "logged", "z_loss", "logprobs"}
            torch.testing.assert_close(
                outputs["kl"].double(), reference["per_token"][row, : len(outputs["kl"])], rtol=1e-4, atol=1e-5
            )
    found = assemble(results, "gradients", student)
    assert found.keys() == reference["gradients"].keys()
    for name, gradient in reference["gradients"].items():
        error = ((found[name].double() - gradient).norm() / gradient.norm()).item()
        assert error < 1e-4, f"gradient of {name} is off by {error:.1e}"
