"""A real pretrained model from its GGUF file: logits, exported weights and tokenizer, and under every kind of layout
the loss and the log-probability of every token of real rows, against transformers reading the same file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models_import import assert_same_tensors, import_on_ranks
from tiny_model import make_config

from smollm2 import ROOT, load_with_transformers, require_smollm2
from toy_run import evaluate_with_transformers, read_conversations

LAYOUTS = {
    "TP1": (1, {}),
    "PP2": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 11}),
    "TP3": (3, {"tensor_model_parallel_size": 3}),
}
VPP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3}
EVALUATED = {  # layouts, and whether rows are packed; 9 heads allow TP 3, 30 layers VPP 3
    **{name: (*layout, False) for name, layout in LAYOUTS.items()},
    "PP2 VPP3": (2, VPP, False),
    "DP2": (2, {}, False),
    "CP2": (2, {"context_parallel_size": 2}, False),
    "PP2 packed": (*LAYOUTS["PP2"], True),
    "CP2 packed": (2, {"context_parallel_size": 2}, True),
}
IDS = torch.randint(0, 49152, (2, 48), generator=torch.Generator().manual_seed(4))


def conversations() -> list[list[dict[str, str]]]:
    """Eight rows of grade-school maths beside the checkout; elsewhere the project's own examples."""
    maths = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    if not maths.is_file():
        return [row for row in read_conversations(ROOT / "examples/data/held_out.jsonl") if len(row) == 2][:8]
    with maths.open(encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(8)]
    return [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = require_smollm2()
    model, tokenizer = load_with_transformers(path)
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations()))
    state = model.state_dict()
    del state["lm_head.weight"]  # tied
    with torch.no_grad():
        logits = model(IDS).logits
    return {
        "path": path,
        "data": data,
        "model": model,
        "state": state,
        "tokenizer": tokenizer,
        "logits": logits,
        "loss": evaluate_with_transformers(model, tokenizer, conversations()),
    }


def evaluate_on_ranks(config: Any) -> tuple[float, dict[int, torch.Tensor]]:
    """The loss of the configured evaluation set, through the data pipeline and the wrapper, and by sample the logprobs
    of this replica's."""
    from megatron_ext import platform
    from megatron_ext.data import load_run_data
    from megatron_ext.evaluation import Evaluator
    from megatron_ext.losses import LossHead, VocabShard
    from megatron_ext.model_wrapper import MegatronModelWrapper
    from megatron_ext.models import build_model, load_hf_config, load_initial_weights
    from megatron_ext.outputs import StepMetrics
    from megatron_ext.parallel import create_context

    parallel = create_context(config, platform.setup("cpu"))
    hf = load_hf_config(config.model.hf_path)
    chunks = build_model(hf, config, parallel, wrap_with_ddp=False)
    load_initial_weights(chunks, hf, config, parallel)
    data = load_run_data(config)
    head = LossHead.from_config(config, VocabShard(parallel.pg.tp, hf.vocab_size))
    wrapper = MegatronModelWrapper(chunks, config, losses=head, parallel=parallel)
    evaluator = Evaluator(data.evaluation, wrapper, config, parallel, pad_id=data.pad_id)
    metrics, logprobs = [], {}
    for step in evaluator.steps("validation", return_per_token_outputs=True):
        metrics.append(step.result.metrics)
        outputs = zip(step.sample_ids, step.result.loss_fn_outputs, strict=True)
        logprobs |= {sample_id: output["logprobs"] for sample_id, output in outputs}
    return StepMetrics.combine(metrics)["loss"], logprobs


def reference_logprobs(config: Any, model: Any) -> list[torch.Tensor]:
    """transformers' log-probability of every target, one row at a time."""
    from megatron_ext.data import load_run_data

    samples = load_run_data(config).evaluation["validation"]
    logprobs = []
    for sample in (samples[i] for i in range(len(samples))):
        with torch.no_grad():
            every = model(torch.tensor([sample.input_ids])).logits[0].double().log_softmax(-1)
        logprobs.append(every.gather(1, torch.tensor(sample.labels)[:, None]).squeeze(1))
    return logprobs


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_import(ranks, reference: dict[str, Any], tmp_path: Path, layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    config = make_config(reference["path"], parallel=parallel)
    logits = ranks.run(world_size, import_on_ranks, config, IDS, tmp_path / "hf", timeout=300)[-1]
    difference = (logits - reference["logits"]).abs().max().item()
    print(f"SmolLM2 {layout}: largest logit difference to transformers {difference:.1e}")
    assert difference <= 2e-3
    assert_same_tensors(tmp_path / "hf", reference["state"])
    if layout == "TP1":
        from transformers import AutoTokenizer

        ours, theirs = AutoTokenizer.from_pretrained(tmp_path / "hf"), reference["tokenizer"]
        messages = [{"role": "user", "content": "How  many é are there?\n"}, {"role": "assistant", "content": "One."}]
        assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
        assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", EVALUATED)
def test_loss_on_real_rows(ranks, reference: dict[str, Any], layout: str) -> None:
    world_size, parallel, packing = EVALUATED[layout]
    rows = str(reference["data"])
    config = make_config(
        reference["path"],
        parallel=parallel,
        data={"train_data_path": rows, "valid_data_path": rows, "seq_length": 512, "packing": packing},
        evaluation={"eval_micro_batch_size": 4 if not packing else 1},
    )
    answers = ranks.run(world_size, evaluate_on_ranks, config, timeout=300)
    losses = [loss for loss, _ in answers]
    error = abs(losses[0] / reference["loss"] - 1)
    print(f"SmolLM2 {layout}: loss {losses[0]:.6f}, relative difference to transformers {error:.1e}")
    assert error <= 1e-4
    assert losses == [losses[0]] * world_size

    expected = reference_logprobs(config, reference["model"])
    assert {sample_id for _, found in answers for sample_id in found} == set(range(len(expected)))
    largest = 0.0
    for _, found in answers:
        for sample_id, logprobs in found.items():
            assert len(logprobs) == len(expected[sample_id])
            largest = max(largest, (logprobs - expected[sample_id]).abs().max().item())
    assert largest <= 2e-3
    print(f"SmolLM2 {layout}: largest difference of a logprob to transformers {largest:.1e}")
