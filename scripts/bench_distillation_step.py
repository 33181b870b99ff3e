"""Times a training step with a teacher against its parts: the student's step alone, and the teacher's forward pass.

    python scripts/bench_distillation_step.py [--config examples/distill_smollm2.yaml] [--rounds 5] [--json FILE]

One process, one rank with two threads, fp32; in each round a step with the teacher, one of the same student on the same
samples with cross-entropy alone, and the teacher's pass over the same samples, as far as its last hidden states and
with its logits. The figure to quote is the median of step / (student + teacher with logits) within a round; the losses
against the teacher are in the step alone. Target: at most 1.1.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from bench_report import spread
from bench_step import free_port, join_ranks

from megatron_ext.config import Config, load_config

THREADS = 2


@dataclass(frozen=True)
class Rows:
    """What the teacher reads of a micro-batch."""

    input_ids: Any  # [b, s]
    position_ids: Any  # [b, s]
    packed: None = None


def _seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(config: Config, alone: Config, rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind by round."""
    chosen = join_ranks(0, 1, free_port(), THREADS)
    from megatron_ext.data import TrainLoader
    from megatron_ext.parallel import parallel_session
    from megatron_ext.preparation import prepare
    from megatron_ext.trainer import Trainer

    parts, parts_alone = (prepare(each, world_size=1, makes_folders=False) for each in (config, alone))
    seconds: dict[str, list[float]] = {"with teacher": [], "student": [], "teacher": [], "its logits": []}
    with parallel_session(config, chosen) as parallel:
        both = Trainer(config, parts.hf, parts.source, parts.data, parallel, parts.teacher)
        student = Trainer(alone, parts_alone.hf, parts_alone.source, parts_alone.data, parallel)
        teacher, hidden = both.wrapper.teacher, []
        # the same order of samples once more, for the teacher's pass
        loader = TrainLoader(
            parts_alone.data.train,
            global_batch_size=alone.training.global_batch_size,
            micro_batch_size=alone.training.micro_batch_size,
            dp_rank=0,
            dp_size=1,
            seed=alone.training.seed,
            seq_length=alone.data.seq_length,
            pad_id=parts_alone.data.pad_id,
        )
        for number in range(rounds + 1):
            rows = [Rows(batch.input_ids, batch.position_ids) for batch in loader.next_step()]
            hidden.clear()
            found = {
                "with teacher": _seconds(lambda: both.step(return_per_token_outputs=False)),
                "student": _seconds(lambda: student.step(return_per_token_outputs=False)),
                "teacher": _seconds(lambda rows=rows: hidden.extend(teacher.hidden_states(rows))),
                "its logits": _seconds(lambda: [part.flatten(0, 1) @ teacher.output_weight.t() for part in hidden]),
            }
            if number:  # the first is the warm-up
                for kind, value in found.items():
                    seconds[kind].append(value)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--config", default="examples/distill_smollm2.yaml", help="what to train (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    one_rank = ["--pipeline-model-parallel-size", "1", "--num-layers-in-last-pipeline-stage", "none"]
    nowhere = ["--save", "none", "--save-hf", "none", "--valid-data-path", "none", "--no-eval-before-training"]
    common = ["--config", arguments.config, *one_rank, *nowhere]
    config = load_config(common)
    alone = load_config([*common, "--teacher-path", "none", "--losses", "{lm_loss: {type: cross_entropy}}"])
    for path in (config.model.hf_path, config.teacher.teacher_path):
        if path is None or not Path(path).exists():
            sys.exit(f"{path} is not there; `make distill` makes it")
    seconds = measure(config, alone, arguments.rounds)
    steps, students, teachers, products = seconds.values()
    apart = {"student + teacher without logits": [0.0] * len(steps), "student + teacher": products}
    ratios = {
        what: [
            step / (student + teacher + product)
            for step, student, teacher, product in zip(steps, students, teachers, extra, strict=True)
        ]
        for what, extra in apart.items()
    }
    for kind, values in seconds.items():
        print(f"{kind:14} {statistics.median(values):6.2f} s")
    for what, values in ratios.items():
        print(f"step / ({what}): {spread(values)}, {len(values)} rounds")
    print("target: step / (student + teacher) at most 1.1")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
