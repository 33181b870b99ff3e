"""What the benchmarks of the loss head print: the machine, tables, one line of measurement. Imported by them."""

import datetime
import importlib.metadata
import os
import statistics
from pathlib import Path
from typing import Any

from loss_head_contenders import contender_named

THREADS = 2


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def describe_machine() -> dict[str, Any]:
    import torch

    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": os.getloadavg()[0],
    }


def print_table(header: list[str], rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        for row in [header, ["---"] * len(header), *rows]:
            print(f"| {' | '.join(row)} |")
        return
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_group(records: list[dict], rounds: int, markdown: bool) -> None:
    """The table of one shape, dtype and mode."""
    first = records[0]
    print(f"\n{first['shape']} (tokens x hidden x vocabulary), {first['dtype']}, {first['mode']}, {rounds} rounds\n")
    header = ["contender", "seconds", "over the floor", "over ours", "MiB", "MiB - gradients", "loss", "dH", "dW"]
    rows = []
    for record in records:
        memory, differences = record.get("memory"), record["differences"]
        rows.append(
            [
                record["contender"],
                f"{statistics.median(record['seconds']):.3f}",
                *(spread(record[key]) if key in record else "" for key in ("over_floor", "over_ours")),
                *(f"{memory[key]:.0f}" if memory else "" for key in ("peak", "above_gradients")),
                *(f"{differences[k]:.0e}" if k in differences else "" for k in ("loss", "hidden_norm", "weight_norm")),
            ]
        )
    used = [column for column in range(len(header)) if any(row[column] for row in rows)]
    print_table([header[column] for column in used], [[row[column] for column in used] for row in rows], markdown)


def report(figures: dict[str, Any], markdown: bool) -> None:
    """Print everything but the targets' verdicts."""
    machine, rounds = figures["machine"], figures["rounds"]
    print(f"machine: {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']:.1f} before")
    print(f"torch {machine['torch']}, {THREADS} threads, {machine['date']}")
    names = list(dict.fromkeys(record["contender"] for record in figures["records"]))
    if names:
        print("ratios: medians (lowest to highest) within rounds; MiB: peak of one training step above the inputs;")
        print("loss, dH, dW: relative difference of the loss and of the gradients' norms from naive's\n")
        print_table(
            ["contender", "what it is"], [[name, contender_named(name).description] for name in names], markdown
        )
    groups: dict[tuple, list[dict]] = {}
    for record in figures["records"]:
        groups.setdefault((record["shape"], record["dtype"], record["mode"]), []).append(record)
    for group in groups.values():
        print_group(group, rounds, markdown)
    if tp := figures["tensor_parallel"]:
        together, alone = (statistics.median(tp["seconds"][task]) for task in ("together", "alone"))
        print(f"\n{tp['shape']}, fp32, TP 2 over gloo, one thread a rank, training, {rounds} rounds\n")
        print(f"  {together:.3f} s together, {alone:.3f} s each its shard alone; ratio {spread(tp['ratios'])}")
        differences = ", ".join(f"{key} {value:.0e}" for key, value in tp["differences"].items())
        print(f"  relative difference from naive: {differences}")
