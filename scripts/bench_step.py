"""Times one training step of this project against the same step with transformers and torch's AdamW.

    python scripts/bench_step.py [--config examples/sft_smollm2.yaml] [--pairs 5] [--json FILE]

Both train the same model on the same micro-batches in fp32: ours on the ranks of the configured layout with one
thread each, transformers in one process with as many threads. All processes stay alive and take turns, ours, theirs,
ours, ...; those that wait sleep. The figure to quote is the median of the ratios of neighbouring steps.
"""

import argparse
import json
import multiprocessing
import os
import platform as machine
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from megatron_ext.config import Config, load_config

WARM_UP = 2


def _serve(connection: Any, step: Any) -> None:
    """Do one step for every message; answer with the loss."""
    connection.send("ready")
    while connection.recv():
        connection.send(step())


def join_ranks(rank: int, world_size: int, port: int, threads: int) -> Any:
    """Make this process one rank on this machine's CPUs; returns the chosen platform."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from megatron_ext import platform

    chosen = platform.setup("cpu")
    import torch

    torch.set_num_threads(threads)
    return chosen


@contextmanager
def trainer_on_rank(config: Config, rank: int, world_size: int, port: int) -> Iterator[Any]:
    """One rank's trainer of the configured run, with one thread."""
    chosen = join_ranks(rank, world_size, port, threads=1)
    from megatron_ext.parallel import parallel_session
    from megatron_ext.preparation import prepare
    from megatron_ext.trainer import Trainer

    parts = prepare(config, world_size=world_size, makes_folders=False)
    with parallel_session(config, chosen) as parallel:
        yield Trainer(config, parts.hf, parts.source, parts.data, parallel, parts.teacher)


def run_rank(connection: Any, config: Config, rank: int, world_size: int, port: int) -> None:
    """One rank of ours."""
    try:
        with trainer_on_rank(config, rank, world_size, port) as trainer:
            _serve(connection, lambda: trainer.step(return_per_token_outputs=False)[0].metrics["loss"])
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def run_transformers(connection: Any, config: Config, threads: int) -> None:
    """The same steps with transformers' model, torch's AdamW and a plain loop over micro-batches."""
    try:
        import torch
        from torch.nn.functional import cross_entropy
        from transformers import AutoModelForCausalLM

        from megatron_ext.data import TrainLoader, load_run_data

        torch.set_num_threads(threads)
        path = Path(config.model.hf_path)
        gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        model = AutoModelForCausalLM.from_pretrained(path.parent if gguf else path, dtype=torch.float32, **gguf)
        model.train()
        data = load_run_data(config)
        loader = TrainLoader(
            data.train,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=0,
            dp_size=1,
            seed=config.training.seed,
            seq_length=config.data.seq_length,
            pad_id=data.pad_id,
        )
        settings = config.optimizer
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
        )

        def step() -> float:
            optimizer.zero_grad()
            batches = loader.next_step()
            weight = sum(batch.loss_mask.sum() for batch in batches)
            total = 0.0
            for batch in batches:
                logits = model(input_ids=batch.input_ids).logits
                losses = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
                loss = (losses * batch.loss_mask.flatten()).sum() / weight
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
            optimizer.step()
            return total

        _serve(connection, step)
    except BaseException:
        connection.send(traceback.format_exc())
        raise


class Contender:
    """A group of processes that do a step together."""

    def __init__(self, name: str, processes: list[Any], connections: list[Any]) -> None:
        self.name, self.processes, self.connections = name, processes, connections
        self.losses: list[float] = []
        self.answers: list[Any] = []

    def wait_until_ready(self) -> None:
        for connection in self.connections:
            answer = connection.recv()
            if answer != "ready":
                sys.exit(f"{self.name} did not start:\n{answer}")

    def step(self, message: Any = True) -> float:
        """Seconds for one step of all processes; what they answer is in `answers`."""
        started = time.perf_counter()
        for connection in self.connections:
            connection.send(message)
        answers = [connection.recv() for connection in self.connections]
        elapsed = time.perf_counter() - started
        for answer in answers:
            if isinstance(answer, str):
                sys.exit(f"{self.name} failed:\n{answer}")
        self.answers = answers
        self.losses.append(answers[0])
        return elapsed

    def stop(self) -> None:
        for connection in self.connections:
            connection.send(False)
        for process in self.processes:
            process.join(timeout=20)
            process.kill()


def start(name: str, context: Any, calls: list[tuple]) -> Contender:
    processes, connections = [], []
    for function, *arguments in calls:
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        process.start()
        processes.append(process)
        connections.append(ours)
    return Contender(name, processes, connections)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def compare(config: Config, pairs: int) -> dict[str, Any]:
    """Alternate the two for `pairs` counted steps each; seconds, ratios and losses."""
    world_size = config.model_parallel_size
    context = multiprocessing.get_context("spawn")
    port = free_port()
    os.environ["OMP_NUM_THREADS"] = "1"
    ours = start("ours", context, [(run_rank, config, rank, world_size, port) for rank in range(world_size)])
    os.environ["OMP_NUM_THREADS"] = str(world_size)
    theirs = start("transformers", context, [(run_transformers, config, world_size)])
    try:
        for contender in (ours, theirs):
            contender.wait_until_ready()
        for _ in range(WARM_UP):
            ours.step(), theirs.step()
        seconds = [(ours.step(), theirs.step()) for _ in range(pairs)]
    finally:
        ours.stop(), theirs.stop()
    return {
        "ours_seconds": [pair[0] for pair in seconds],
        "transformers_seconds": [pair[1] for pair in seconds],
        "ratios": [pair[0] / pair[1] for pair in seconds],
        "ours_losses": ours.losses,
        "transformers_losses": theirs.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="examples/sft_smollm2.yaml", help="what to train (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="counted steps of each (default: %(default)s)")
    parser.add_argument("--global-batch-size", default="16", help="samples a step (default: %(default)s)")
    parser.add_argument("--micro-batch-size", default="2", help="samples a micro-batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    batch = ["--global-batch-size", arguments.global_batch_size, "--micro-batch-size", arguments.micro_batch_size]
    same_lr = ["--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--lr-warmup-init", "0"]
    nowhere = ["--save", "none", "--save-hf", "none", "--valid-data-path", "none", "--no-eval-before-training"]
    config = load_config(["--config", arguments.config, *batch, *same_lr, *nowhere])
    if not Path(config.model.hf_path).exists():
        sys.exit(f"{config.model.hf_path} is not there; `make sft` fetches it")

    figures = compare(config, arguments.pairs)
    ratio, p = statistics.median(figures["ratios"]), config.parallel
    micro_batches = config.num_micro_batches(config.model_parallel_size)
    print(f"machine: {machine.processor() or machine.machine()}, {os.cpu_count()} cores")
    print(
        f"step of {config.training.global_batch_size} samples in {micro_batches} "
        f"micro-batches, fp32, {arguments.pairs} alternating pairs, medians:"
    )
    layout = f"TP {p.tensor_model_parallel_size} PP {p.pipeline_model_parallel_size} CP {p.context_parallel_size}"
    print(
        f"  ours, {config.model_parallel_size} ranks ({layout})   {statistics.median(figures['ours_seconds']):6.2f} s"
    )
    print(f"  transformers, 1 process          {statistics.median(figures['transformers_seconds']):6.2f} s")
    print(f"  ratio of pairs: median {ratio:.3f}, from {min(figures['ratios']):.3f} to {max(figures['ratios']):.3f}")
    drift = max(abs(a / b - 1) for a, b in zip(figures["ours_losses"], figures["transformers_losses"], strict=True))
    print(f"  largest relative difference of the losses: {drift:.1e}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures | {"median_ratio": ratio}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
