"""pretrain_sft.py under torchrun: trains, evaluates, saves, resumes exactly, also under another layout, and exports."""

from pathlib import Path
from typing import Any

import pytest
import torch

from toy_run import ToyRun, read_metrics

PP2 = {"pipeline_model_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": "true"}
DISTRIBUTED = {"use_distributed_optimizer": "true"}
LAYOUTS = {
    "one process": (1, {}),
    "PP2": (2, PP2),
    "TP2 SP": (2, TP2_SP),
    "PP2 VPP2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "CP2 distributed optimizer": (2, {"context_parallel_size": 2} | DISTRIBUTED),
    "DP2 distributed optimizer": (2, DISTRIBUTED),
    "TP2 distributed optimizer": (2, TP2_SP | DISTRIBUTED),
    "PP2 distributed optimizer": (2, PP2 | DISTRIBUTED),
}
# saved under the first layout, resumed under the second
RESUMES = [
    ("PP2", "PP2"),
    ("PP2", "TP2 SP"),
    ("TP2 SP", "PP2 VPP2"),
    ("PP2 VPP2", "one process"),
    ("DP2 distributed optimizer", "DP2 distributed optimizer"),
    ("DP2 distributed optimizer", "TP2 distributed optimizer"),
    ("TP2 distributed optimizer", "PP2 distributed optimizer"),
    ("PP2 distributed optimizer", "CP2 distributed optimizer"),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def undisturbed(toy: ToyRun) -> list[dict[str, Any]]:
    """Six iterations in one process: what every resumed run has to repeat."""
    log = toy.folder / "undisturbed"
    result = toy.run(1, log_dir=log)
    assert result.returncode == 0, result.stderr
    return read_metrics(log)


@pytest.fixture(scope="module")
def half_way(toy: ToyRun):
    """The folder of a run of some layout, cut off after three of six iterations; made once for each layout."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            ranks, settings = LAYOUTS[layout]
            folder = toy.folder / layout.replace(" ", "_")
            result = toy.run(ranks, **settings, train_iters=3, lr_decay_iters=6, save=folder, log_dir=None)
            assert result.returncode == 0, result.stderr
            made[layout] = folder
        return made[layout]

    return get


@pytest.mark.parametrize(("saved", "resumed"), RESUMES, ids=lambda name: name.replace(" ", "_"))
def test_resume_continues_the_same_curve(toy: ToyRun, undisturbed: list, half_way, saved: str, resumed: str) -> None:
    ranks, settings = LAYOUTS[resumed]
    log = toy.folder / f"{saved}-{resumed}".replace(" ", "_")
    result = toy.run(ranks, **settings, load=half_way(saved), log_dir=log, lr_decay_iters=6)
    assert result.returncode == 0, result.stderr
    records = read_metrics(log)
    assert [record["iteration"] for record in records] == [4, 5, 6]
    for record, expected in zip(records, undisturbed[3:], strict=True):
        assert record["consumed_samples"] == expected["consumed_samples"]
        assert record["lr"] == pytest.approx(expected["lr"], rel=1e-12)
        assert record["num_tokens"] == expected["num_tokens"]
        assert record["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_resume_under_the_same_layout_is_exact(toy: ToyRun) -> None:
    whole, first, second = (toy.folder / name for name in ("whole", "first", "second"))
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    common = PP2 | dropout | {"lr_decay_iters": 6}
    assert toy.run(2, **common, log_dir=whole).returncode == 0
    assert toy.run(2, **common, train_iters=3, save=first, log_dir=None).returncode == 0
    assert toy.run(2, **common, load=first, log_dir=second).returncode == 0
    names = ("loss", "grad_norm", "lr", "num_tokens", "consumed_samples")
    expected = [{name: record[name] for name in names} for record in read_metrics(whole)[3:]]
    assert [{name: record[name] for name in names} for record in read_metrics(second)] == expected


def test_output_of_a_run(toy: ToyRun) -> None:
    """What people read, what files appear, and that the written configuration runs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save, export = toy.folder / "run", toy.folder / "exported"
    result = toy.run(
        2, **PP2, train_iters=30, lr=3e-3, save=save, save_interval=20, save_hf=export, eval_before_training="true",
        log_dir=None, eval_interval=15,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "2 ranks = TP 1 x CP 1 x PP 2 x DP 1" in out
    assert "8 samples a step = micro-batch 2 x 4 micro-batches x DP 1" in out
    assert "iteration 30/30 | loss" in out and "tokens/s" in out and "left" in out
    assert "Warning" not in result.stderr and "DEPRECATED" not in result.stderr

    train, valid = read_metrics(save), read_metrics(save, "validation")
    assert train[-1]["loss"] < 0.7 * train[0]["loss"]
    assert [record["iteration"] for record in valid] == [0, 15, 30]
    assert valid[-1]["loss"] < 0.8 * valid[0]["loss"]
    assert valid[0]["num_tokens"] == valid[-1]["num_tokens"]
    assert {"iteration_time_ms", "tokens_per_second", "grad_norm", "lr", "lm_loss"} <= train[0].keys()
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "30"
    assert {path.name for path in save.glob("iter_*")} == {"iter_0000020", "iter_0000030"}

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert tokenizer.chat_template
    assert model.config.vocab_size == len(tokenizer)
    loss = evaluate_with_transformers(model, tokenizer, toy.valid_data)
    assert loss == pytest.approx(valid[-1]["loss"], rel=1e-5)

    # the configuration that was written runs as it is: it finds its own checkpoints and refuses to overwrite them
    import subprocess
    import sys

    from toy_run import ROOT

    again = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_sft.py"), "--config", str(save / "config.yaml"), "--print-config"],
        capture_output=True, text=True, cwd=toy.folder, timeout=60,
    )  # fmt: skip
    assert again.returncode == 0 and again.stdout == (save / "config.yaml").read_text()


def evaluate_with_transformers(model, tokenizer, data: Path) -> float:
    """Mean loss over assistant tokens and their end-of-turn, each row on its own."""
    import json

    total, count = 0.0, 0
    for line in data.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        for position in range(len(prompt), len(whole)):
            total -= logits[position - 1, whole[position]].item()
            count += 1
    return total / count


@pytest.mark.parametrize("recompute", [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": "core_attn"},
], ids=["full", "selective"])  # fmt: skip
def test_recomputation_changes_nothing(toy: ToyRun, undisturbed: list, recompute: dict) -> None:
    log = toy.folder / f"recompute_{recompute['recompute_granularity']}"
    result = toy.run(2, **PP2, **recompute, log_dir=log)
    assert result.returncode == 0, result.stderr
    losses = [record["loss"] for record in read_metrics(log)]
    assert losses == pytest.approx([record["loss"] for record in undisturbed], rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_bf16_trains_and_resumes(toy: ToyRun, undisturbed: list, optimizer: str) -> None:
    first, log = toy.folder / f"bf16_{optimizer}", toy.folder / f"bf16_{optimizer}_log"
    common = TP2_SP | {"bf16": "true", "lr_decay_iters": 6, "optimizer": optimizer}
    if optimizer == "adam":
        common |= DISTRIBUTED
    whole = toy.folder / f"bf16_{optimizer}_whole"
    for changes in (
        {"log_dir": whole},
        {"train_iters": 3, "save": first, "log_dir": None},
        {"load": first, "log_dir": log},
    ):
        result = toy.run(2, **(common | changes))
        assert result.returncode == 0, result.stderr
    losses = [record["loss"] for record in read_metrics(whole)]
    assert [record["loss"] for record in read_metrics(log)] == losses[3:]
    if optimizer == "adam":
        assert losses == pytest.approx([record["loss"] for record in undisturbed], rel=2e-2)


def test_finetune_starts_again_from_the_weights(toy: ToyRun, half_way) -> None:
    log = toy.folder / "finetune"
    result = toy.run(1, load=half_way("PP2"), finetune="true", log_dir=log, eval_before_training="true", train_iters=2)
    assert result.returncode == 0, result.stderr
    at_start = read_metrics(log, "validation")[0]
    at_save = read_metrics(half_way("PP2"), "validation")[-1]
    assert at_start["iteration"] == 0 and at_save["iteration"] == 3
    assert at_start["loss"] == pytest.approx(at_save["loss"], rel=1e-6)
    assert [record["iteration"] for record in read_metrics(log)] == [1, 2]


def test_convert_hf(toy: ToyRun, half_way) -> None:
    import subprocess
    import sys

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toy_run import ROOT

    folder, target = half_way("TP2 SP"), toy.folder / "converted"
    script = [sys.executable, str(ROOT / "scripts" / "convert_hf.py"), "--config", str(folder / "config.yaml")]
    command = [*script, "--load", str(folder), "--save-hf", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=toy.folder)
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    loss = evaluate_with_transformers(model, AutoTokenizer.from_pretrained(target), toy.valid_data)
    assert loss == pytest.approx(read_metrics(folder, "validation")[-1]["loss"], rel=1e-5)
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=toy.folder)
    assert again.returncode == 2 and "not an empty directory" in again.stderr
