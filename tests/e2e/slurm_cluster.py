"""A Slurm of its own for tests: munged, one controller and two virtual nodes on this machine, in one folder.

It owns starting and stopping them and asking about jobs, not what jobs do. Everything (configuration, sockets, keys,
state, logs, ports) is separate from a Slurm that the machine may have, and only processes that carry this folder in
their environment are ended.
"""

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
NODES = {"node1": "127.0.0.1", "node2": "127.0.0.2"}
FINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
PR_SET_PDEATHSIG = 1

# The timeouts are long: on a busy machine a message that is not answered in time is tried again only a minute later.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
TCPTimeout=30
MessageTimeout=60
SlurmdParameters=config_overrides
{nodes}
PartitionName=test Nodes={node_names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing_programs() -> list[str]:
    """What this machine lacks of Slurm; the daemons are in sbin, which is not on everybody's path."""
    return [name for name in PROGRAMS if _program(name) is None]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all open at once so that none comes twice."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _die_with_parent() -> None:
    """In a daemon, before it starts: a test process that is killed takes its Slurm with it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class SlurmCluster:
    """A running Slurm with two nodes; use as a context manager.

    `environment` is what its client programs need, and nothing of another Slurm's.
    """

    def __init__(self) -> None:
        # not pytest's folder: socket paths have to be short, and munge wants folders that others can enter
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not re.match(r"(SLURM|SBATCH|SQUEUE)_", name)}
        self.environment = kept | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> "SlurmCluster":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------------------------ asking

    def run(self, *command: str, timeout: float = 30, **environment: str) -> str:
        """One of Slurm's client programs; its output."""
        result = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=timeout
        )
        assert result.returncode == 0, f"{' '.join(command)}: {result.stdout}{result.stderr}{self._daemon_logs()}"
        return result.stdout.strip()

    def submit(self, *arguments: str, cwd: Path, **environment: str) -> str:
        """sbatch; the job's id. It runs in cwd, and its output goes to cwd/<job id>.out."""
        options = ("--parsable", f"--chdir={cwd}", f"--output={cwd}/%j.out")
        return self.run("sbatch", *options, *arguments, **environment).split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it: JobState, ExitCode, Restarts, ..."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job)))

    def wait(self, job: str, timeout: float = 200) -> dict[str, str]:
        """Until the job has ended; what `job` says then."""
        deadline = time.monotonic() + timeout
        while (found := self.job(job))["JobState"] not in FINAL_STATES:
            assert time.monotonic() < deadline, f"job {job} is still {found}\n{self._daemon_logs()}"
            time.sleep(0.3)
        return found

    def processes(self) -> list[int]:
        """Every process that was started in this Slurm: the daemons', the steps', the jobs'."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:  # it ended meanwhile, or is another user's
                continue
        return found

    def job_processes(self, job: str) -> list[int]:
        """The processes of one job that still run."""
        mark = f"SLURM_JOB_ID={job}".encode()
        return [pid for pid in self.processes() if mark in _read(Path(f"/proc/{pid}/environ")).split(b"\0")]

    # ------------------------------------------------------------------------------------- starting, stopping

    def _start(self) -> None:
        controller_port, *node_ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2 State=UNKNOWN"
            for (name, address), port in zip(NODES.items(), node_ports, strict=True)
        ]
        text = CONFIGURATION.format(
            folder=self.folder,
            host=host,
            controller_port=controller_port,
            user=_user_name(),
            nodes="\n".join(nodes),
            node_names=",".join(NODES),
        )
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "munge.sock", "key-file": key.name, "pid-file": "munge.pid", "log-file": "munge.log"}
        files["seed-file"] = "munge.seed"
        paths = [f"--{option}={self.folder / name}" for option, name in files.items()]
        # --force: /tmp is writable by everybody, which munged only accepts when told to
        self._spawn("munged", "--foreground", "--force", *paths)
        self._wait_for("munged", lambda: (self.folder / "munge.sock").exists())
        self._spawn("slurmctld", "-D")
        for name in NODES:
            (self.folder / f"spool.{name}").mkdir()
            self._spawn("slurmd", "-D", "-N", name)
        self._wait_for("slurmd", self._nodes_are_idle)

    def _nodes_are_idle(self) -> bool:
        result = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=self.environment, capture_output=True, text=True
        )
        return result.stdout.split() == ["idle"] * len(NODES)

    def _spawn(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None, f"{name} is not installed"
        with (self.folder / f"{name}.out").open("ab") as output:
            daemon = subprocess.Popen(
                [program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._daemons.append(daemon)

    def _wait_for(self, name: str, condition, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended\n{self._daemon_logs()}"
            assert time.monotonic() < deadline, f"{name} did not come up\n{self._daemon_logs()}"
            time.sleep(0.2)

    def _daemon_logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}\n" for path in paths)

    def stop(self) -> None:
        """End the jobs, then the daemons, then whatever of this Slurm is still there; remove the folder."""
        subprocess.run(["scancel", "--state=PENDING"], env=self.environment, capture_output=True, timeout=30)
        subprocess.run(["scancel", "--full", "-u", _user_name()], env=self.environment, capture_output=True, timeout=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 5
            while (left := [pid for pid in self.processes() if pid != os.getpid()]) and time.monotonic() < deadline:
                for pid in left:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        continue
                time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _user_name() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
