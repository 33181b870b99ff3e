"""What the launch scripts ask of scripts/launch_plan.py: the number of ranks, and what a job that starts again adds."""

import importlib.util
import socket
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ext.config import Config, ConfigError
from megatron_ext.run_folder import LATEST

PATH = Path(__file__).resolve().parent.parent.parent / "scripts" / "launch_plan.py"


@pytest.fixture(scope="module")
def plan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_plan", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(**sections: dict) -> Config:
    return Config.from_dict({"model": {"hf_path": "x"}, **sections})


@pytest.mark.parametrize(
    ("nodes", "gpus", "device", "stages", "expected"),
    [
        (1, 8, "auto", 2, 8),
        (2, 8, "cuda", 4, 8),
        (1, 8, "cpu", 2, 2),  # asked for the CPU on a machine with GPUs
        (1, 0, "auto", 1, 1),
        (1, 0, "auto", 6, 6),
        (2, 0, "auto", 6, 3),
        (2, 0, "auto", 1, 1),
        (2, 0, "auto", 3, 2),  # enough; whether it fits is check_ranks' question
    ],
)
def test_ranks_on_each_node(plan, nodes: int, gpus: int, device: str, stages: int, expected: int) -> None:
    config = configuration(training={"device": device}, parallel={"pipeline_model_parallel_size": stages})
    assert plan.ranks_on_each_node(config, nodes, gpus) == expected


def test_a_layout_that_does_not_fit(plan) -> None:
    config = configuration(parallel={"pipeline_model_parallel_size": 3})
    plan.check_ranks(config, nodes=3, ranks_per_node=1)
    with pytest.raises(ConfigError, match=r"^world size 8 .*they would be 2 nodes x 4 ranks; RANKS_PER_NODE"):
        plan.check_ranks(config, nodes=2, ranks_per_node=4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"load": "base"}, []),
        ({"load": "base", "finetune": True}, ["--finetune", "false"]),
        ({"load": "base", "no_load_optim": True}, ["--no-load-optim", "false"]),
        # without saved states there are none to load
        ({"load": "base", "no_load_optim": True, "no_save_optim": True}, []),
    ],
)
def test_a_job_that_starts_again(plan, tmp_path: Path, settings: dict, expected: list[str]) -> None:
    save = str(tmp_path)
    config = configuration(checkpoint={"save": save, **settings})
    assert plan.arguments_of_a_restart(config) == [], "nothing was saved yet"
    (tmp_path / LATEST).write_text("3\n")
    assert plan.arguments_of_a_restart(config) == ["--load", save, *expected]
    assert plan.arguments_of_a_restart(configuration()) == []


def test_what_it_prints(plan, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LATEST).write_text("3\n")
    run = ["--hf-path", str(tmp_path / "model"), "--random-init", "--tokenizer-path", str(tmp_path / "model")]
    run += ["--train-data-path", str(tmp_path / "train.jsonl"), "--train-iters", "1", "--save", str(tmp_path / "run")]
    run += ["--pipeline-model-parallel-size", "4", "--device", "cpu"]
    assert plan.main(["--nodes", "2", "--again", "--", *run]) == 0
    lines = ["ranks_per_node=2", f"run_folder={tmp_path}/run", "argument=--load", f"argument={tmp_path}/run"]
    assert capsys.readouterr().out.splitlines() == lines
    assert plan.main(["--nodes", "2", "--", *run, "--train-data-path", "x.jsonl"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: data.train_data_path: x.jsonl does not exist")
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        assert plan.main(["--nodes", "2", "--rendezvous-port", port, "--", *run]) == 2
    assert f"RENDEZVOUS_PORT: port {port} on " in capsys.readouterr().err
    assert plan.main(["--nodes", "2", "--rendezvous-port", port, "--", *run]) == 0
