"""pretrain_sft.py --eval-only under torchrun, as a user starts it: a checkpoint and an exported model give the same
numbers, and values that are not finite end in a non-zero exit code.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.token_file import TokenFile
from toy_run import ROOT, ToyRun, evaluate_with_transformers, read_conversations, read_metrics

EVALUATE = {"eval_only": "true", "train_data_path": None, "train_iters": None, "random_init": "false"}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    toy = ToyRun(tmp_path_factory.mktemp("toy"))
    settings = {"tensor_model_parallel_size": 2, "save": toy.folder / "run", "save_hf": toy.folder / "hf"}
    result = toy.run(2, **settings, log_dir=None)
    assert result.returncode == 0, result.stderr
    return toy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_checkpoint_and_its_export_say_the_same(toy: ToyRun) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = contents(toy.folder / "run")
    a, b = toy.folder / "a.parquet", toy.folder / "b.jsonl"
    checkpoint = EVALUATE | {"load": toy.folder / "run", "random_init": "true", "save": toy.folder / "run"}
    result = toy.run(2, **checkpoint, **PP2, per_token_outputs=a, log_dir=toy.folder / "log_a")
    assert result.returncode == 0, result.stderr
    assert contents(toy.folder / "run") == before, "the folder of the checkpoints was touched"
    result = toy.run(3, **EVALUATE, hf_path=toy.folder / "hf", per_token_outputs=b, log_dir=toy.folder / "log_b")
    assert result.returncode == 0, result.stderr

    header, _, row = result.stdout[result.stdout.index("set  ") :].splitlines()[:3]
    assert header.split() == ["set", "lm_loss", "perplexity", "token", "accuracy", "tokens", "sequences", "time"]
    model = AutoModelForCausalLM.from_pretrained(toy.folder / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(toy.folder / "hf")
    loss = evaluate_with_transformers(model, tokenizer, read_conversations(toy.valid_data))
    assert row.split()[:2] == ["validation", f"{loss:.4f}"] and row.split()[5] == "7"
    records = [json.loads((toy.folder / log / "eval.json").read_text())["validation"] for log in ("log_a", "log_b")]
    for record in records:
        assert record["loss"] == pytest.approx(loss, rel=1e-5)
        assert record["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert [record["iteration"] for record in records] == [6, 0]
    assert read_metrics(toy.folder / "log_a", "validation") == [{"split": "validation"} | records[0]]

    assert TokenFile(a).metadata["tokenizer"] == str(toy.model)
    for arguments in ([a, b], [a, "--hf", toy.folder / "hf"]):
        command = [sys.executable, ROOT / "scripts" / "compare_outputs.py", *arguments, "--tolerance", "1e-4"]
        compared = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
        assert compared.returncode == 0, compared.stdout + compared.stderr
        assert "7 sequences in both" in compared.stdout

    again = toy.run(1, **EVALUATE, hf_path=toy.folder / "hf", per_token_outputs=b, log_dir=toy.folder / "log_b")
    assert again.returncode != 0 and "exists already" in again.stderr and "layout" not in again.stdout
    again = toy.run(
        1, **EVALUATE, hf_path=toy.folder / "hf", per_token_outputs=b, log_dir=toy.folder / "log_b", overwrite="true"
    )
    assert again.returncode == 0, again.stderr


def test_nan_ends_in_a_failure_behind_the_last_set(toy: ToyRun) -> None:
    from safetensors.torch import load_file, save_file

    file = toy.folder / "hf" / "model.safetensors"
    weights = load_file(file)
    healthy = {name: tensor.clone() for name, tensor in weights.items()}
    weights["lm_head.weight"][:] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    try:
        result = toy.run(2, **EVALUATE, **PP2, hf_path=toy.folder / "hf", log_dir=toy.folder / "nan")
    finally:
        save_file(healthy, file, metadata={"format": "pt"})
    assert result.returncode != 0
    for sample in range(7):
        assert f"error: validation, sample {sample}: not finite: logprobs" in result.stderr
    assert "values that are not finite in 7 of 7 sequences" in result.stderr
    assert "megatron_ext/" not in result.stderr, "a traceback of ours"
    assert "perplexity" in result.stdout
    assert math.isnan(json.loads((toy.folder / "nan" / "eval.json").read_text())["validation"]["loss"])
