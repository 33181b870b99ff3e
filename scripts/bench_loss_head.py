"""Times the loss head, from hidden states to gradients, against the matrix products alone and against other ways.

    python scripts/bench_loss_head.py [--shapes 2048x576x49152 ...] [--dtypes fp32 bf16] [--modes training forward]
                                      [--contenders ours naive ...] [--rounds 5] [--tp [only]] [--quick]
                                      [--json FILE] [--markdown]

Every contender is a process with two threads. All stay alive and take turns, floor, ours, naive, ..., floor, ours, ...;
those that wait sleep. The figure to quote is the median of the ratios within a round. Peak memory is the kernel's, of
one step in a process of its own. The targets are judged at the end. This file owns the measuring and the reporting;
the contenders and what their processes do are in loss_head_contenders.py.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from bench_report import THREADS, describe_machine, print_table, report, spread
from loss_head_contenders import (
    CONTENDERS,
    DTYPES,
    Shape,
    contender_named,
    live,
    report_peak_memory,
    serve_contender,
    serve_tp_rank,
)

SHAPES = [Shape(2048, 576, 49152), Shape(1024, 1024, 32768), Shape(2048, 896, 151936)]
MODES = ["training", "forward"]


class Target(NamedTuple):
    """A figure that was promised, and whether it was reached."""

    what: str
    where: str
    figures: str
    met: bool


# ---- processes -----------------------------------------------------------------------------------------------------


def _ask(connection: Any, task: Any = None) -> Any:
    """Send a task, if there is one, and wait for the answer."""
    if task is not None:
        connection.send(task)
    try:
        answer = connection.recv()
    except EOFError:
        sys.exit("a process died without a word; is there enough memory?")
    if isinstance(answer, str) and answer != "ready":
        sys.exit(f"a process failed:\n{answer}")
    return answer


@contextmanager
def processes(life: Callable[..., None], arguments: list[tuple], threads: int = THREADS) -> Iterator[list[Any]]:
    """Connections to one process for each tuple of arguments."""
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read by the new processes
    processes, connections = [], []
    try:
        for own_arguments in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(theirs, life, *own_arguments), daemon=True)
            process.start()
            theirs.close()  # else the death of the process goes unnoticed
            processes.append(process)
            connections.append(ours)
        yield connections
    finally:
        for process in processes:
            process.kill()
            process.join()


# ---- measuring -----------------------------------------------------------------------------------------------------


def _ratios(seconds: list[float], others: list[float]) -> list[float]:
    return [own / other for own, other in zip(seconds, others, strict=True)]


def _differences(answer: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, float]:
    """Relative difference of each figure that both have."""
    shared = [key for key in ("loss", "hidden_norm", "weight_norm") if reference and answer.get(key) is not None]
    return {key: abs(answer[key] / reference[key] - 1) for key in shared if reference.get(key)}


def time_contenders(
    names: list[str], shape: Shape, dtype: str, modes: list[str], rounds: int, *, roles: dict[str, str] | None = None
) -> list[dict]:
    """A record for each mode and contender: seconds of each round, ratios to the floor and to ours, differences.

    Args:
        roles: which contenders are the floor, ours and naive, where they have other names.
    """
    roles = roles or {role: role for role in ("floor", "ours", "naive")}
    naive = roles["naive"]
    records = []
    with processes(serve_contender, [(name, shape, dtype, THREADS) for name in names]) as connections:
        by_name = dict(zip(names, connections, strict=True))
        for connection in connections:
            _ask(connection)
        for mode in modes:
            taking_part = {
                name: connection
                for name, connection in by_name.items()
                if mode == "training" or contender_named(name).forward is not None
            }
            answers = {name: _ask(connection, mode) for name, connection in taking_part.items()}  # the warm-up
            references = {True: answers.get(naive), False: None}  # by whether there are token weights
            if mode == "forward":
                references[False] = references[True]
            elif naive in taking_part:
                references[False] = _ask(by_name[naive], "uniform")
            seconds: dict[str, list[float]] = {name: [] for name in taking_part}
            for _ in range(rounds):
                for name, connection in taking_part.items():
                    seconds[name].append(_ask(connection, mode)["seconds"])
            for name in taking_part:
                record = {
                    "shape": str(shape),
                    "dtype": dtype,
                    "mode": mode,
                    "contender": name,
                    "seconds": seconds[name],
                }
                for role in ("floor", "ours"):
                    if roles[role] in seconds:
                        record[f"over_{role}"] = _ratios(seconds[name], seconds[roles[role]])
                reference = references[contender_named(name).has_token_weights]
                record["differences"] = _differences(answers[name], reference)
                records.append(record)
    return records


def measure_memory(name: str, shape: Shape, dtype: str) -> dict[str, float] | None:
    """MiB of one training step in a fresh process: above the inputs, and above inputs and gradients."""
    with processes(report_peak_memory, [(name, shape, dtype, THREADS)]) as (connection,):
        answer = _ask(connection)
    if "unavailable" in answer:
        print(f"memory is left out: {answer['unavailable']}", file=sys.stderr)
        return None
    return answer


def measure_growth(shape: Shape, dtype: str) -> list[dict[str, Any]]:
    """Memory of ours for the tokens of the shape, and for twice and four times as many."""
    points = []
    for factor in (1, 2, 4):
        larger = shape._replace(tokens=factor * shape.tokens)
        if memory := measure_memory("ours", larger, dtype):
            points.append({"shape": str(larger), "dtype": dtype, "memory": memory})
    return points


def time_tensor_parallel(shape: Shape, rounds: int) -> dict[str, Any]:
    """Ours on two ranks that share the vocabulary, over each rank's half alone; of the slower rank, by round."""
    seconds: dict[str, list[float]] = {"together": [], "alone": []}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, str(Path(folder) / "store"), shape) for rank in range(2)]
        with processes(serve_tp_rank, arguments, threads=1) as connections:
            reference, _ = [_ask(connection) for connection in connections]

            def take_turn(task: str) -> list[dict[str, float]]:
                for connection in connections:
                    connection.send(task)
                return [_ask(connection) for connection in connections]

            first = take_turn("together")
            take_turn("alone")
            for _ in range(rounds):
                for task in seconds:
                    seconds[task].append(max(answer["seconds"] for answer in take_turn(task)))
    whole = first[0] | {"weight_norm": sum(answer["weight_norm"] ** 2 for answer in first) ** 0.5}
    return {
        "shape": str(shape),
        "dtype": "fp32",
        "seconds": seconds,
        "ratios": _ratios(seconds["together"], seconds["alone"]),
        "differences": _differences(whole, reference),
    }


# ---- judging -------------------------------------------------------------------------------------------------------


def at_most(what: str, where: str, ratios: list[float], limit: float) -> Target:
    return Target(f"{what} <= {limit:g}", where, spread(ratios), statistics.median(ratios) <= limit)


def _time_targets(group: dict[str, dict]) -> Iterator[Target]:
    """Of the records of one shape, dtype and mode, by contender."""
    ours = group["ours"]
    where = f"{ours['shape']} {ours['dtype']}"
    training, full = ours["mode"] == "training", ours["dtype"] == "fp32"
    if "floor" in group and (training or full):
        limit = 1.05 if full else 1.2
        what = "training / floor" if training else "forward-only / one matrix product"
        yield at_most(what, where, ours["over_floor"], limit)
    if training and not full and "naive" in group:
        slower = _ratios(ours["seconds"], group["naive"]["seconds"])
        yield at_most("training / naive", where, slower, 1.0)
    if training and full:
        others = {name: statistics.median(record["over_ours"]) for name, record in group.items()}
        others = {name: ratio for name, ratio in others.items() if name not in ("floor", "ours")}
        if others:
            fastest = min(others, key=others.__getitem__)
            figures = f"{others[fastest]:.3f} ({fastest})"
            yield Target("the fastest other contender / ours > 1", where, figures, others[fastest] > 1)


def _memory_targets(records: list[dict], growth: list[dict]) -> Iterator[Target]:
    first = str(records[0]["shape"]) if records else None
    for dtype in DTYPES:
        memory = {
            record["contender"]: record["memory"]["above_gradients"]
            for record in records
            if (record["shape"], record["dtype"], record["mode"]) == (first, dtype, "training") and "memory" in record
        }
        if "ours" in memory and "naive" in memory:
            figures = f"{memory['ours']:.0f} of {memory['naive']:.0f} MiB"
            met = memory["ours"] <= memory["naive"] / 10
            yield Target("memory above inputs and gradients <= 1/10 of naive", f"{first} {dtype}", figures, met)
        points = [point for point in growth if point["dtype"] == dtype]
        if len(points) > 1:
            amounts = [point["memory"]["above_gradients"] for point in points]
            figures = ", ".join(f"{amount:.1f}" for amount in amounts) + " MiB at 1, 2 and 4 times the tokens"
            met = max(amounts) <= 1.1 * min(amounts)  # single blocks come and go; what grows with N is far beyond
            what = "memory above inputs and gradients constant within 10 %"
            yield Target(what, f"{points[0]['shape']} {dtype}", figures, met)


def judge(figures: dict[str, Any]) -> list[Target]:
    """Every target that the figures say something about."""
    found: list[Target] = []
    groups: dict[tuple, dict[str, dict]] = {}
    for record in figures["records"]:
        groups.setdefault((record["shape"], record["dtype"], record["mode"]), {})[record["contender"]] = record
    for group in groups.values():
        if "ours" in group:
            found += _time_targets(group)
    found += _memory_targets(figures["records"], figures["growth"])
    if tp := figures["tensor_parallel"]:
        found.append(at_most("TP 2 / the same ranks on their shard alone", f"{tp['shape']} fp32", tp["ratios"], 1.15))
    return found


def shape_of(text: str) -> Shape:
    try:
        tokens, hidden, vocab = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKENSxHIDDENxVOCABULARY") from None
    return Shape(tokens, hidden, vocab)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, help="tokens x hidden x vocabulary")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, help="counted turns of each contender (default: 5, with --quick 2)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all")
    parser.add_argument("--quick", action="store_true", help="the smallest shape only, to see that all of it works")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out")
    parser.add_argument(
        "--tp", nargs="?", const="too", choices=["too", "only"], help="measure TP 2 over gloo at the first shape"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables for docs/performance.md")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes = [min(arguments.shapes, key=lambda shape: shape.tokens * shape.hidden * shape.vocab)]
    if arguments.tp and arguments.shapes[0].vocab % 2:
        parser.error(f"--tp halves the vocabulary of {arguments.shapes[0]}, which is odd")
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for; what it takes is said on stderr as it goes."""
    figures = {"machine": describe_machine(), "rounds": arguments.rounds, "records": [], "growth": []}
    names = [name for name in CONTENDERS if name in arguments.contenders]  # in the table's order
    cases = [(shape, dtype) for shape in arguments.shapes for dtype in arguments.dtypes]
    for shape, dtype in [] if arguments.tp == "only" else cases:
        print(f"measuring {shape} {dtype} ...", file=sys.stderr, flush=True)
        records = time_contenders(names, shape, dtype, arguments.modes, arguments.rounds)
        figures["records"] += records
        if arguments.no_memory:
            continue
        for record in records:
            if record["mode"] == "training" and (memory := measure_memory(record["contender"], shape, dtype)):
                record["memory"] = memory
        if "ours" in names and "training" in arguments.modes and shape == arguments.shapes[0]:
            figures["growth"] += measure_growth(shape, dtype)
    figures["tensor_parallel"] = None
    if arguments.tp:
        print("measuring TP 2 ...", file=sys.stderr, flush=True)
        figures["tensor_parallel"] = time_tensor_parallel(arguments.shapes[0], arguments.rounds)
    return figures


def main() -> None:
    arguments = _arguments()
    figures = measure(arguments)
    targets = judge(figures)
    report(figures, arguments.markdown)
    print(f"\ntargets:{'' if targets else ' none is judged without ours and the floor'}\n")
    rows = [[target.what, target.where, target.figures, "met" if target.met else "MISSED"] for target in targets]
    if targets:
        print_table(["target", "where", "measured", "verdict"], rows, arguments.markdown)
    if arguments.json:
        figures["targets"] = [target._asdict() for target in targets]
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
