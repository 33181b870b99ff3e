"""Times a training step with the gate of the per-token outputs closed, open, and with the scheme it replaces.

    python scripts/bench_gate.py [--config examples/sft_smollm2.yaml] [--rounds 7] [--json FILE]

The scheme it replaces builds Python lists: `.tolist()` of every sequence's values in every micro-batch, and a pickled
broadcast over the pipeline. All of it happens in one run, on the same ranks: each round has a step of every kind, so
that a busy machine slows all of them, and the figure to quote is the median of the ratios within a round. `closed
again` is a second step with a closed gate: what its ratio differs from 1 is noise. Bytes are counted in further steps.
"""

import argparse
import json
import multiprocessing
import os
import platform as machine
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from bench_step import Contender, free_port, start, trainer_on_rank

from megatron_ext.config import Config, load_config

KINDS = ("closed", "open", "lists", "closed again")
WARM_UP = 1


def list_outputs(fields: list[str], parallel: Any) -> Any:
    """A collector with the interface of TokenOutputs that does it the old way."""
    import torch.distributed as dist

    from megatron_ext.outputs import TokenOutputs

    class ListOutputs(TokenOutputs):
        def collect(self, values: list) -> None:
            rows = zip(*(value.detach().float().tolist() for value in values), strict=True)
            self._collected += [dict(zip(self.fields, row, strict=True)) for row in rows]

        def deliver(self, micro_batches: list) -> list[dict[str, list[float]]]:
            box = [self._collected]
            if self.parallel.pp_size > 1:
                last = dist.get_global_rank(self.parallel.pg.pp, self.parallel.pp_size - 1)
                dist.broadcast_object_list(box, src=last, group=self.parallel.pg.pp)
            return box[0]

    return ListOutputs(fields, parallel)


def run_rank(connection: Any, config: Config, rank: int, world_size: int, port: int) -> None:
    """One rank: does the step of the kind it is told, and answers with the loss, or with the bytes where counted."""
    try:
        from traffic import Traffic

        with trainer_on_rank(config, rank, world_size, port) as trainer:
            wrapper = trainer.wrapper
            open_gate = wrapper._open_gate

            def step(kind: str) -> float:
                result, _ = trainer.step(return_per_token_outputs=kind in ("open", "lists"))
                return result.metrics["loss"]

            def count(kind: str) -> int:
                """Bytes of a step without the optimizer's part, which is the same for all."""
                wrapper.zero_grad()
                with Traffic() as traffic:
                    wrapper.forward_backward(batches, return_per_token_outputs=kind in ("open", "lists"))
                return traffic.num_bytes

            batches = trainer.loader.next_step()
            connection.send("ready")
            while message := connection.recv():
                kind, is_counted = message
                wrapper._open_gate = open_gate
                if kind == "lists":
                    wrapper._open_gate = lambda: list_outputs(wrapper.per_token_fields, trainer.parallel)
                connection.send(count(kind) if is_counted else step(kind))
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def measure(config: Config, rounds: int) -> dict[str, Any]:
    """Seconds of every step by kind, and the bytes that the ranks together communicate in one."""
    world_size = config.model_parallel_size
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    port = free_port()
    calls = [(run_rank, config, rank, world_size, port) for rank in range(world_size)]
    ranks: Contender = start("the ranks", context, calls)
    try:
        ranks.wait_until_ready()
        sizes = {}
        for kind in KINDS[:3]:
            ranks.step((kind, True))
            sizes[kind] = sum(ranks.answers)
        for _ in range(WARM_UP):
            for kind in KINDS:
                ranks.step((kind, False))
        seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            # another order every time: what came before has an influence too
            for kind in (*KINDS[number % len(KINDS) :], *KINDS[: number % len(KINDS)]):
                seconds[kind].append(ranks.step((kind, False)))
    finally:
        ranks.stop()
    ratios = {kind: [a / b for a, b in zip(seconds[kind], seconds["closed"], strict=True)] for kind in KINDS[1:]}
    return {"seconds": seconds, "ratios_to_closed": ratios, "bytes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default="examples/sft_smollm2.yaml", help="what to train (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="counted steps of each kind (default: %(default)s)")
    parser.add_argument("--global-batch-size", default="16", help="samples a step (default: %(default)s)")
    parser.add_argument("--micro-batch-size", default="2", help="samples a micro-batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    batch = ["--global-batch-size", arguments.global_batch_size, "--micro-batch-size", arguments.micro_batch_size]
    nowhere = ["--save", "none", "--save-hf", "none", "--valid-data-path", "none", "--no-eval-before-training"]
    config = load_config(["--config", arguments.config, *batch, *nowhere, "--pad-to", "seq_length"])
    if not Path(config.model.hf_path).exists():
        sys.exit(f"{config.model.hf_path} is not there; `make models` fetches it")

    figures = measure(config, arguments.rounds)
    p = config.parallel
    print(f"machine: {machine.processor() or machine.machine()}, {os.cpu_count()} cores")
    print(
        f"training step of {config.training.global_batch_size} sequences of {config.data.seq_length} positions on "
        f"{config.model_parallel_size} ranks (TP {p.tensor_model_parallel_size} PP {p.pipeline_model_parallel_size} "
        f"CP {p.context_parallel_size}), {arguments.rounds} rounds:"
    )
    print(f"  {'gate':14} {'median s':>9} {'ratio to closed':>16} {'from':>7} {'to':>7} {'bytes':>14}")
    for kind in KINDS:
        ratios = figures["ratios_to_closed"].get(kind, [1.0])
        size = figures["bytes"].get(kind)
        print(
            f"  {kind:14} {statistics.median(figures['seconds'][kind]):9.3f} {statistics.median(ratios):16.4f} "
            f"{min(ratios):7.3f} {max(ratios):7.3f} {'' if size is None else f'{size:,}':>14}"
        )
    extra = {kind: figures["bytes"][kind] - figures["bytes"]["closed"] for kind in ("open", "lists")}
    print(f"  bytes more than closed: open {extra['open']:,}, lists {extra['lists']:,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
