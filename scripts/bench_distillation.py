"""Times forward KL from a teacher's hidden states against the matrix products alone and against other ways.

    python scripts/bench_distillation.py [--shapes 1024x576x49152] [--dtypes fp32] [--rounds 5] [--json FILE]

Measures as bench_loss_head.py does, which owns how; the contenders are in distillation_contenders.py.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

import bench_loss_head as bench
from bench_report import describe_machine, print_table, report
from distillation_contenders import DISTILLATION
from loss_head_contenders import DTYPES, Shape

ROLES = {"floor": "kl-floor", "ours": "kl-ours", "naive": "kl-dense"}


def judge(records: list[dict[str, Any]]) -> list[bench.Target]:
    """The targets of one shape and type, in training."""
    by_name = {record["contender"]: record for record in records if record["mode"] == "training"}
    ours = by_name["kl-ours"]
    where = f"{ours['shape']} {ours['dtype']}"
    found = [bench.at_most("forward_kl / four matrix products", where, ours["over_floor"], 1.15)]
    if "memory" in ours and "memory" in by_name["kl-dense"]:
        own, dense = (by_name[name]["memory"]["above_gradients"] for name in ("kl-ours", "kl-dense"))
        what = "memory above inputs and gradients <= 1/8 of dense"
        found.append(bench.Target(what, where, f"{own:.0f} of {dense:.0f} MiB", own <= dense / 8))
    for name in ("kl-dense", "jsd-checkpoint"):
        ratio = statistics.median(by_name[name]["over_ours"])
        found.append(bench.Target(f"{name} / ours > 1", where, f"{ratio:.3f}", ratio > 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", type=bench.shape_of, default=[Shape(1024, 576, 49152)])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables for docs/performance.md")
    arguments = parser.parse_args()

    figures: dict[str, Any] = {"machine": describe_machine(), "rounds": arguments.rounds, "records": []}
    figures |= {"growth": [], "tensor_parallel": None}
    targets: list[bench.Target] = []
    for shape in arguments.shapes:
        for dtype in arguments.dtypes:
            print(f"measuring {shape} {dtype} ...", file=sys.stderr, flush=True)
            modes = ["training", "forward"]
            records = bench.time_contenders(list(DISTILLATION), shape, dtype, modes, arguments.rounds, roles=ROLES)
            for record in records:
                wanted = record["mode"] == "training" and not arguments.no_memory
                if wanted and (memory := bench.measure_memory(record["contender"], shape, dtype)):
                    record["memory"] = memory
            figures["records"] += records
            targets += judge(records)
    report(figures, arguments.markdown)
    print("\ntargets:\n")
    rows = [[target.what, target.where, target.figures, "met" if target.met else "MISSED"] for target in targets]
    print_table(["target", "where", "measured", "verdict"], rows, arguments.markdown)
    if arguments.json:
        figures["targets"] = [target._asdict() for target in targets]
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
