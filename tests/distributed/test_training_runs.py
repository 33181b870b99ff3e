"""Runs of the real Trainer on every layout: resuming repeats the undisturbed run, also under another layout."""

from pathlib import Path
from typing import Any

import pytest

from toy_run import ToyRun, read_metrics

PP2 = {"pipeline_model_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": "true"}
DISTRIBUTED = {"use_distributed_optimizer": "true"}
OVERLAPPED = DISTRIBUTED | {"overlap_grad_reduce": "true", "overlap_param_gather": "true"}
LAYOUTS = {
    "one process": (1, {}),
    "PP2": (2, PP2),
    "TP2 SP": (2, TP2_SP),
    "PP2 VPP2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
    "CP2 distributed optimizer": (2, {"context_parallel_size": 2} | DISTRIBUTED),
    "DP2 distributed optimizer": (2, DISTRIBUTED),
    "DP2 overlapped": (2, OVERLAPPED),
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
    ("CP2 distributed optimizer", "DP2 overlapped"),
    ("DP2 overlapped", "DP2 distributed optimizer"),
]


def train(flags: list[str]) -> None:
    """What pretrain_sft.py does, inside the pool's process group."""
    from megatron_ext import platform
    from megatron_ext.config import load_config
    from megatron_ext.parallel import create_context
    from megatron_ext.preparation import prepare
    from megatron_ext.trainer import Trainer

    config = load_config(flags)
    parallel = create_context(config, platform.setup("cpu"))
    parts = prepare(config, world_size=parallel.world_size, makes_folders=False)
    Trainer(config, parts.hf, parts.source, parts.data, parallel, parts.teacher).train()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run(ranks, toy: ToyRun):
    """Train under a layout with changed settings; returns the log folder."""

    def start(layout: str, name: str, **changes: Any) -> Path:
        world_size, settings = LAYOUTS[layout]
        log = toy.folder / name.replace(" ", "_")
        ranks.run(world_size, train, toy.flags(**(settings | {"lr_decay_iters": 6, "log_dir": log} | changes)))
        return log

    return start


@pytest.fixture(scope="module")
def undisturbed(run) -> list[dict[str, Any]]:
    """Six iterations in one process: what every resumed run has to repeat."""
    return read_metrics(run("one process", "undisturbed"))


@pytest.fixture(scope="module")
def half_way(toy: ToyRun, run):
    """The folder of a run of some layout, cut off after three of six iterations; made once for each layout."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            folder = toy.folder / f"saved {layout}".replace(" ", "_")
            made[layout] = run(layout, folder.name, train_iters=3, save=folder)
        return made[layout]

    return get


NAMES = ("loss", "grad_norm", "lr", "num_tokens", "consumed_samples")


def numbers(log: Path) -> list[dict[str, float]]:
    return [{name: record[name] for name in NAMES} for record in read_metrics(log)]


@pytest.mark.parametrize(("saved", "resumed"), RESUMES, ids=lambda name: name.replace(" ", "_"))
def test_resume_continues_the_same_curve(run, undisturbed: list, half_way, saved: str, resumed: str) -> None:
    log = run(resumed, f"{saved} to {resumed}", load=half_way(saved))
    records = read_metrics(log)
    assert [record["iteration"] for record in records] == [4, 5, 6]
    for record, expected in zip(records, undisturbed[3:], strict=True):
        assert record["consumed_samples"] == expected["consumed_samples"]
        assert record["lr"] == pytest.approx(expected["lr"], rel=1e-12)
        assert record["num_tokens"] == expected["num_tokens"]
        assert record["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("layout", ["PP2", "TP2 SP", "DP2 distributed optimizer"])
def test_resume_under_the_same_layout_is_exact(run, toy: ToyRun, layout: str) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    save = toy.folder / f"exact {layout}".replace(" ", "_")
    whole = run(layout, f"whole {layout}", **dropout)
    run(layout, save.name, **dropout, train_iters=3, save=save)
    resumed = run(layout, f"resumed {layout}", **dropout, load=save)
    assert numbers(resumed) == numbers(whole)[3:]


def children_after_saving(flags: list[str]) -> list[str]:
    import psutil

    train(flags)
    return [
        " ".join(child.cmdline()) for child in psutil.Process().children() if "resource_tracker" not in child.name()
    ]


def test_saving_leaves_no_process_behind(ranks, toy: ToyRun) -> None:
    """A helper process of the writer would outlive a rank that is killed."""
    flags = toy.flags(train_iters=1, save=toy.folder / "alone", log_dir=None)
    (children,) = ranks.run(1, children_after_saving, flags)
    assert children == []


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_bf16_trains_and_resumes(run, toy: ToyRun, undisturbed: list, optimizer: str) -> None:
    layout = "TP2 distributed optimizer" if optimizer == "adam" else "TP2 SP"
    common = {"bf16": "true", "optimizer": optimizer}
    save = toy.folder / f"bf16_{optimizer}"
    whole = run(layout, f"bf16 {optimizer} whole", **common)
    run(layout, save.name, **common, train_iters=3, save=save)
    resumed = run(layout, f"bf16 {optimizer} resumed", **common, load=save)
    assert numbers(resumed) == numbers(whole)[3:]
    if optimizer == "adam":
        losses = [record["loss"] for record in read_metrics(whole)]
        assert losses == pytest.approx([record["loss"] for record in undisturbed], rel=2e-2)


def test_fp32_sgd_resumes(run, toy: ToyRun) -> None:
    save = toy.folder / "sgd"
    whole = run("PP2", "sgd whole", optimizer="sgd")
    run("PP2", save.name, optimizer="sgd", train_iters=3, save=save)
    assert numbers(run("PP2", "sgd resumed", optimizer="sgd", load=save)) == numbers(whole)[3:]


def test_resume_without_optimizer_states(run, toy: ToyRun, half_way) -> None:
    log = run("PP2", "no optim", load=half_way("PP2"), no_load_optim="true", lr=5e-4)
    records = read_metrics(log)
    assert [record["iteration"] for record in records] == [4, 5, 6]
    save = toy.folder / "bare"
    run("PP2", save.name, train_iters=3, save=save, no_save_optim="true")
    assert [r["iteration"] for r in read_metrics(run("TP2 SP", "from bare", load=save, no_load_optim="true"))] == [
        4,
        5,
        6,
    ]


def test_finetune_starts_again_from_the_weights(run, half_way) -> None:
    settings = {"finetune": "true", "eval_before_training": "true", "train_iters": 2}
    log = run("one process", "finetune", load=half_way("PP2"), **settings)
    at_start, at_save = read_metrics(log, "validation")[0], read_metrics(half_way("PP2"), "validation")[-1]
    assert at_start["iteration"] == 0 and at_save["iteration"] == 3
    assert at_start["loss"] == pytest.approx(at_save["loss"], rel=1e-6)
    assert [record["iteration"] for record in read_metrics(log)] == [1, 2]


def test_changed_data_is_refused(run, toy: ToyRun, half_way) -> None:
    from toy_run import write_toy_data

    other = write_toy_data(toy.folder / "other.jsonl", rows=23)
    with pytest.raises(AssertionError, match=r"cannot be continued on other data.*num_samples was 24 and is now 23"):
        run("one process", "other data", load=half_way("PP2"), train_data_path=other)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": "core_attn"},
    ],
    ids=["full", "selective"],
)
def test_recomputation_changes_nothing(run, undisturbed: list, recompute: dict) -> None:
    log = run("PP2", f"recompute {recompute['recompute_granularity']}", **recompute)
    losses = [record["loss"] for record in read_metrics(log)]
    assert losses == pytest.approx([record["loss"] for record in undisturbed], rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_is_the_exact_mean_over_the_set(run, undisturbed, layout: str) -> None:
    """7 rows: no multiple of anything; padded, topped up with fillers, split over ranks."""
    settings = {"eval_before_training": "true", "eval_after_training": "false", "train_iters": 1, "lr_decay_iters": 6}
    (one,) = read_metrics(
        run("one process", f"evaluate alone {layout}", **settings, eval_micro_batch_size=1), "validation"
    )
    (found,) = read_metrics(run(layout, f"evaluate {layout}", **settings, eval_micro_batch_size=3), "validation")
    assert found["num_tokens"] == one["num_tokens"] and found["num_input_tokens"] == one["num_input_tokens"]
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-6)
