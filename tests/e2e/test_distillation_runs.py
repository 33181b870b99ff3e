"""Distillation as a user starts it: a live teacher, a store written under another layout, a run that goes on from
either, and a student made of a model's layers.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toy_run import ROOT, ToyRun, launch_environment, read_metrics, write_toy_teacher

LOSSES = {
    "losses.kl": "{type: forward_kl, top_k: 8, tail: bucket, temperature: 2, scale_by_temperature_squared: true}",
}
NAMES = ("kl", "lm_loss", "loss", "grad_norm", "num_tokens")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    toy = ToyRun(tmp_path_factory.mktemp("toy"))
    write_toy_teacher(toy.folder / "teacher")
    return toy


def write_store(toy: ToyRun, ranks: int, output: Path, **changes: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    settings = toy.flags(**LOSSES, teacher_path=toy.folder / "teacher", **changes)
    return subprocess.run(
        [*command, str(ROOT / "scripts/cache_teacher.py"), "--output", str(output), *settings],
        cwd=toy.folder,
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )


def curve(folder: Path) -> list[list[float]]:
    return [[record[name] for name in NAMES] for record in read_metrics(folder)]


def test_offline_is_online(toy: ToyRun) -> None:
    """From a live teacher on a pipeline; from a store written on TP 2, on two data-parallel ranks; the store's run is
    stopped and goes on with the live teacher."""
    online, offline, rest = (toy.folder / name for name in ("online", "offline", "rest"))
    common = LOSSES | {"lr": 3e-3, "lr_decay_iters": 6}
    live, stored = {"teacher_path": toy.folder / "teacher"}, {"teacher_cache": toy.folder / "store"}

    result = toy.run(2, **common, **live, pipeline_model_parallel_size=2, log_dir=online)
    assert result.returncode == 0, result.stderr
    assert f"teacher    {toy.folder / 'teacher'}: 6 layers, 48 wide, fp32" in result.stdout
    assert "kl 0" in result.stdout
    result = write_store(toy, 2, toy.folder / "store", tensor_model_parallel_size=2, sequence_parallel="true")
    assert result.returncode == 0, result.stderr
    assert "31/31 samples" in result.stdout and "top 8 at temperature 2.0 of 232 tokens" in result.stdout
    assert "exists already; give a new directory" in write_store(toy, 1, toy.folder / "store").stderr

    result = toy.run(2, **common, **stored, train_iters=4, save=offline, log_dir=None)
    assert result.returncode == 0, result.stderr
    assert f"teacher    {toy.folder / 'store'}: top 8 at temperature 2.0 of 232 tokens" in result.stdout
    result = toy.run(1, **common, **live, load=offline, log_dir=rest)
    # a store is the word of its teacher, so the run may go on with either
    assert result.returncode == 0, result.stderr
    expected = curve(online)
    for values, wanted in zip([*curve(offline), *curve(rest)], expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-3)
    assert expected[-1][0] < 0.85 * expected[0][0], "the divergence falls"
    kl = [record["kl"] for record in read_metrics(online, "validation")]
    assert len(kl) == 1 and kl[0] < expected[0][0]

    write_toy_teacher(toy.folder / "other", seed=2)
    result = toy.run(1, **common, teacher_path=toy.folder / "other", load=offline, log_dir=rest)
    assert "teacher.weights was" in result.stderr

    store = shutil.copytree(toy.folder / "store", toy.folder / "damaged")
    content = bytearray((store / "ids.bin").read_bytes())
    content[33] ^= 4
    (store / "ids.bin").write_bytes(content)
    result = toy.run(2, **common, teacher_cache=store, log_dir=toy.folder / "damaged_log")
    assert result.returncode != 0 and "iteration 1/" not in result.stdout
    assert "is damaged: block 0 of ids.bin does not have its checksum" in result.stderr
    assert "Traceback" not in result.stderr.split("ChildFailedError")[0].split("torch/distributed")[0]


def test_evaluation_against_a_teacher(toy: ToyRun) -> None:
    result = toy.run(
        1, **LOSSES, teacher_path=toy.folder / "teacher", eval_only="true", train_data_path=None, train_iters=None,
        log_dir=toy.folder / "evaluated",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (record,) = read_metrics(toy.folder / "evaluated", "validation")
    assert record["kl"] > 0


def test_a_student_of_some_layers(toy: ToyRun) -> None:
    """Its tensors are the original's, and a run takes it."""
    from safetensors.torch import load_file

    def take(*options: str) -> subprocess.CompletedProcess:
        script = [sys.executable, str(ROOT / "scripts/take_layers.py"), "--model", "teacher", "--output", "student"]
        return subprocess.run(
            [*script, *options], cwd=toy.folder, env=launch_environment(), capture_output=True, text=True, timeout=100
        )

    for options in (
        ("--drop", "5,4"),
        ("--drop", "0,1,2,3,4,5"),
        ("--keep", "0,6"),
        ("--keep", "1,1"),
        ("--every", "0"),
    ):
        result = take(*options)
        assert result.returncode == 2 and f"error: {options[0]} {options[1]}" in result.stderr, options
    assert not (toy.folder / "student").exists()
    result = take("--drop", "1,4")
    assert result.returncode == 0, result.stderr
    assert "4 layers (0, 2, 3, 5) of teacher" in result.stdout
    whole = load_file(toy.folder / "teacher" / "model.safetensors")
    taken = load_file(toy.folder / "student" / "model.safetensors")
    for name, tensor in taken.items():
        parts = name.split(".")
        if "layers" in parts:
            parts[2] = str((0, 2, 3, 5)[int(parts[2])])
        assert tensor.equal(whole.pop(".".join(parts))), name
    assert {name.split(".")[2] for name in whole} == {"1", "4"}, "nothing else is left out"
    assert "exists already" in take("--every", "2").stderr

    student = {"hf_path": toy.folder / "student", "random_init": None}
    result = toy.run(
        1, **LOSSES, **student, teacher_path=toy.folder / "teacher", train_iters=1, log_dir=toy.folder / "layers"
    )
    assert result.returncode == 0, result.stderr
