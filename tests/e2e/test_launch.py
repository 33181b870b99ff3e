"""scripts/launch_local.sh as a user calls it, and two torchrun agents on two addresses: the same losses as on one node,
and for every mistake one clear message, a non-zero exit code and nothing left running.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from toy_run import ROOT, ToyRun, launch_environment, read_metrics

SCRIPT = ROOT / "scripts" / "launch_local.sh"
ADDRESSES = ("127.0.0.1", "127.0.0.2")
VALUES = ("iteration", "loss", "grad_norm", "lr", "num_tokens")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


def environment_of_a_user(path: Path | None = None, **changes: str) -> dict[str, str]:
    """Without what the test process itself has set for one rank; with this Python instead of the checkout's."""
    environment = launch_environment(path) | {"VENV": str(Path(sys.prefix))}
    del environment["OMP_NUM_THREADS"]
    return environment | changes


def launch_local(
    *arguments: object, cwd: Path, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        cwd=cwd, env=environment_of_a_user(path, **environment), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that name this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if str(folder) in line and int(path.parent.name) != os.getpid():
            found.append(line)
    return found


def curve(log_directory: Path) -> list[list[float]]:
    return [[record[name] for name in VALUES] for record in read_metrics(log_directory)]


@pytest.fixture(scope="module")
def single_node(toy: ToyRun) -> tuple[subprocess.CompletedProcess, Path]:
    """A run of launch_local.sh with two pipeline stages: its output and its run folder."""
    config = toy.config("single", pipeline_model_parallel_size=2, log_dir=None, save="run")
    return launch_local(config, cwd=toy.folder), toy.folder / "run"


def test_as_many_ranks_as_the_layout_needs_with_a_log_each(single_node) -> None:
    result, run = single_node
    assert result.returncode == 0, result.stderr
    assert "\nlayout     2 ranks = TP 1 x CP 1 x PP 2 x DP 1" in result.stdout
    assert "\niteration 6/6 | lm_loss" in result.stdout, "the first rank's progress, without a prefix"
    logs = {path.parent.name: path.read_text() for path in run.glob("logs/*/*/attempt_0/*/stdout.log")}
    assert logs.keys() == {"0", "1"}
    assert "iteration 6/6" in logs["0"] and "iteration" not in logs["1"]
    assert len(list(run.glob("logs/*/*/attempt_0/*/stderr.log"))) == 2
    assert str(run / "logs") in result.stdout, "it says where they are"
    assert not (run / ".in_use").exists()


def test_overrides_and_threads(toy: ToyRun) -> None:
    """Flags behind the configuration win; each rank gets its share of the cores, and its variables."""
    spy = toy.folder / "spy"
    spy.mkdir()
    names = "('OMP_NUM_THREADS', 'CUDA_DEVICE_MAX_CONNECTIONS')"
    report = "import atexit, os, sys\nif 'RANK' in os.environ and 'pretrain_sft' in ''.join(sys.orig_argv):\n"
    report += f"    atexit.register(lambda: print('variables', [os.environ.get(name) for name in {names}]))\n"
    (spy / "sitecustomize.py").write_text(report)
    config = toy.config("overrides", train_iters=1, log_dir=toy.folder / "overrides")
    result = launch_local(config, "--tensor-model-parallel-size", 2, cwd=toy.folder, path=spy)
    assert result.returncode == 0, result.stderr
    assert "2 ranks = TP 2 x CP 1 x PP 1 x DP 1" in result.stdout
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert result.stdout.count(f"variables ['{threads}', '1']") == 2, result.stdout


def test_the_error_of_the_first_failing_rank_is_on_the_terminal(toy: ToyRun) -> None:
    """Rank 1 fails while rank 0 goes on; it is rank 0 that the terminal usually shows."""
    fake = toy.folder / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'megatron_ext.trainer':\n"
        "            raise RuntimeError('this rank is broken')\n"
        "if os.environ.get('RANK') == '1':\n"
        "    sys.meta_path.insert(0, Broken())\n"
    )
    log = toy.folder / "failing"
    config = toy.config("failing", pipeline_model_parallel_size=2, log_dir=log)
    result = launch_local(config, cwd=toy.folder, path=fake)
    assert result.returncode == 1
    assert "RuntimeError: this rank is broken" in result.stderr
    (text,) = [path.read_text() for path in log.glob("logs/*/*/attempt_0/1/stderr.log")]
    assert "RuntimeError: this rank is broken" in text
    assert processes_of(toy.folder) == []


MISTAKES = {
    "no configuration": ([], {}, r"no configuration was given; use: \S+launch_local.sh CONFIG"),
    "no file": (["nowhere.yaml"], {}, r"nowhere.yaml"),
    "unknown setting": (["toy.yaml", "--train-iter", 3], {}, r"--train-iter is not a flag; did you mean --train-iters"),
    "missing data": (["toy.yaml", "--train-data-path", "x.jsonl"], {}, r"data.train_data_path: x.jsonl does not"),
    "too few ranks": (
        ["toy.yaml", "--pipeline-model-parallel-size", 2], {"RANKS_PER_NODE": "1"},
        r"world size 1 .* = 2; start a multiple of 2 ranks.*1 node x 1 rank; RANKS_PER_NODE changes",
    ),
    "no number of ranks": (["toy.yaml"], {"RANKS_PER_NODE": "two"}, r"RANKS_PER_NODE: 'two' is not a number"),
    "no environment": (["toy.yaml"], {"VENV": "/nowhere"}, r"VENV is /nowhere, but /nowhere/bin/python is not there"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_a_rank_starts(toy: ToyRun, mistake: str) -> None:
    arguments, environment, message = MISTAKES[mistake]
    toy.config()
    result = launch_local(*arguments, cwd=toy.folder, **environment)
    assert result.returncode == 2
    assert re.search(f"^error: .*{message}", result.stderr), result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert processes_of(toy.folder) == []


@contextmanager
def held_by_another(folder: Path) -> Iterator[int]:
    """Another process that writes to a run folder; its number."""
    folder.mkdir(exist_ok=True)
    program = (
        "import sys, time; from megatron_ext.run_lock import RunLock; RunLock(sys.argv[1:]).acquire(); "
        "print('held', flush=True); time.sleep(100)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], env=launch_environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_run_folder_in_use_is_refused(toy: ToyRun) -> None:
    folder = toy.folder / "in_use"
    config = toy.config("in_use", pipeline_model_parallel_size=2, log_dir=None, save=folder)
    with held_by_another(folder) as pid:
        result = launch_local(config, cwd=toy.folder)
        assert result.returncode == 1
        message = rf"^error: {folder} is in use by another run \(process {pid} on "
        assert len(re.findall(message, result.stderr, flags=re.MULTILINE)) == 1, result.stderr
        assert not (folder / "metrics.jsonl").read_text() and not list(folder.glob("iter_*"))
    result = launch_local(config, cwd=toy.folder)
    assert result.returncode == 0, "the killed process does not block:\n" + result.stderr


# ------------------------------------------------------------------------------------------------ several nodes


def on_two_nodes(program: Path, *arguments: object, cwd: Path, timeout: float = 100) -> list[tuple[int, str, str]]:
    """The same command under a torchrun on each of two addresses; exit code, output and errors of both."""
    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{port}", "--local-addr", address),
                *("--rdzv-id", "test", str(program), *map(str, arguments)),
            ],
            cwd=cwd, env=launch_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for address in ADDRESSES
    ]  # fmt: skip
    deadline = time.monotonic() + timeout
    try:
        outputs = [agent.communicate(timeout=max(0, deadline - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs, strict=True)]


def test_two_nodes_give_the_losses_of_one(toy: ToyRun, single_node) -> None:
    flags = toy.flags(pipeline_model_parallel_size=2, log_dir=None, save=toy.folder / "two_nodes")
    results = on_two_nodes(ROOT / "pretrain_sft.py", *flags, cwd=toy.folder)
    assert [code for code, _, _ in results] == [0, 0], results
    expected = curve(single_node[1])
    assert len(expected) == 6 and curve(toy.folder / "two_nodes") == expected


def test_a_folder_in_use_ends_both_nodes(toy: ToyRun) -> None:
    """Only the main rank sees it; the other node's rank must not wait for the group's timeout of minutes."""
    folder = toy.folder / "in_use_by_two"
    with held_by_another(folder):
        flags = toy.flags(pipeline_model_parallel_size=2, log_dir=None, save=folder)
        results = on_two_nodes(ROOT / "pretrain_sft.py", *flags, cwd=toy.folder)
    assert all(code != 0 for code, _, _ in results)
    errors = "".join(error for _, _, error in results)
    assert len(re.findall(r"^error: .* is in use by another run", errors, flags=re.MULTILINE)) == 1
    assert processes_of(folder) == []


PROGRAM = """
import sys, time
from megatron_ext import platform
from megatron_ext.config import Config
chosen = platform.setup("cpu")
from megatron_ext.parallel import one_for_all, parallel_session
config = Config.from_dict({"model": {"hf_path": "x"}, "parallel": {"distributed_timeout_minutes": 0.05}})
with parallel_session(config, chosen) as parallel:
    for _ in range(2):
        with one_for_all(parallel, "conversion") as is_mine:
            if is_mine:
                if "fail" in sys.argv:
                    raise RuntimeError("the conversion failed")
                time.sleep(5)
                print("converted", flush=True)
    print(f"rank {parallel.rank} went on", flush=True)
"""


@pytest.mark.parametrize("what", ["work", "fail"])
def test_one_rank_works_for_all_without_a_timeout(tmp_path: Path, what: str) -> None:
    """The work takes longer than a collective may (three seconds here); if it fails, nobody goes on waiting."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    results = on_two_nodes(program, what, cwd=tmp_path)
    output = "".join(out for _, out, _ in results)
    errors = "".join(error for _, _, error in results)
    if what == "work":
        assert [code for code, _, _ in results] == [0, 0], errors
        assert output.count("converted") == 2 and "rank 0 went on" in output and "rank 1 went on" in output
    else:
        assert all(code != 0 for code, _, _ in results)
        assert errors.count("RuntimeError: the conversion failed") == 1 and "went on" not in output
    assert processes_of(tmp_path) == []
