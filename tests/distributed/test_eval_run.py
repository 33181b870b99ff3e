"""Evaluation runs (--eval-only) under every layout: each sequence once, in data order, the same numbers as alone."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.token_file import TokenFile
from toy_run import ToyRun, read_metrics, write_toy_data, write_toy_model, write_toy_teacher

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": "true"}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "one process": (1, {}),
    "DP2": (2, {}),
    "TP2 SP": (2, TP2_SP),
    "PP2": (2, PP2),
    "PP2 VPP2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP3": (3, {}),
    "DP2 PP2": (4, PP2),
    "DP2 CP2": (4, {"context_parallel_size": 2}),
    "DP2 TP2": (4, {"tensor_model_parallel_size": 2}),
}
SIZES = {"one": 1, "three": 3, "seven": 7}  # no multiple of anything, and smaller than most batches
OVERLAPPED = {"use_distributed_optimizer": "true", "overlap_grad_reduce": "true", "overlap_param_gather": "true"}


def evaluate(flags: list[str]) -> int:
    """What pretrain_sft.py --eval-only does, inside the pool's process group; returns the exit code."""
    from megatron_ext import platform
    from megatron_ext.config import load_config
    from megatron_ext.eval_run import EvaluationRun
    from megatron_ext.parallel import create_context
    from megatron_ext.preparation import prepare

    config = load_config(flags)
    parallel = create_context(config, platform.setup("cpu"))
    parts = prepare(config, world_size=parallel.world_size, makes_folders=parallel.is_main)
    return EvaluationRun(config, parts.hf, parts.source, parts.data, parallel, parts.teacher).run()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    toy = ToyRun(tmp_path_factory.mktemp("toy"))
    for name, rows in SIZES.items():
        write_toy_data(toy.folder / f"{name}.jsonl", rows=rows)
    return toy


def flags_of(toy: ToyRun, folder: Path, **changes: Any) -> list[str]:
    settings = {
        "eval_only": "true",
        "train_data_path": None,
        "valid_data_path": None,
        "train_iters": None,
        "log_dir": folder,
        "per_token_outputs": folder / "out.parquet",
    }
    sets = [text for name in SIZES for text in (f"--valid-data-path.{name}", str(toy.folder / f"{name}.jsonl"))]
    return [*toy.flags(**(settings | changes)), *sets]


@pytest.fixture(scope="module")
def run(ranks, toy: ToyRun):
    """Evaluate under a layout; returns the exit code and the log folder."""

    def start(layout: str, name: str, **changes: Any) -> tuple[int, Path]:
        world_size, settings = LAYOUTS[layout]
        folder = toy.folder / f"{name} {layout}".replace(" ", "_")
        codes = ranks.run(world_size, evaluate, flags_of(toy, folder, **(settings | changes)))
        assert len(set(codes)) == 1, f"ranks return {codes}"
        return codes[0], folder

    return start


def records_of(folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((folder / "eval.json").read_text())


@pytest.fixture(scope="module")
def alone(run) -> Path:
    """One process, one sequence at a time: the plainest way."""
    code, folder = run("one process", "alone", micro_batch_size=1)
    assert code == 0
    return folder


def assert_same_numbers(found: Path, expected: Path) -> None:
    for name, record in records_of(expected).items():
        for key, value in record.items():
            if key not in ("seconds", "tokens_per_second"):
                assert records_of(found)[name][key] == pytest.approx(value, rel=1e-5), f"{key} of {name}"
    rows = zip(TokenFile(found / "out.parquet").rows(), TokenFile(expected / "out.parquet").rows(), strict=True)
    for row, other in rows:
        assert (row.set_name, row.sample_id) == (other.set_name, other.sample_id)
        assert np.array_equal(row.token_ids, other.token_ids) and np.array_equal(row.labels, other.labels)
        assert row.values.keys() == other.values.keys()
        for field, values in other.values.items():
            np.testing.assert_allclose(row.values[field], values, rtol=1e-4, atol=1e-5)
        assert row.mean_loss == pytest.approx(other.mean_loss, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sequence_once_in_data_order(run, alone: Path, layout: str) -> None:
    code, folder = run(layout, "layout", micro_batch_size=2)
    assert code == 0
    keys = [(row.set_name, row.sample_id) for row in TokenFile(folder / "out.parquet").rows()]
    assert keys == [(name, i) for name, size in SIZES.items() for i in range(size)]
    assert_same_numbers(folder, alone)
    assert {path.name for path in folder.iterdir()} == {"eval.json", "metrics.jsonl", "out.parquet"}


def test_settings_of_training_do_not_matter(run, alone: Path) -> None:
    changes = {"lr_warmup_iters": 0, "global_batch_size": 7, "hidden_dropout": 0.5}
    code, folder = run("DP2", "training settings", **OVERLAPPED, **changes)
    assert code == 0
    assert_same_numbers(folder, alone)


def test_packed_rows(run, alone: Path) -> None:
    for layout in ("DP2", "CP2"):
        code, folder = run(layout, "packed", packing="true", micro_batch_size=2)
        assert code == 0
        assert_same_numbers(folder, alone)


def test_the_rows_make_the_metrics(alone: Path) -> None:
    """Every mean of eval.json from the rows, and from what is known of the data."""
    rows = list(TokenFile(alone / "out.parquet").rows())
    for name, record in records_of(alone).items():
        own = [row for row in rows if row.set_name == name]
        mask = np.concatenate([row.values["loss_mask"] for row in own]).astype(np.float64)
        logprobs = np.concatenate([row.values["logprobs"] for row in own]).astype(np.float64)
        mean = -(mask * logprobs).sum() / mask.sum()
        assert record["lm_loss"] == record["loss"] == pytest.approx(mean, rel=1e-6)
        assert record["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
        assert record["num_tokens"] == mask.sum() and record["num_input_tokens"] == len(mask)
        assert record["sequences"] == SIZES[name] and record["iteration"] == 0
        assert 0 <= record["token_accuracy"] <= 1 and record["seconds"] > 0
        assert "negative_log_likelihood" not in record
        assert read_metrics(alone, name) == [{"split": name} | record]
        for row in own:
            trained = row.values["loss_mask"] != 0
            assert row.mean_loss == pytest.approx(-row.values["logprobs"][trained].mean(dtype=np.float64), rel=1e-6)
            assert np.array_equal(row.labels[:-1], row.token_ids[1:])


LOSSES = ["--losses.z", "{type: z_loss, weight: 0.1}", "--losses.smooth", "{type: cross_entropy, label_smoothing: 0.1}"]


def test_several_losses_and_their_arrays(ranks, toy: ToyRun) -> None:
    folder = toy.folder / "losses"
    flags = flags_of(toy, folder, per_token_outputs=folder / "out.jsonl", loss_reduction="sequence_mean") + LOSSES
    assert ranks.run(2, evaluate, [*flags, "--pipeline-model-parallel-size", "2"]) == [0, 0]
    record = records_of(folder)["seven"]
    assert record["loss"] == pytest.approx(record["lm_loss"] + 0.1 * record["z"] + record["smooth"], rel=1e-6)
    rows = [row for row in TokenFile(folder / "out.jsonl").rows() if row.set_name == "seven"]
    assert list(rows[0].values) == ["loss_mask", "logprobs", "elementwise_loss", "z"]
    assert np.mean([row.mean_loss for row in rows]) == pytest.approx(record["loss"], rel=1e-5)
    # perplexity stays a mean over tokens, of the plain cross-entropy
    mask = np.concatenate([row.values["loss_mask"] for row in rows]).astype(np.float64)
    logprobs = np.concatenate([row.values["logprobs"] for row in rows]).astype(np.float64)
    assert record["perplexity"] == pytest.approx(math.exp(-(mask * logprobs).sum() / mask.sum()), rel=1e-5)


# -------------------------------------------------------------------------------------------- with a teacher

DIVERGENCES = {"kl": "forward_kl", "reverse": "reverse_kl, temperature: 2.0", "jsd": "jsd, beta: 0.3, weight: 0.0"}


@pytest.fixture(scope="module")
def pair(toy: ToyRun) -> tuple[Path, Path]:
    """A student and a teacher of another depth and width."""
    student = write_toy_teacher(toy.folder / "student", seed=3, hidden_size=32, num_hidden_layers=4)
    return student, write_toy_teacher(toy.folder / "teacher")


def divergences(student: Any, teacher: Any) -> dict[str, np.ndarray]:
    """Of two rows of logits [positions, vocabulary], as their definitions say, in float64."""

    def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
        exponentials = np.exp(logits.astype(np.float64) / temperature)
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return (p * np.log(p / q)).sum(axis=1)

    (p, q), (p2, q2) = ((softmax(teacher, t), softmax(student, t)) for t in (1.0, 2.0))
    mixture = 0.3 * p + 0.7 * q
    return {"kl": kl(p, q), "reverse": kl(q2, p2), "jsd": 0.3 * kl(p, mixture) + 0.7 * kl(q, mixture)}


@pytest.mark.parametrize("layout", ["one process", "DP2", "TP2 SP", "PP2", "CP2"])
def test_divergences_from_a_teacher(ranks, toy: ToyRun, pair: tuple[Path, Path], layout: str) -> None:
    """Every divergence at every position, from transformers' logits; weight 0 is reported too."""
    import torch
    from transformers import AutoModelForCausalLM

    student, teacher = pair
    world_size, settings = LAYOUTS[layout]
    folder = toy.folder / f"teacher {layout}".replace(" ", "_")
    flags = flags_of(toy, folder, **settings, hf_path=student, random_init="false", teacher_path=teacher)
    losses = [text for name, loss in DIVERGENCES.items() for text in (f"--losses.{name}", f"{{type: {loss}}}")]
    assert set(ranks.run(world_size, evaluate, [*flags, *losses])) == {0}

    models = [AutoModelForCausalLM.from_pretrained(path) for path in pair]
    rows = [row for row in TokenFile(folder / "out.parquet").rows() if row.set_name == "seven"]
    sums, count = dict.fromkeys(DIVERGENCES, 0.0), 0
    for row in rows:
        with torch.no_grad():
            logits = [model(torch.tensor(row.token_ids[None].astype(np.int64))).logits[0].numpy() for model in models]
        mask = row.values["loss_mask"] != 0
        count += mask.sum()
        for name, expected in divergences(*logits).items():
            np.testing.assert_allclose(row.values[name][:-1], expected[:-1], rtol=1e-4, atol=1e-5)
            sums[name] += expected[mask].sum()
    record = records_of(folder)["seven"]
    for name, total in sums.items():
        assert record[name] == pytest.approx(total / count, rel=1e-4)
    assert record["loss"] == pytest.approx(record["lm_loss"] + record["kl"] + record["reverse"], rel=1e-5)
    assert record["teacher_entropy"] > 0 and 0 <= record["teacher_agreement"] <= 1


# --------------------------------------------------------------------------------------------- not finite


@pytest.fixture(scope="module")
def poisoned(toy: ToyRun) -> Path:
    """A model on disk with NaN in the embedding of one word, `right`: of the seven rows some have it."""
    import torch
    from transformers import LlamaForCausalLM

    directory = write_toy_model(toy.folder / "poisoned", num_hidden_layers=2)
    torch.manual_seed(0)
    from transformers import AutoTokenizer, LlamaConfig

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory))
    word = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids("six")
    model.model.embed_tokens.weight.data[word] = math.nan
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("layout", ["one process", "DP2", "PP2"])
@pytest.mark.parametrize("writes", [True, False], ids=["with rows", "metrics only"])
def test_nan_is_reported_with_its_samples(run, toy: ToyRun, poisoned: Path, layout: str, writes: bool) -> None:
    name = f"nan {writes}"
    outputs = {} if writes else {"per_token_outputs": None}
    code, folder = run(layout, name, hf_path=poisoned, random_init="false", micro_batch_size=2, **outputs)
    assert code == 1
    records = records_of(folder)
    assert list(records) == list(SIZES), "the run ended before its end"
    with (toy.folder / "seven.jsonl").open() as file:
        wrong = [i for i, line in enumerate(file) if "six" in line]
    assert 0 < len(wrong) < 7
    assert math.isnan(records["seven"]["loss"])
    assert records["seven"]["first_not_finite"] == wrong
    assert records["seven"]["sequences_not_finite"] == len(wrong)
    assert "first_not_finite" not in records["one"] and math.isfinite(records["one"]["loss"])
    if writes:
        rows = [row for row in TokenFile(folder / "out.parquet").rows() if row.set_name == "seven"]
        assert [row.sample_id for row in rows] == list(range(7))
        assert [row.sample_id for row in rows if math.isnan(row.mean_loss)] == wrong
