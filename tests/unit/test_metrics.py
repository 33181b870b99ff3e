"""What reaches metrics.jsonl, Weights & Biases and the terminal."""

import json
import math
import sys
import time
import types
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.config import Config
from megatron_ext.metrics import MetricsLog, Stopwatch
from megatron_ext.outputs import StepMetrics
from megatron_ext.run_report import evaluation_line, progress_line
from megatron_ext.token_weights import GlobalCounts

MAIN, OTHER = SimpleNamespace(is_main=True), SimpleNamespace(is_main=False)


def config(tmp_path, **logging) -> Config:
    return Config.from_dict({"model": {"hf_path": "model"}, "logging": {"log_dir": str(tmp_path / "log"), **logging}})


def test_nan_is_written_not_hidden(tmp_path) -> None:
    with MetricsLog(config(tmp_path), MAIN) as log:
        log.write("train", {"iteration": 1, "loss": math.nan, "grad_norm": math.inf})
    (line,) = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["split"] == "train" and math.isnan(record["loss"]) and math.isinf(record["grad_norm"])


def test_a_resumed_run_appends(tmp_path) -> None:
    for iteration in (1, 2):
        with MetricsLog(config(tmp_path), MAIN) as log:
            log.write("train", {"iteration": iteration})
    assert len((tmp_path / "log" / "metrics.jsonl").read_text().splitlines()) == 2


def test_only_rank_0_writes(tmp_path) -> None:
    with MetricsLog(config(tmp_path), OTHER) as log:
        log.write("train", {"iteration": 1})
    assert not (tmp_path / "log").exists()


def test_weights_and_biases_gets_every_record(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list = []

    class Run:
        def log(self, values, step):
            calls.append((values, step))

        def finish(self):
            calls.append("finished")

    module = types.ModuleType("wandb")
    module.init = lambda **arguments: calls.append(arguments) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    with MetricsLog(config(tmp_path, wandb_project="p", wandb_exp_name="n"), MAIN) as log:
        log.write("train", {"iteration": 3, "loss": 1.5})
    started, record, ended = calls
    assert started["project"] == "p" and started["name"] == "n" and started["config"]["model"]["hf_path"] == "model"
    assert record == ({"train/iteration": 3, "train/loss": 1.5}, 3) and ended == "finished"


def test_missing_wandb_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"logging\.wandb_project is 'p'.*megatron-ext\[wandb\]"):
        MetricsLog(config(tmp_path, wandb_project="p"), MAIN)


def test_stopwatch_leaves_pauses_out() -> None:
    stopwatch = Stopwatch()
    with stopwatch:
        time.sleep(0.2)
    assert stopwatch.read() < 0.1
    time.sleep(0.05)
    assert 0.04 < stopwatch.read() < 0.2


def metrics(sums: list[float], counts: list[float]) -> StepMetrics:
    """Two losses and one token metric; counts: denominator, sum of the mask, trained tokens, input tokens."""
    weights = {"a": 2.0, "b": 0.0}
    of_batch = GlobalCounts(*torch.tensor(counts, dtype=torch.float64))
    return StepMetrics(weights, ["accuracy"], torch.tensor(sums, dtype=torch.float64), of_batch)


def test_metrics_combine_exactly() -> None:
    """Means of batches of unequal weight: 10 / 4 and 2 / 1 are 12 / 5 together, not the mean of 2.5 and 2."""
    parts = [metrics([10.0, 4.0, 3.0], [4.0, 6.0, 5.0, 9.0]), metrics([2.0, 1.0, 1.0], [1.0, 2.0, 1.0, 3.0])]
    expected = {"a": 2.4, "b": 1.0, "accuracy": 0.5, "loss": 4.8, "num_tokens": 6, "num_input_tokens": 12}
    assert dict(StepMetrics.combine(parts)) == pytest.approx(expected)


def test_metrics_without_a_weighted_token_are_0() -> None:
    assert dict(metrics([0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 7.0]))["loss"] == 0.0


def test_lines_for_people() -> None:
    record = {
        "iteration": 5,
        "loss": 1.23456,
        "lr": 1e-4,
        "grad_norm": 0.5,
        "tokens_per_second": 12345.6,
        "iteration_time_ms": 90000.0,
    }
    assert progress_line(record | {"lm_loss": 1.23456}, ["lm_loss"], 100) == (
        "iteration   5/100 | lm_loss 1.2346 | lr 1.000e-04 | grad norm 0.500 | 12,346 tokens/s | 2:22:30 left"
    )
    counts = {"num_tokens": 1234.0, "num_input_tokens": 9000.0}
    line = evaluation_line("held_out", 5, {"lm_loss": 2.0, "loss": 2.0, **counts}, ["lm_loss"])
    assert line == "evaluation at iteration 5 | held_out: lm_loss 2.0000 over 1,234 tokens"
    line = evaluation_line("held_out", 5, {"a": 2.0, "b": 1.0, "loss": 2.5, **counts}, ["a", "b"])
    assert line == "evaluation at iteration 5 | held_out: a 2.0000, b 1.0000, loss 2.5000 over 1,234 tokens"
    line = evaluation_line("held_out", 5, {"a": math.nan, "loss": math.nan, **counts}, ["a"])
    assert line == "evaluation at iteration 5 | held_out: a nan over 1,234 tokens"
