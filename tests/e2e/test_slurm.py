"""The shipped Slurm scripts under a real Slurm: one controller and two virtual nodes on this machine.

Skipped where Slurm is not installed; with REQUIRE_SLURM=1, as in continuous integration, that is a failure instead.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_programs

from toy_run import ROOT, ToyRun, read_metrics

SCRIPTS = {name: str(ROOT / "scripts" / "slurm" / f"{name}.sbatch") for name in ("sft", "distill", "eval")}
PP2 = {"pipeline_model_parallel_size": 2, "log_dir": None}
VALUES = ("iteration", "loss", "grad_norm", "lr", "num_tokens", "consumed_samples")
LONG = {"train_iters": 200, "save_interval": 20}  # long enough to be cut off in the middle


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing:
        reason = f"Slurm is not installed ({', '.join(missing)} not found); on Debian: apt-get install slurm-wlm munge"
        if os.environ.get("REQUIRE_SLURM") == "1":
            pytest.fail(f"REQUIRE_SLURM is set, but {reason}")
        pytest.skip(reason)
    with SlurmCluster() as slurm:
        # as a user's shell would have it: nothing of the test process, and this Python
        for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            slurm.environment.pop(name, None)
        slurm.environment |= {"PROJECT": str(ROOT), "VENV": str(Path(sys.prefix)), "OMP_NUM_THREADS": "1"}
        yield slurm
    assert slurm.processes() == [], "the Slurm of the tests left processes behind"
    assert not slurm.folder.exists()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


def output_of(job: str, toy: ToyRun) -> str:
    return (toy.folder / f"{job}.out").read_text()


def says(pattern: str, text: str) -> int:
    """How many lines begin like this."""
    return len(re.findall(f"^{pattern}", text, flags=re.MULTILINE))


def wait_for(condition, what: str, timeout: float = 90) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def curve(run: Path) -> list[list[float]]:
    """Each iteration's values; those of a resumed run come twice from its checkpoint on, and the later ones count."""
    records = {record["iteration"]: record for record in read_metrics(run)}
    return [[records[iteration][name] for name in VALUES] for iteration in sorted(records)]


@pytest.fixture(scope="module")
def undisturbed(toy: ToyRun) -> Path:
    """The run folder of the long run under plain torchrun on one node."""
    folder = toy.folder / "undisturbed"
    result = toy.run(2, **PP2 | LONG, save=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def trained(cluster: SlurmCluster, toy: ToyRun) -> tuple[str, Path]:
    """The same run as a job on two nodes: its id and its run folder, a relative path as users write it."""
    config = toy.config("trained", **PP2 | LONG, save="trained")
    job = cluster.submit("--nodes=2", SCRIPTS["sft"], config.name, cwd=toy.folder)
    return job, toy.folder / "trained"


def test_two_nodes_give_the_losses_of_plain_torchrun(cluster: SlurmCluster, toy, trained, undisturbed: Path) -> None:
    job, run = trained
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["NumNodes"]) == ("COMPLETED", "0:0", "2"), output_of(job, toy)
    assert "2 ranks = TP 1 x CP 1 x PP 2 x DP 1" in output_of(job, toy)
    assert len(curve(run)) == 200 and curve(run) == curve(undisturbed)
    logs = run / "logs" / f"job-{job}.0"
    assert {path.name for path in logs.iterdir()} == {"node0", "node1"}, "a torchrun on each node"
    assert "iteration 200/200" in next(logs.glob("node0/*/attempt_0/0/stdout.log")).read_text()
    assert cluster.job_processes(job) == []


def test_a_requeued_job_resumes_and_ends_like_an_undisturbed_one(
    cluster: SlurmCluster, toy: ToyRun, undisturbed: Path
) -> None:
    """It is cut off in the middle. While it runs, another job is kept out of its folder."""
    run = toy.folder / "requeued"
    config = toy.config("requeued", **PP2 | LONG, save=run)
    job = cluster.submit("--nodes=2", SCRIPTS["sft"], str(config), cwd=toy.folder)
    wait_for((run / "latest_checkpointed_iteration.txt").exists, "the first checkpoint")
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: cluster.job_processes(job) == [], "the end of the first start")
    before = len(read_metrics(run))
    assert 20 <= before < 200
    # what a save that was cut off leaves behind must not matter
    (run / "iter_0000180.incomplete").mkdir()

    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), output_of(job, toy)
    resumed = re.search(r"resuming after iteration (\d+)", output_of(job, toy))
    assert resumed and int(resumed[1]) % 20 == 0 and 20 <= int(resumed[1]) <= before
    assert curve(run) == curve(undisturbed)
    assert (run / "latest_checkpointed_iteration.txt").read_text().strip() == "200"
    assert {path.name for path in (run / "logs").iterdir()} == {f"job-{job}.0", f"job-{job}.1"}


def test_a_folder_that_another_job_writes_to_is_refused(cluster: SlurmCluster, toy: ToyRun) -> None:
    run = toy.folder / "busy"
    config = toy.config("busy", **PP2, train_iters=100_000, save=run)
    first = cluster.submit("--nodes=2", SCRIPTS["sft"], str(config), cwd=toy.folder)
    wait_for((run / ".in_use").exists, "the first job's lock")
    second = cluster.submit("--nodes=2", SCRIPTS["sft"], str(config), cwd=toy.folder)
    ended = cluster.wait(second)
    text = output_of(second, toy)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0"), text
    holder = rf"\(process \d+ on {socket.gethostname()}, Slurm job {first} on test, since .* life \d+ s ago\)"
    assert says(rf"error: {run} is in use by another run {holder}", text) == 1, text
    wait_for(lambda: cluster.job_processes(second) == [], "the end of the refused job's processes", timeout=20)
    assert cluster.job(first)["JobState"] == "RUNNING"
    cluster.run("scancel", first)
    assert cluster.wait(first)["JobState"] == "CANCELLED"
    wait_for(lambda: cluster.job_processes(first) == [], "the end of the cancelled job")
    assert not (run / ".in_use").exists(), "a cancelled job lets go of its folder"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_wrong_configuration_ends_with_its_message(cluster: SlurmCluster, toy: ToyRun, script: str) -> None:
    config = toy.config("wrong")
    config.write_text(config.read_text().replace("lr: 0.001", "lr: fast"))
    job = cluster.submit("--nodes=2", SCRIPTS[script], str(config), cwd=toy.folder)
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    assert says(r"(?:error: )?optimizer\.lr: 'fast' .*wrong.yaml", output_of(job, toy)) == 1
    assert "Traceback" not in output_of(job, toy) and cluster.job_processes(job) == []


MISTAKES = {
    "no configuration": ("2", [], {}, r"no configuration was given; use: sbatch"),
    "no checkout": ("1", ["toy.yaml"], {"PROJECT": "/nowhere"}, r"the checkout is not at '/nowhere'; .*set PROJECT"),
    "too few nodes": (
        "1", ["toy.yaml", "--pipeline-model-parallel-size", "2"], {"RANKS_PER_NODE": "1"},
        r"world size 1 .* start a multiple of 2 ranks.*1 node x 1 rank; .* Slurm's --nodes",
    ),
    "too many nodes": (
        "2", ["toy.yaml", "--pipeline-model-parallel-size", "3"], {}, r"world size 4 .* start a multiple of 3 ranks",
    ),
    "missing data": ("2", ["toy.yaml", "--train-data-path", "x.jsonl"], {}, r"data.train_data_path: x.jsonl does not"),
    "no environment": ("1", ["toy.yaml"], {"VENV": "/nowhere"}, r"VENV is /nowhere, but /nowhere/bin/python is not"),
    "no port": ("2", ["toy.yaml"], {"RENDEZVOUS_PORT": "http"}, r"RENDEZVOUS_PORT: 'http' is not a number"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_the_job_at_once(cluster: SlurmCluster, toy: ToyRun, mistake: str) -> None:
    nodes, arguments, environment, message = MISTAKES[mistake]
    toy.config()
    job = cluster.submit(f"--nodes={nodes}", SCRIPTS["sft"], *arguments, cwd=toy.folder, **environment)
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    text = output_of(job, toy)
    assert says(f"error: .*{message}", text) == 1, text
    assert "Traceback" not in text and cluster.job_processes(job) == []


def test_a_rendezvous_port_in_use_is_named(cluster: SlurmCluster, toy: ToyRun) -> None:
    toy.config()
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        job = cluster.submit("--nodes=2", SCRIPTS["sft"], "toy.yaml", cwd=toy.folder, RENDEZVOUS_PORT=port)
        assert cluster.wait(job)["ExitCode"] == "2:0"
    message = rf"error: RENDEZVOUS_PORT: port {port} on \S+ cannot be used \(Address already in use\); set a free one"
    assert says(message, output_of(job, toy)) == 1
    assert cluster.job_processes(job) == []


@pytest.mark.parametrize("variables", [{}, {"PROJECT": str(ROOT)}], ids=["nothing", "PROJECT"])
def test_without_sbatch_it_says_which_variable_is_missing(toy: ToyRun, variables: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PROJECT"))}
    command = ["bash", SCRIPTS["sft"], "toy.yaml"]
    result = subprocess.run(command, env=environment | variables, cwd=toy.folder, capture_output=True, text=True)
    assert result.returncode == 2
    assert re.fullmatch(r"error: .*(set PROJECT|SLURM_JOB_ID is not set).*\n", result.stderr), result.stderr


@pytest.fixture(scope="module")
def can_evaluate() -> None:
    command = [sys.executable, str(ROOT / "pretrain_sft.py"), "--help"]
    if "--eval-only" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout:
        pytest.skip("pretrain_sft.py has no --eval-only yet")


def test_an_evaluation_of_the_checkpoint(cluster: SlurmCluster, toy: ToyRun, trained, can_evaluate) -> None:
    """Under another layout than the training's; the loss is the one that the training ended with."""
    job, run = trained
    assert cluster.wait(job)["JobState"] == "COMPLETED"
    config = toy.config("evaluated", log_dir="evaluated")
    job = cluster.submit("--nodes=2", SCRIPTS["eval"], str(config), "--load", str(run), cwd=toy.folder)
    ended = cluster.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output_of(job, toy)
    (record,) = read_metrics(toy.folder / "evaluated", "validation")
    assert record["loss"] == pytest.approx(read_metrics(run, "validation")[-1]["loss"], rel=1e-6)
    assert read_metrics(toy.folder / "evaluated") == []
