"""pretrain_sft.py under torchrun, as a user starts it: trains, evaluates, saves, resumes, exports, fails cleanly."""

import pytest
import torch

from toy_run import ToyRun, evaluate_with_transformers, read_conversations, read_metrics

PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


def test_resume_under_the_same_layout_is_exact(toy: ToyRun) -> None:
    whole, first, second = (toy.folder / name for name in ("whole", "first", "second"))
    common = PP2 | {"lr_decay_iters": 6, "hidden_dropout": 0.1}
    for changes in (
        {"log_dir": whole},
        {"train_iters": 3, "save": first, "log_dir": None},
        {"load": first, "log_dir": second},
    ):
        result = toy.run(2, **common, **changes)
        assert result.returncode == 0, result.stderr
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
    assert "iteration 30/30 | lm_loss" in out and "tokens/s" in out and "left" in out
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
    loss = evaluate_with_transformers(model, tokenizer, read_conversations(toy.valid_data))
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


def test_convert_hf(toy: ToyRun) -> None:
    import subprocess
    import sys

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from toy_run import ROOT

    folder, target = toy.folder / "to_convert", toy.folder / "converted"
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": "true", "train_iters": 3, "log_dir": None}
    assert toy.run(2, **settings, save=folder).returncode == 0
    script = [sys.executable, str(ROOT / "scripts" / "convert_hf.py"), "--config", str(folder / "config.yaml")]
    command = [*script, "--load", str(folder), "--save-hf", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=toy.folder)
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    loss = evaluate_with_transformers(model, AutoTokenizer.from_pretrained(target), read_conversations(toy.valid_data))
    assert loss == pytest.approx(read_metrics(folder, "validation")[-1]["loss"], rel=1e-5)
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=toy.folder)
    assert again.returncode == 2 and "not an empty directory" in again.stderr


def test_a_failing_rank_ends_the_run_with_its_error(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 fails where rank 1 goes on: both end at once, and the first error is what is shown."""
    (toy.folder / "fake" / "wandb").mkdir(parents=True)
    (toy.folder / "fake" / "wandb" / "__init__.py").write_text("def init(**_):\n    raise RuntimeError('no network')\n")
    result = toy.run(2, **PP2, wandb_project="p", log_dir=toy.folder / "failing", timeout=100, path=toy.folder / "fake")
    assert result.returncode != 0
    assert "[rank 0] failed" in result.stderr and "RuntimeError: no network" in result.stderr
    assert "[rank 1] failed" not in result.stderr


def test_one_process_needs_no_launcher(toy: ToyRun) -> None:
    import os
    import subprocess
    import sys

    from toy_run import ROOT

    command = [sys.executable, str(ROOT / "pretrain_sft.py"), *toy.flags(train_iters=1, log_dir=toy.folder / "alone")]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=toy.folder)
    assert result.returncode == 0, result.stderr
    assert "1 rank = TP 1 x CP 1 x PP 1 x DP 1" in result.stdout
