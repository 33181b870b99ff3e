"""One training run from start to end: step, log, evaluate, save.

Builds the parts in named methods and calls them in order; what each part does is its own module's.
"""

import math
from pathlib import Path

from megatron_ext.cached_teacher import build_teacher
from megatron_ext.checkpoint import Checkpointer
from megatron_ext.config import Config, config_to_yaml
from megatron_ext.data import RunData, TrainLoader
from megatron_ext.evaluation import Evaluator
from megatron_ext.losses import LossHead, VocabShard
from megatron_ext.metrics import MetricsLog, Record, Stopwatch
from megatron_ext.model_wrapper import MegatronModelWrapper
from megatron_ext.models.export import export_hf
from megatron_ext.models.factory import build_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.sources import TensorSource
from megatron_ext.models.weights import load_hf_weights
from megatron_ext.optimizer import build_optimizer, build_scheduler
from megatron_ext.outputs import TOKEN_COUNTS, MiniBatchResult, StepMetrics
from megatron_ext.parallel import ParallelContext
from megatron_ext.run_report import describe_layout, evaluation_line, progress_line
from megatron_ext.teacher import TeacherPlan
from megatron_ext.teacher_cache import TeacherCache


class Trainer:
    """Fine-tunes one model.

    Args:
        config: a configuration that passed `check_layout` and `check_files`.
        hf: the model's Hugging Face configuration, checked against the layout.
        source: the weights to start from.
        data: the encoded data sets.
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
        self.hf = hf
        self.data = data
        self.parallel = parallel
        self.teacher = teacher
        self.iteration = 0
        self._build_loader()
        self._build_model(source, teacher)
        self.checkpointer = Checkpointer(config, hf, parallel)
        self._restore()

    # ------------------------------------------------------------------------------------------------ build

    def _build_loader(self) -> None:
        config, parallel = self.config, self.parallel
        assert self.data.train is not None, "the command line requires it"
        self.loader = TrainLoader(
            self.data.train,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            dp_rank=parallel.dp_rank,
            dp_size=parallel.dp_size,
            seed=config.training.seed,
            shuffle=config.data.shuffle,
            pad_multiple=config.sequence_multiple,
            pad_to=config.data.pad_to,
            seq_length=config.data.seq_length,
            pad_id=self.data.pad_id,
            # the interleaved schedule takes multiples of the pipeline size only
            micro_batches_multiple=parallel.pp_size if parallel.vp_size > 1 else 1,
            packing=config.data.packing,
            packing_multiple=config.packing_multiple,
        )

    def _build_model(self, source: TensorSource, teacher: TeacherPlan | TeacherCache | None) -> None:
        config, parallel = self.config, self.parallel
        self.chunks = build_model(self.hf, config, parallel)
        load_hf_weights(self.chunks, self.hf, source, parallel)
        self.optimizer = build_optimizer(config, self.chunks, parallel)
        self.scheduler = build_scheduler(config, self.optimizer)
        vocab_size = self.hf.vocab_size if teacher is None else teacher.vocab_size  # that both have
        self.wrapper = MegatronModelWrapper(
            self.chunks,
            config,
            losses=LossHead.from_config(config, VocabShard(parallel.pg.tp, vocab_size)),
            parallel=parallel,
            optimizer=self.optimizer,
            teacher=build_teacher(teacher, parallel),
        )
        self.evaluator = Evaluator(self.data.evaluation, self.wrapper, config, parallel, pad_id=self.data.pad_id)

    def _restore(self) -> None:
        settings = self.config.checkpoint
        if settings.load is None:
            return
        if settings.finetune:
            self.checkpointer.load_weights(self.chunks)
            self.optimizer.reload_model_params()
        else:
            self.iteration = self.checkpointer.resume(self.chunks, self.optimizer, self.scheduler, self.loader)

    # -------------------------------------------------------------------------------------------------- run

    def train(self) -> None:
        """Run to `train_iters`: evaluate, step, log, save as configured; then export."""
        config = self.config
        self._announce()
        stopwatch = Stopwatch()
        with MetricsLog(config, self.parallel) as log:
            if config.evaluation.eval_before_training and self.iteration == 0:
                self._evaluate(log)
            stopwatch.read()
            pending: list[StepMetrics] = []
            while self.iteration < config.training.train_iters:
                result, grad_norm = self.step(return_per_token_outputs=False)
                pending.append(result.metrics)
                if self._is_due(config.logging.log_interval):
                    self._log(log, pending, grad_norm, stopwatch.read())
                    pending = []
                with stopwatch:
                    if self._is_due(config.evaluation.eval_interval) and not self._is_last:
                        self._evaluate(log)
                    if self._is_due(config.checkpoint.save_interval) and not self._is_last:
                        self._save()
            if config.evaluation.eval_after_training:
                self._evaluate(log)
        self._save()
        self._export()

    def step(self, *, return_per_token_outputs: bool = True) -> tuple[MiniBatchResult, float]:
        """One optimizer step; returns its result and the gradient norm before clipping."""
        self.wrapper.zero_grad()
        result = self.wrapper.forward_backward(
            self.loader.next_step(), return_per_token_outputs=return_per_token_outputs
        )
        self.lr = self.optimizer.param_groups[0]["lr"]
        _updated, grad_norm, _ = self.optimizer.step()
        if self.config.optimizer.clip_grad == 0:  # Megatron computes the norm for clipping only
            grad_norm = self.optimizer.get_grad_norm()
        self.scheduler.step(increment=1)
        self.iteration += 1
        return result, float(grad_norm)

    @property
    def _is_last(self) -> bool:
        return self.iteration >= self.config.training.train_iters

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and (self.iteration % interval == 0 or self._is_last)

    def _log(self, log: MetricsLog, pending: list[StepMetrics], grad_norm: float, seconds: float) -> None:
        """One record for the steps since the last one: mean losses, sums of tokens, the last lr and norm."""
        names = [name for name in pending[0] if name not in TOKEN_COUNTS]
        means = {name: sum(metrics[name] for metrics in pending) / len(pending) for name in names}
        totals = {name: sum(metrics[name] for metrics in pending) for name in TOKEN_COUNTS}
        record: Record = {
            "iteration": self.iteration,
            "consumed_samples": self.loader.consumed_samples,
            **means,
            **totals,
            "grad_norm": grad_norm,
            "lr": self.lr,
            "iteration_time_ms": 1000 * seconds / len(pending),
            "tokens_per_second": totals["num_input_tokens"] / seconds,
        }
        log.write("train", record)
        self._say(progress_line(record, list(self.config.losses), self.config.training.train_iters))
        if totals["num_tokens"] == 0:
            self._say(f"warning: no trained token in the last {len(pending)} steps, so nothing was learned in them")
        if not math.isfinite(means["loss"]) or not math.isfinite(grad_norm):
            self._say(f"warning: loss {means['loss']} and gradient norm {grad_norm} are not both finite")

    def _evaluate(self, log: MetricsLog) -> None:
        for name, result in self.evaluator.run(return_per_token_outputs=False).items():
            log.write(name, {"iteration": self.iteration, **result.metrics})
            self._say(evaluation_line(name, self.iteration, result.metrics, list(self.config.losses)))

    def _save(self) -> None:
        if self.config.checkpoint.save is None:
            return
        path = self.checkpointer.save(self.iteration, self.chunks, self.optimizer, self.scheduler, self.loader)
        if path is not None:
            self._say(f"saved {path}")

    def _export(self) -> None:
        target = self.config.checkpoint.save_hf
        if target is None:
            return
        export_hf(
            self.chunks,
            self.hf,
            target,
            self.parallel,
            self.config.tokenizer_path,
            chat_template=self.config.model.chat_template,
        )
        self._say(f"wrote the model in Hugging Face format to {target}")

    # ----------------------------------------------------------------------------------------------- report

    def _announce(self) -> None:
        """Say what is about to run, and keep the configuration beside its results."""
        if not self.parallel.is_main:
            return
        directory = Path(self.config.log_directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(config_to_yaml(self.config), encoding="utf-8")
        self._say(describe_layout(self.config, self.parallel))
        if self.teacher is not None:
            self._say(f"{'teacher':10} {self.teacher.description}")
        for name, dataset in self.data.named():
            self._say(f"{name:10} {dataset.path}: {dataset.report}")
        if self.iteration:
            rest = ": nothing is left to train" if self._is_last else ""
            self._say(f"resuming after iteration {self.iteration}{rest}")

    def _say(self, text: str) -> None:
        if self.parallel.is_main:
            print(text, flush=True)
