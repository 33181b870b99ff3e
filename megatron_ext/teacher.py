"""The frozen teacher of the distillation losses: a second model on the student's ranks, of its own depth and width, run
forward-only over the micro-batches of a step. Gives its last hidden states and its output weight; logits are made from
them one chunk at a time, by the losses. What can be wrong with a teacher is found before any process group starts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_model_config

from megatron_ext.checkpoint import Checkpointer
from megatron_ext.config import Config, ConfigError
from megatron_ext.data import MicroBatch, check_same_tokenizer
from megatron_ext.losses import TeacherHidden
from megatron_ext.models.factory import build_model, unwrap_model
from megatron_ext.models.hf_config import HFConfig, check_model_layout, load_hf_config
from megatron_ext.models.sources import TensorSource, open_source
from megatron_ext.models.transformer_config import padded_vocab_size
from megatron_ext.models.weights import load_hf_weights
from megatron_ext.parallel import ParallelContext
from megatron_ext.run_folder import check_load
from megatron_ext.schedule import run_schedule


class StageInputs(Protocol):
    """What the teacher reads of a micro-batch: this CP rank's part, on its device."""

    @property
    def input_ids(self) -> torch.Tensor: ...  # [b, s/cp]

    @property
    def position_ids(self) -> torch.Tensor: ...  # [b, s/cp]

    @property
    def packed(self) -> PackedSeqParams | None: ...


@dataclass(frozen=True)
class TeacherPlan:
    """A teacher that was checked and can be built.

    config: the run's configuration with the teacher in the model's place.
    source: its weights; None: they are in the checkpoint of `config.checkpoint.load`.
    padded_vocab_size: rows of its embedding and output weight over all TP ranks, the student's number.
    vocab_size: token ids that both models have; distillation compares these alone.
    """

    config: Config
    hf: HFConfig
    source: TensorSource | None
    padded_vocab_size: int
    vocab_size: int

    @property
    def description(self) -> str:
        load = self.config.checkpoint.load
        weights = "" if load is None else f" with the weights of {load}"
        dtype = "bf16" if self.config.training.bf16 else "fp32"
        return f"{self.hf.path}{weights}: {self.hf.num_layers} layers, {self.hf.hidden_size} wide, {dtype}"


def plan_teacher(config: Config, student: HFConfig) -> TeacherPlan | None:
    """Find every mistake in the teacher that one process alone can find; None when the run has no teacher model.

    Raises:
        ValueError: the teacher cannot be read, does not fit the layout or has another tokenizer.
    """
    settings = config.teacher
    if settings.teacher_path is None:
        return None
    name = f"teacher.teacher_path {settings.teacher_path}"
    hf = _named(name, lambda: load_hf_config(settings.teacher_path))
    own = _teacher_config(config, hf)
    _named(name, lambda: check_model_layout(hf, own))
    if settings.teacher_load is None:
        source = _named(name, lambda: open_source(hf, random_init=False, seed=0))
    else:
        _named("teacher.teacher_load", lambda: check_load(own, hf))
        source = None
    assert config.teacher_tokenizer_path is not None
    check_same_tokenizer(config.tokenizer_path, config.teacher_tokenizer_path)
    common = min(student.vocab_size, hf.vocab_size)
    problems = [
        f"losses.{loss_name}.top_k: {loss.top_k} is larger than the vocabulary of {common} that model (vocab_size "
        f"{student.vocab_size}) and teacher ({hf.vocab_size}) share; use less"
        for loss_name, loss in config.distillation_losses.items()
        if loss.top_k is not None and loss.top_k > common
    ]
    if problems:
        raise ConfigError(problems)
    return TeacherPlan(own, hf, source, padded_vocab_size(student, config), common)


class Teacher:
    """The teacher's chunks on this rank: evaluation mode, no gradients, no optimizer, no gradient buffers.

    Args:
        plan: what `plan_teacher` found.
        parallel: where this rank stands; the layout is the student's.
    """

    def __init__(self, plan: TeacherPlan, parallel: ParallelContext) -> None:
        self.hf = plan.hf
        self.vocab_size = plan.vocab_size
        self.parallel = parallel
        self.chunks = build_model(
            plan.hf, plan.config, parallel, wrap_with_ddp=False, padded_vocab=plan.padded_vocab_size
        )
        for chunk in self.chunks:
            chunk.requires_grad_(False).eval()
        self._load(plan)

    def _load(self, plan: TeacherPlan) -> None:
        if plan.source is not None:
            load_hf_weights(self.chunks, plan.hf, plan.source, self.parallel)
            return
        for chunk in self.chunks:  # a checkpoint of fewer vocabulary rows leaves the others as they are
            for parameter in chunk.parameters():
                parameter.data.zero_()
        Checkpointer(plan.config, plan.hf, self.parallel).load_weights(self.chunks)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether hidden states are divided over the TP ranks."""
        return get_model_config(self.chunks[0]).sequence_parallel

    @property
    def output_weight(self) -> torch.Tensor:
        """[padded vocabulary/tp, h] on the last stage, the embedding's where the two are tied."""
        model = unwrap_model(self.chunks[-1])
        assert model.post_process, "only the last stage has an output weight"
        if model.share_embeddings_and_output_weights:
            return model.shared_embedding_or_output_weight()
        return model.output_layer.weight

    def signals(
        self, inputs: Sequence[StageInputs], _micro_batches: Sequence[MicroBatch]
    ) -> list[TeacherHidden | None]:
        """What the loss head needs of each micro-batch: see `hidden_states`."""
        hidden = self.hidden_states(inputs)
        if hidden is None:
            return [None] * len(inputs)
        return [TeacherHidden(states, self.output_weight) for states in hidden]

    @torch.no_grad()
    def hidden_states(self, inputs: Sequence[StageInputs]) -> list[torch.Tensor] | None:
        """The teacher's last hidden states, behind its last norm, for each micro-batch; every rank must call it.

        Args:
            inputs: the micro-batches of a step, all of one shape; as many as the pipeline schedule takes.

        Returns:
            On the last stage [s/cp, b, h] each ([s/cp/tp, b, h] under sequence parallelism), in the teacher's dtype;
            None on the others.
        """
        parallel = self.parallel
        kept: list[torch.Tensor] = []

        def keep(*, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            kept.append(hidden_states)
            return hidden_states.new_zeros(())  # what is returned would be cast to fp32

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            return output, torch.zeros((), dtype=torch.int, device=output.device), {}

        def forward_step(iterator: Iterator[StageInputs], chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(iterator)
            output = chunk(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=None,
                packed_seq_params=batch.packed,
                output_processor=keep,
            )
            return output, loss_func

        b, local_s = inputs[0].input_ids.shape
        run_schedule(
            forward_step,
            inputs,
            self.chunks,
            parallel,
            micro_batch_size=b,
            seq_length=local_s * parallel.cp_size,
            forward_only=True,
        )
        return kept if parallel.is_last_stage else None


def _named[Result](name: str, check: Callable[[], Result]) -> Result:
    """Run a check whose messages speak of the model, and say that the teacher is meant."""
    try:
        return check()
    except ValueError as error:
        raise ConfigError(f"{name}: {line}" for line in str(error).splitlines()) from error


def _teacher_config(config: Config, hf: HFConfig) -> Config:
    """The run's configuration with the teacher in the model's place: evaluated, never trained or saved."""
    settings = config.teacher
    first, last = _spread_layers(config, hf.num_layers)
    changes = {
        "model": {
            "hf_path": settings.teacher_path,
            "tokenizer_path": config.teacher_tokenizer_path,
            "random_init": False,
            "chat_template": None,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
            "recompute_modules": None,
            "distribute_saved_activations": False,
        },
        "parallel": {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last},
        "training": {} if settings.teacher_bf16 is None else {"bf16": settings.teacher_bf16},
        "checkpoint": {"load": settings.teacher_load, "finetune": settings.teacher_load is not None},
    }
    return config.model_copy(
        update={section: getattr(config, section).model_copy(update=values) for section, values in changes.items()}
    )


def _spread_layers(config: Config, num_layers: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage, the most even way; (None, None) where all stages are alike.

    Megatron-Core wants the stages in between to be alike, and a stage's virtual chunks too.

    Raises:
        ConfigError: there are too few layers, or virtual chunks do not divide them.
    """
    stages = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    groups, left = divmod(num_layers, chunks)  # a stage has so many groups of one layer for each of its chunks
    if left or groups < stages:
        virtual = f" of {chunks} virtual chunks each" if chunks > 1 else ""
        remedy = "another virtual_pipeline_model_parallel_size or " if chunks > 1 else ""
        raise ConfigError(
            [
                f"teacher.teacher_path {config.teacher.teacher_path}: num_hidden_layers {num_layers} cannot be spread "
                f"over pipeline_model_parallel_size {stages} stages{virtual}; use {remedy}"
                f"a pipeline_model_parallel_size of at most {max(1, groups)}, or a teacher of more layers"
            ]
        )
    if groups % stages == 0:
        return None, None
    if stages == 2:  # a last stage that is given too leaves none between, by whose number Megatron-Core divides
        return chunks * -(-groups // 2), None
    middle = stages - 2
    ends = [groups - each * middle for each in range(1, groups) if groups - each * middle >= 2]
    end = min(ends, key=lambda end: max(-(-end // 2), (groups - end) // middle))
    return chunks * -(-end // 2), chunks * (end // 2)
