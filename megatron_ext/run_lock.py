"""Keeps two jobs from writing to one run folder: a file `.in_use` in it, held by the main rank while a run lasts.

It works between the nodes of a shared file system: creating a file exclusively and its modification time are all that
it relies on, not locks of the operating system. It needs no torch and no process group.

A holder that is gone does not block the next run. It is known to be gone
- at once, if it ran in this boot of this machine and its process is no longer there;
- at once, if it was an earlier start of the same Slurm job: Slurm ends all of a job before it starts it again;
- after STALE_SECONDS without a sign of life. The holder renews the file's time every BEAT_SECONDS.
A holder that is ended with SIGTERM, as Slurm and torchrun do it, removes the file itself.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAME = ".in_use"
BEAT_SECONDS = 20.0
STALE_SECONDS = 300.0


class RunLock:
    """Holds some folders, which exist, from `acquire` to `release`; a context manager that releases on the way out.

    Args:
        folders: where the run writes; one that is given twice, or by two names, is held once.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._paths = list(dict.fromkeys(Path(folder).resolve() / NAME for folder in folders))
        self._held: list[Path] = []
        self._text = json.dumps(_description())
        self._wake, self._waker = None, None
        self._thread: threading.Thread | None = None

    def acquire(self) -> Self:
        """Take every folder, or none.

        Raises:
            ValueError: another run holds one; it names that run and says what to do.
        """
        try:
            for path in self._paths:
                _take(path, self._text)
                self._held.append(path)
        except BaseException:
            self._remove()
            raise
        self._wake, self._waker = socket.socketpair()
        self._wake.settimeout(BEAT_SECONDS)
        self._waker.setblocking(False)
        self._watch_signals()
        self._thread = threading.Thread(target=self._keep, name="run lock", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Let go; does nothing if nothing is held."""
        if self._thread is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._waker.send(b"\0")
        self._thread.join()
        self._thread = None
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _watch_signals(self) -> None:
        """Let the thread hear of SIGTERM: the main thread may be waiting in a collective, where no handler runs."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def _keep(self) -> None:
        """Renew the files' times until the release; end the process on SIGTERM, and if the folder is lost."""
        while True:
            try:
                received = self._wake.recv(1)
            except TimeoutError:
                received = b""
                self._beat()
            if received == b"\0":
                return
            if received and received[0] == signal.SIGTERM:
                self._remove()
                os._exit(128 + signal.SIGTERM)

    def _beat(self) -> None:
        for path in self._held:
            try:
                mine = path.read_text(encoding="utf-8") == self._text
                os.utime(path)  # without a time: the file server's own, which all nodes compare with
            except FileNotFoundError:
                mine = False
            except OSError:  # the file server does not answer; it may later
                continue
            if not mine:
                # Removed by somebody, or taken over while this process was suspended: another run may be writing.
                print(
                    f"error: {path.parent} is no longer this run's ({path} was removed or replaced); "
                    "the run ends so that two do not write to one folder",
                    file=sys.stderr,
                    flush=True,
                )
                self._remove()
                os._exit(1)

    def _remove(self) -> None:
        for path in self._held:
            with contextlib.suppress(OSError):
                if path.read_text(encoding="utf-8") == self._text:
                    path.unlink()
        self._held = []


def _description() -> dict[str, Any]:
    """This process, as another one needs to know it to tell whether it is still there."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": _process_of(os.getpid()),
        "job": _slurm_job(),
        "start_of_job": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "token": uuid.uuid4().hex,
    }


def _slurm_job() -> str | None:
    """The Slurm job of this process, unique together with its cluster's name."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{job} on {os.environ.get('SLURM_CLUSTER_NAME', 'its cluster')}" if job else None


def _place() -> list[str] | None:
    """What makes a process number unique together with it: this boot, and this container's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    except OSError:
        return None


def _process_of(pid: int) -> list[str] | None:
    """The process that has this number now: where it is, and when it started. None if there is none."""
    place = _place()
    try:
        # behind the name, which may hold anything: field 3 is the state, field 22 the start
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if place is None or fields[0] == "Z" else [*place, fields[19]]


def _take(path: Path, text: str) -> None:
    for _ in range(3):  # a holder that is gone is removed between two tries
        try:
            _create(path, text)
            return
        except FileExistsError:
            pass
        except OSError as error:
            raise ValueError(f"{path.parent} cannot be written to ({error}); give another folder") from None
        try:
            found = path.read_text(encoding="utf-8")
            age = _age(path)
        except FileNotFoundError:
            continue  # released meanwhile
        holder = _parse(found)
        if not _is_gone(holder, age):
            break
        _clear(path, found)
    else:
        found, age = "", 0.0
    raise ValueError(_refusal(path, _parse(found), age))


def _create(path: Path, text: str) -> None:
    """Complete from the first moment: written under another name, then linked, which fails if the name exists."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _clear(path: Path, found: str) -> None:
    """Remove the file if it still is the one that was found: another run may have been quicker to take over."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if aside.read_text(encoding="utf-8") != found:
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink()


def _age(path: Path) -> float:
    """Seconds since the last sign of life, by the file server's clock: nodes' clocks may differ."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as now:
        os.utime(now.name)
        return os.stat(now.name).st_mtime - path.stat().st_mtime


def _parse(text: str) -> dict[str, Any]:
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_gone(holder: dict[str, Any], age: float) -> bool:
    if age > STALE_SECONDS:
        return True
    process, place, pid = holder.get("process"), _place(), holder.get("pid")
    if isinstance(process, list) and place is not None and process[:-1] == place and isinstance(pid, int):
        return _process_of(pid) != process
    job, start = _slurm_job(), holder.get("start_of_job")
    is_same_job = job is not None and holder.get("job") == job and isinstance(start, int)
    return is_same_job and start < int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _refusal(path: Path, holder: dict[str, Any], age: float) -> str:
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{job}, since {holder.get('since', '?')}"
    return (
        f"{path.parent} is in use by another run ({who}; last sign of life {max(0, age):.0f} s ago); wait for its end, "
        f"or give another folder. A run that was killed lets go by itself {STALE_SECONDS / 60:.0f} minutes after its "
        f"last sign of life; if you know that it is gone, remove {path}"
    )
