"""Where the numbers of a run go: metrics.jsonl and, if asked for, Weights & Biases.

Only rank 0 writes. Values arrive as they are; NaN and infinity are written, never hidden.
"""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from megatron_ext.config import Config
from megatron_ext.parallel import ParallelContext

Record = dict[str, Any]


class Sink(Protocol):
    """Takes one record: `split`, `iteration` and the metrics."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Appends each record as one line; a resumed run goes on in the same file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        # NaN and infinity become NaN and Infinity, which Python's json and pandas read back
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """Sends each record to one run; metric names are prefixed with the split."""

    def __init__(self, config: Config, directory: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                f"logging.wandb_project is {config.logging.wandb_project!r}, but wandb is not installed; "
                "install the extra: pip install 'megatron-ext[wandb]'"
            ) from None
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=config.logging.wandb_exp_name,
            dir=str(directory),
            config=config.to_dict(),
        )

    def write(self, record: Record) -> None:
        values = {f"{record['split']}/{name}": value for name, value in record.items() if name != "split"}
        self._run.log(values, step=record["iteration"])

    def close(self) -> None:
        self._run.finish()


class MetricsLog:
    """The run's sinks as one; writes nothing on other ranks than 0. A context manager: closes them on the way out."""

    def __init__(self, config: Config, parallel: ParallelContext) -> None:
        self._sinks: list[Sink] = []
        if parallel.is_main:
            directory = Path(config.log_directory)
            directory.mkdir(parents=True, exist_ok=True)
            self._sinks.append(JsonLines(directory / "metrics.jsonl"))
            if config.logging.wandb_project:
                self._sinks.append(WeightsAndBiases(config, directory))

    def write(self, split: str, record: Record) -> None:
        for sink in self._sinks:
            sink.write({"split": split, **record})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


class Stopwatch:
    """Time spent training since the last reading, pauses left out."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._paused_at: float | None = None

    def __enter__(self) -> None:
        """Pause, for an evaluation or a save: `with stopwatch: ...`."""
        self._paused_at = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        assert self._paused_at is not None
        self._started += time.perf_counter() - self._paused_at

    def read(self) -> float:
        """Seconds since the last reading; starts again at 0."""
        now = time.perf_counter()
        elapsed, self._started = now - self._started, now
        return elapsed
