"""The lock of a run folder: who is refused, who may take over, and what is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ext import run_lock
from megatron_ext.run_lock import NAME, RunLock

HOLD = "import sys, time; from megatron_ext.run_lock import RunLock; RunLock(sys.argv[1:]).acquire(); {then}"
WAIT = "print('held', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)


def hold(folder: Path, then: str = WAIT) -> subprocess.Popen:
    """Another process that takes the folder and does `then`."""
    root = Path(run_lock.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(then=then), str(folder)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    if then == WAIT:
        assert process.stdout.readline() == "held\n"
    return process


def change(folder: Path, **changes: object) -> None:
    """Let the folder's lock say something else, as another node's would."""
    path = folder / NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def abandoned(folder: Path, **changes: object) -> None:
    """A lock of a machine that this one cannot look into, some seconds old."""
    process = hold(folder)
    process.kill()
    process.wait()
    change(folder, **({"host": "elsewhere", "process": ["another boot", "pid:[1]", "7"]} | changes))


def test_a_second_run_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    other = hold(tmp_path)
    with pytest.raises(ValueError) as refused:
        RunLock([tmp_path]).acquire()
    message = str(refused.value)
    assert f"{tmp_path} is in use by another run (process {other.pid} on {socket.gethostname()}, since 20" in message
    assert f"remove {tmp_path / NAME}" in message and "another folder" in message
    other.terminate()
    assert other.wait(10) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [], "a run that is ended lets go at once"
    with RunLock([tmp_path]).acquire():
        assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_of_this_machine_does_not_block(tmp_path: Path) -> None:
    other = hold(tmp_path)
    other.kill()
    other.wait()
    assert (tmp_path / NAME).exists()
    RunLock([tmp_path]).acquire().release()


def test_sigterm_is_heard_while_the_main_thread_does_not_run_python(tmp_path: Path) -> None:
    """As in a collective: nothing but a thread of its own can remove the file then."""
    blocked = "import ctypes; print('held', flush=True); ctypes.CDLL(None).pthread_mutex_lock; " + (
        "m = ctypes.create_string_buffer(64); ctypes.CDLL(None).pthread_mutex_lock(m); "
        "ctypes.CDLL(None).pthread_mutex_lock(m)"
    )
    other = hold(tmp_path, then=blocked)
    assert other.stdout.readline() == "held\n"
    time.sleep(0.3)
    other.terminate()
    assert other.wait(10) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_one_that_stays_silent_on_another_machine_is_replaced(tmp_path: Path) -> None:
    abandoned(tmp_path)
    with pytest.raises(ValueError, match="on elsewhere"):
        RunLock([tmp_path]).acquire()
    long_ago = time.time() - run_lock.STALE_SECONDS - 5
    os.utime(tmp_path / NAME, (long_ago, long_ago))
    RunLock([tmp_path]).acquire().release()


@pytest.mark.parametrize(
    ("job", "restarts", "allowed"), [("12", "1", True), ("12", "0", False), ("13", "1", False), (None, None, False)]
)
def test_only_a_later_start_of_the_same_job_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str | None, restarts: str | None, allowed: bool
) -> None:
    abandoned(tmp_path, job="12 on big", start_of_job=0)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if allowed:
        RunLock([tmp_path]).acquire().release()
    else:
        with pytest.raises(ValueError, match="Slurm job 12 on big"):
            RunLock([tmp_path]).acquire()


def test_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    with RunLock([tmp_path]).acquire():
        os.utime(tmp_path / NAME, (0, 0))
        deadline = time.monotonic() + 5
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert time.time() - (tmp_path / NAME).stat().st_mtime < 60


@pytest.mark.parametrize("change_it", ["remove", "replace"])
def test_a_run_that_lost_its_folder_ends(tmp_path: Path, change_it: str) -> None:
    then = "print('held', flush=True); time.sleep(60)"
    quick = "import megatron_ext.run_lock as r; r.BEAT_SECONDS = 0.1; "
    root = Path(run_lock.__file__).parent.parent
    other = subprocess.Popen(
        [sys.executable, "-c", quick + HOLD.format(then=then), str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
    )  # fmt: skip
    assert other.stdout.readline() == "held\n"
    if change_it == "remove":
        (tmp_path / NAME).unlink()
    else:
        change(tmp_path, token="another")
    _, message = other.communicate(timeout=10)
    assert other.returncode == 1 and "no longer this run's" in message
    assert (tmp_path / NAME).exists() == (change_it == "replace"), "the other run's lock stays"


def test_all_folders_or_none(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (tmp_path / "link").symlink_to(first)
    other = hold(second)
    with pytest.raises(ValueError, match="second"):
        RunLock([first, tmp_path / "link", second]).acquire()
    assert list(first.iterdir()) == []
    other.terminate()
    other.wait()
    with RunLock([first, tmp_path / "link"]).acquire():
        pass


def test_several_at_once_over_a_dead_holder(tmp_path: Path) -> None:
    """Exactly one of many that start together gets the folder."""
    abandoned(tmp_path)
    os.utime(tmp_path / NAME, (0, 0))
    program = (
        "import sys, time; from megatron_ext.run_lock import RunLock\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "try: RunLock([sys.argv[1]]).acquire()\n"
        "except ValueError: sys.exit(3)\n"
        "time.sleep(2)"
    )
    root = Path(run_lock.__file__).parent.parent
    start = str(time.time() + 1)
    several = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), start], cwd=root) for _ in range(6)]
    assert sorted(process.wait(20) for process in several) == [0, 3, 3, 3, 3, 3]


def test_a_damaged_file_counts_as_held(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("[")
    with pytest.raises(ValueError, match=r"process \? on \?"):
        RunLock([tmp_path]).acquire()
