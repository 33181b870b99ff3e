"""One evaluation run from start to end (`--eval-only`): every set once, its metrics to the terminal, metrics.jsonl and
eval.json, and if asked for the per-token outputs of every sequence to one file.

Builds a model without DDP and without an optimizer, and writes nothing to a folder of checkpoints. How a set is cut
into steps is `evaluation.py`'s, the file's columns are `token_file.py`'s.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron_ext.cached_teacher import build_teacher
from megatron_ext.checkpoint import Checkpointer
from megatron_ext.config import Config
from megatron_ext.data import RunData
from megatron_ext.evaluation import EvaluationStep, Evaluator
from megatron_ext.losses import LossHead, VocabShard
from megatron_ext.metrics import MetricsLog, Record
from megatron_ext.model_wrapper import MegatronModelWrapper
from megatron_ext.models.factory import build_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.sources import TensorSource
from megatron_ext.models.weights import load_hf_weights
from megatron_ext.outputs import StepMetrics
from megatron_ext.parallel import ParallelContext
from megatron_ext.run_folder import EVALUATION_FILE, write_durably
from megatron_ext.run_report import describe_ranks, evaluation_table
from megatron_ext.teacher import TeacherPlan
from megatron_ext.teacher_cache import TeacherCache
from megatron_ext.token_file import FileRow, RowWriter
from megatron_ext.token_rows import RowGatherer, TokenRow

MAX_NAMED = 100  # sequences that are named in eval.json
MAX_SAID = 20  # and on the terminal


@dataclass
class _NotFinite:
    """The sequences of a set with values that are not finite: how many, and the first of them."""

    count: int = 0
    sample_ids: list[int] = field(default_factory=list)


class EvaluationRun:
    """Measures one model on the configured sets.

    Args:
        config: a configuration with `evaluation.eval_only` that passed `prepare`.
        hf: the model's Hugging Face configuration, checked against the layout.
        source: the weights to evaluate, unless `checkpoint.load` is set.
        data: the encoded evaluation sets.
        parallel: where this rank stands.
        teacher: of the distillation losses, if there are any.
    """

    def __init__(
        self,
        config: Config,
        hf: HFConfig,
        source: TensorSource,
        data: RunData,
        parallel: ParallelContext,
        teacher: TeacherPlan | TeacherCache | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.parallel = parallel
        self.teacher = teacher
        self.iteration = 0
        chunks = build_model(hf, config, parallel, wrap_with_ddp=False)
        if config.checkpoint.load is None:
            load_hf_weights(chunks, hf, source, parallel)
        else:
            self.iteration = Checkpointer(config, hf, parallel).load_weights(chunks)
        vocab_size = hf.vocab_size if teacher is None else teacher.vocab_size  # that both have
        head = LossHead.from_config(config, VocabShard(parallel.pg.tp, vocab_size))
        self.wrapper = MegatronModelWrapper(
            chunks, config, losses=head, parallel=parallel, teacher=build_teacher(teacher, parallel)
        )
        self.evaluator = Evaluator(data.evaluation, self.wrapper, config, parallel, pad_id=data.pad_id)
        self.gatherer = RowGatherer(self.wrapper.per_token_fields, parallel)

    def run(self) -> int:
        """Evaluate every set, also behind one with values that are not finite.

        Returns:
            The exit code: 0, or 1 where a value was not finite. Equal on every rank.
        """
        self._announce()
        results: dict[str, Record] = {}
        finite = True
        with MetricsLog(self.config, self.parallel) as log, self._writer() as writer:
            for name in self.data.evaluation:
                record, set_is_finite = self._evaluate(name, writer)
                finite = finite and set_is_finite
                results[name] = record
                log.write(name, record)
        self._report(results)
        return 0 if finite else 1

    # ---------------------------------------------------------------------------------------------- one set

    def _evaluate(self, name: str, writer: RowWriter | None) -> tuple[Record, bool]:
        """The record of one set, and whether all of its values are finite."""
        wants_rows = self.config.evaluation.per_token_outputs is not None
        started = time.perf_counter()
        total: StepMetrics | None = None
        not_finite = _NotFinite()
        finite = True
        for step in self.evaluator.steps(name, return_per_token_outputs=wants_rows):
            metrics = step.result.metrics
            total = metrics if total is None else StepMetrics.combine([total, metrics])
            step_is_finite = all(map(math.isfinite, metrics.values()))  # the same on every rank
            finite = finite and step_is_finite
            for row in self._rows(step, wants_rows, step_is_finite):
                self._check(name, row, not_finite)
                if writer is not None:
                    writer.write(self._file_row(name, row))
        assert total is not None, "no data set is empty"
        seconds = time.perf_counter() - started
        finite = self._agree(finite and not_finite.count == 0)
        return self._record(name, total, seconds, not_finite), finite

    def _rows(self, step: EvaluationStep, has_outputs: bool, is_finite: bool) -> list[TokenRow]:
        """All replicas' sequences, on rank 0, if they are written or if one of them is not finite."""
        if has_outputs:
            outputs = step.result.loss_fn_outputs
        elif not is_finite:  # the metrics do not tell which sequence it was
            outputs = self.wrapper.forward(step.micro_batches, return_per_token_outputs=True).loss_fn_outputs
        else:
            return []
        return self.gatherer.gather(step.sample_ids, outputs)

    def _check(self, name: str, row: TokenRow, not_finite: _NotFinite) -> None:
        counts = {field: int((~torch.isfinite(values)).sum()) for field, values in row.values.items()}
        found = [
            f"{field} at {count} of {len(row.values[field])} positions" for field, count in counts.items() if count
        ]
        if not found:
            return
        not_finite.count += 1
        if not_finite.count <= MAX_NAMED:
            not_finite.sample_ids.append(row.sample_id)
        if not_finite.count <= MAX_SAID:
            print(f"error: {name}, sample {row.sample_id}: not finite: {', '.join(found)}", file=sys.stderr, flush=True)

    def _agree(self, finite: bool) -> bool:
        """Whether it is so on every rank: only rank 0 sees the rows."""
        answer = torch.tensor(int(finite), device=self.parallel.device)
        torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN)
        return bool(answer.item())

    def _record(self, name: str, metrics: StepMetrics, seconds: float, not_finite: _NotFinite) -> Record:
        values = dict(metrics)
        likelihood = values.pop("negative_log_likelihood")
        record: Record = {
            "iteration": self.iteration,
            **values,
            "perplexity": _exp(likelihood),
            "sequences": len(self.data.evaluation[name]),
            "seconds": seconds,
            "tokens_per_second": values["num_input_tokens"] / seconds,
        }
        if not_finite.count:
            record |= {"sequences_not_finite": not_finite.count, "first_not_finite": not_finite.sample_ids}
        return record

    # ------------------------------------------------------------------------------------------------- files

    @contextmanager
    def _writer(self) -> Iterator[RowWriter | None]:
        """The file of per-token outputs, on rank 0; complete at the end of the block or not there at all."""
        path = self.config.evaluation.per_token_outputs
        if path is None or not self.parallel.is_main:
            yield None
            return
        metadata = {
            "tokenizer": self.config.tokenizer_path,
            "hf_path": self.config.model.hf_path,
            "load": self.config.checkpoint.load,
            "iteration": self.iteration,
        }
        with RowWriter(path, ["loss_mask", *self.wrapper.per_token_fields], metadata) as writer:
            yield writer

    def _file_row(self, name: str, row: TokenRow) -> FileRow:
        sample = self.data.evaluation[name][row.sample_id]
        values = {"loss_mask": sample.loss_mask, **{name: array.numpy() for name, array in row.values.items()}}
        return FileRow.of(name, row.sample_id, sample.input_ids, sample.labels, values)

    # ------------------------------------------------------------------------------------------------ report

    def _announce(self) -> None:
        self._say(describe_ranks(self.config, self.parallel))
        load = self.config.checkpoint.load
        weights = self.config.model.hf_path if load is None else f"{load}, iteration {self.iteration}"
        self._say(f"{'weights':10} {weights}")
        if self.teacher is not None:
            self._say(f"{'teacher':10} {self.teacher.description}")
        for name, dataset in self.data.named():
            self._say(f"{name:10} {dataset.path}: {dataset.report}")

    def _report(self, results: dict[str, Record]) -> None:
        if not self.parallel.is_main:
            return
        path = self.config.log_directory / EVALUATION_FILE
        write_durably(path, json.dumps(results, indent=1) + "\n")
        self._say(evaluation_table(results, list(self.config.losses)))
        self._say(f"wrote {path}")
        if self.config.evaluation.per_token_outputs is not None:
            self._say(f"wrote {self.config.evaluation.per_token_outputs}")
        for name, record in results.items():
            if count := record.get("sequences_not_finite"):
                print(
                    f"error: {name}: values that are not finite in {count} of {record['sequences']} sequences, "
                    f"samples {_listed(record['first_not_finite'])}; the model or the data is at fault",
                    file=sys.stderr,
                    flush=True,
                )

    def _say(self, text: str) -> None:
        if self.parallel.is_main:
            print(text, flush=True)


def _exp(exponent: float) -> float:
    """exp, and infinity where Python's raises."""
    return math.inf if exponent > 700 else math.exp(exponent)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:MAX_SAID])) + (" ..." if len(numbers) > MAX_SAID else "")
