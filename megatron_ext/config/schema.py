"""The configuration itself: every section, every setting with its type, range, default and meaning, and what
follows from them (batch arithmetic, evaluation sets, the log folder). It reads no files and no command line
(command_line.py) and judges no combinations of settings (checks.py). This package imports no torch."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator

from megatron_ext.config.base import AutoOrTokens, Real, Section, name_setting, path_setting, refusal, setting
from megatron_ext.config.losses import CrossEntropyLoss, DistillationLoss, LossConfig, check_loss_names
from megatron_ext.config.messages import ConfigError, explain

DEFAULT_EVALUATION_SET = "validation"
DEFAULT_RUN_NAME = "sft"
EVALUATION_SUFFIX = "_eval"  # of the log folder of an evaluation run


class ModelConfig(Section):
    """Which model, where its weights and tokenizer come from, and how it is computed."""

    hf_path: str = path_setting(
        ...,
        "Hugging Face directory (config.json and *.safetensors) or .gguf file to start from; "
        "with random_init a directory holding a config.json, or that config.json",
    )
    random_init: bool = setting(
        False, "start from random weights (the same ones under every layout) instead of those at hf_path"
    )
    tokenizer_path: str | None = path_setting(
        None, "directory or .gguf file of the tokenizer (null: hf_path, or the directory of a config.json)"
    )
    chat_template: str | None = path_setting(None, "jinja file to use instead of the tokenizer's own chat template")
    transformer_impl: Literal["auto", "transformer_engine", "torch"] = setting(
        "auto", "layers to build the model from (auto: Transformer Engine where it works, else torch)"
    )
    make_vocab_size_divisible_by: int = setting(
        128,
        "the vocabulary is padded to a multiple of this times tensor_model_parallel_size",
        unit="tokens",
        ge=1,
        le=10**6,
    )
    attention_dropout: Real = setting(0.0, "dropout of the attention weights", unit="probability", ge=0, lt=1)
    hidden_dropout: Real = setting(0.0, "dropout of the hidden states", unit="probability", ge=0, lt=1)
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None,
        "recompute activations in backward instead of storing them: whole layers, or recompute_modules only",
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, "with full: checkpoint equal groups of layers, or only the first layers of each pipeline stage"
    )
    recompute_num_layers: int | None = setting(
        None,
        "with full: layers in a group (uniform) or recomputed on each stage (block)",
        unit="layers",
        ge=1,
    )
    recompute_modules: list[Literal["core_attn", "layernorm", "mlp"]] | None = setting(
        None, "with selective: the parts to recompute (null: core_attn)"
    )
    distribute_saved_activations: bool = setting(
        False, "with full: split the stored activations over the tensor-parallel ranks"
    )


class ParallelConfig(Section):
    """How the model and the batch are divided over ranks; data parallelism takes the ranks that are left."""

    tensor_model_parallel_size: int = setting(1, "ranks that share each layer's matrices", unit="ranks", ge=1)
    sequence_parallel: bool = setting(
        False, "also split norms, dropout and residuals over the tensor-parallel ranks, along the sequence"
    )
    pipeline_model_parallel_size: int = setting(1, "stages the layers are divided into", unit="ranks", ge=1)
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        "model chunks on each pipeline rank, for the interleaved schedule (null: off)",
        unit="chunks",
        ge=1,
    )
    num_layers_in_first_pipeline_stage: int | None = setting(
        None, "layers of the first stage (null: an even share)", unit="layers", ge=1
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, "layers of the last stage (null: an even share)", unit="layers", ge=1
    )
    context_parallel_size: int = setting(1, "ranks that share each sequence", unit="ranks", ge=1)
    expert_model_parallel_size: int = setting(1, "ranks that share a layer's experts", unit="ranks", ge=1)
    overlap_grad_reduce: bool = setting(False, "reduce gradients while backward still runs")
    overlap_param_gather: bool = setting(
        False, "gather the distributed optimizer's parameters while forward already runs"
    )
    distributed_timeout_minutes: Real = setting(
        10.0, "a collective that takes longer ends the run", unit="minutes", gt=0, le=10080
    )


class DataConfig(Section):
    """What is trained and evaluated on, and how rows become sequences."""

    train_data_path: str | None = path_setting(None, "JSONL file of conversations to train on (needed for training)")
    valid_data_path: str | dict[str, str] | None = setting(
        None,
        "JSONL file to evaluate on (the set is called validation), or a map from set name to file",
        unit="path",
    )
    seq_length: int = setting(1024, "longest sequence; longer rows are truncated", unit="tokens", ge=1)
    messages_key: str = name_setting("messages", "key of a row that holds its list of {role, content} messages")
    prompt_key: str = name_setting("prompt", "key of a prompt/completion row that holds the prompt")
    completion_key: str = name_setting("completion", "key of a prompt/completion row that holds the trained answer")
    pad_to: Literal["longest", "seq_length"] = setting(
        "longest", "pad micro-batches to the step's longest sequence, or always to seq_length"
    )
    packing: bool = setting(
        False,
        "let rows share sequences, to pad less; a micro-batch is then one sequence of up to micro_batch_size times "
        "seq_length tokens, and losses and gradients stay what they are",
    )
    shuffle: bool = setting(True, "visit the rows in another order, fixed by seed, in every epoch")

    @field_validator("valid_data_path", mode="before")
    @classmethod
    def _check_evaluation_sets(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value):
            return value
        if not isinstance(value, dict) or not value:
            raise refusal("is neither a file nor a map from set name to file", "use a path, or {name: path}")
        for name, path in value.items():
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
                raise refusal(f"names a set {name!r}", "use a name of letters, digits and _ . + - (no slash, no space)")
            if name == "train":
                raise refusal(f"names a set {name!r}, as the training metrics are", "use another name")
            if not isinstance(path, str) or not path:
                raise refusal(f"gives the set {name!r} the file {path!r}", "use the path of a JSONL file")
        return value


class TeacherConfig(Section):
    """The teacher of forward_kl, reverse_kl and jsd: a model beside the student, or what one said before."""

    teacher_path: str | None = path_setting(
        None, "Hugging Face directory or .gguf file of the teacher, of any depth and width (null: no teacher)"
    )
    teacher_load: str | None = path_setting(
        None, "directory of Megatron checkpoints to take the teacher's weights from; teacher_path gives its config.json"
    )
    teacher_tokenizer_path: str | None = path_setting(
        None, "directory or .gguf file of the teacher's tokenizer, which has to be the student's (null: teacher_path)"
    )
    teacher_bf16: bool | None = setting(None, "compute the teacher in bfloat16 (null: as the student; off: float32)")
    teacher_cache: str | None = path_setting(
        None, "directory written by scripts/cache_teacher.py to read the teacher's probabilities from"
    )


class LogitsConfig(Section):
    """How logits are made from the last hidden states."""

    implementation: Literal["chunked", "materialized"] = setting(
        "chunked",
        "chunked: a few hundred tokens at a time, the logits of a micro-batch never exist at once; "
        "materialized: all at once, to check the other",
    )
    chunk_tokens: AutoOrTokens = setting(
        "auto", "tokens in a chunk (auto: as many as keep a chunk's logits small)", unit="tokens", le=None
    )
    logit_softcap: Real | None = setting(
        None, "logits become softcap * tanh(logits / softcap), after logit_scale (null: they stay as they are)", gt=0
    )
    logit_scale: Real = setting(1.0, "logits are multiplied by it", gt=0)


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    optimizer: Literal["adam", "sgd"] = setting("adam", "adam (with decoupled weight decay) or sgd")
    lr: Real = setting(1e-5, "highest learning rate, reached after the warm-up", ge=0)
    min_lr: Real = setting(0.0, "learning rate at the end of the decay", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = setting("cosine", "shape of the decay from lr to min_lr")
    lr_warmup_iters: int = setting(0, "iterations over which the learning rate rises to lr", unit="iterations", ge=0)
    lr_warmup_init: Real = setting(0.0, "learning rate the warm-up starts from", ge=0)
    lr_decay_iters: int | None = setting(
        None, "iteration at which min_lr is reached (null: train_iters)", unit="iterations", ge=1
    )
    weight_decay: Real = setting(0.0, "weight decay of matrices (biases and norms have none)", ge=0)
    adam_beta1: Real = setting(0.9, "decay rate of the first moment", ge=0, lt=1)
    adam_beta2: Real = setting(0.95, "decay rate of the second moment", ge=0, lt=1)
    adam_eps: Real = setting(1e-8, "added to the denominator of Adam's update", gt=0)
    clip_grad: Real = setting(1.0, "largest global gradient norm (0: no clipping)", ge=0)
    use_distributed_optimizer: bool = setting(False, "split the optimizer's states over the data-parallel ranks")


class TrainingConfig(Section):
    """How long, in which batches, in which precision and on what training runs."""

    train_iters: int | None = setting(None, "optimizer steps (needed for training)", unit="iterations", ge=1)
    micro_batch_size: int = setting(1, "sequences in one forward pass of one rank", unit="sequences", ge=1)
    global_batch_size: int = setting(8, "sequences in one optimizer step, over all ranks", unit="sequences", ge=1)
    loss_reduction: Literal["token_mean", "sequence_mean"] = setting(
        "token_mean",
        "token_mean: the mean over all trained tokens of the global batch; "
        "sequence_mean: the mean over sequences of each sequence's token mean",
    )
    seed: int = setting(1234, "seed of shuffling, dropout and random weights", ge=0, le=2**31 - 1)
    bf16: bool = setting(False, "compute in bfloat16, with float32 master weights and gradients (off: float32)")
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "where to run (auto: GPUs if there are any)")


class EvaluationConfig(Section):
    """When and how the evaluation sets of data.valid_data_path are measured."""

    eval_interval: int | None = setting(
        None, "evaluate every so many iterations (null: only before and after)", unit="iterations", ge=1
    )
    eval_before_training: bool = setting(False, "evaluate before the first iteration")
    eval_after_training: bool = setting(True, "evaluate after the last iteration")
    eval_micro_batch_size: int | None = setting(
        None, "sequences in one evaluation pass of one rank (null: micro_batch_size)", unit="sequences", ge=1
    )
    eval_only: bool = setting(
        False, "evaluate the weights of load, or without it those of hf_path, and train nothing; prints and eval.json"
    )
    per_token_outputs: str | None = path_setting(
        None, "with eval_only: .parquet or .jsonl file for one row per sequence, with the values of its tokens"
    )
    overwrite: bool = setting(False, "replace the file of per_token_outputs if it exists")


class CheckpointConfig(Section):
    """What is saved and what is resumed."""

    save: str | None = path_setting(None, "directory to write checkpoints to (null: none are written)")
    load: str | None = path_setting(None, "directory of checkpoints to resume from")
    save_interval: int | None = setting(
        None, "save every so many iterations (null: only at the end)", unit="iterations", ge=1
    )
    save_hf: str | None = path_setting(
        None, "directory to write the trained model to in Hugging Face format, at the end"
    )
    finetune: bool = setting(False, "take only the weights from load; start again at iteration 0")
    no_load_optim: bool = setting(False, "do not restore the optimizer's states from load")
    no_save_optim: bool = setting(False, "do not write the optimizer's states to save")


class LoggingConfig(Section):
    """What is reported, where."""

    log_interval: int = setting(1, "log every so many iterations", unit="iterations", ge=1)
    token_metrics: bool = setting(False, "also report token_accuracy and entropy, means over the trained tokens")
    log_dir: str | None = path_setting(
        None,
        "directory of metrics.jsonl and config.yaml (null: save, else runs/<name of the config file>; "
        "with eval_only runs/<name>_eval)",
    )
    wandb_project: str | None = setting(None, "Weights & Biases project to report to (null: none)", min_length=1)
    wandb_exp_name: str | None = setting(None, "name of this run in the Weights & Biases project", min_length=1)


class Config(Section):
    """One run, fully resolved. Build it with load_config (command line) or Config.from_dict (Python)."""

    # The invalid default makes a missing section report the settings it lacks (model.hf_path), not itself.
    model: ModelConfig = Field({}, validate_default=True)
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    losses: Annotated[dict[str, LossConfig], AfterValidator(check_loss_names)] = Field(
        {"lm_loss": CrossEntropyLoss(type="cross_entropy")},
        description="The losses, by metric name; by default lm_loss, a cross_entropy of weight 1.",
    )
    teacher: TeacherConfig = TeacherConfig()
    logits: LogitsConfig = LogitsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From nested plain values {section: {setting: value}}; raises ConfigError naming every problem."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(problem.text for problem in explain(error, cls)) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain nested values, defaults included: Config.from_dict(config.to_dict()) == config."""
        return self.model_dump()

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and share one batch: TP x CP x PP."""
        parallel = self.parallel
        return (
            parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.model_parallel_size

    def num_micro_batches(self, world_size: int) -> int:
        """Micro-batches of each rank in one optimizer step, if rows are not packed (then each step has its own)."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size(world_size))

    @property
    def sequence_multiple(self) -> int:
        """What padded sequence lengths must be a multiple of: CP gives each rank two chunks of a sequence, SP
        divides each chunk over the tensor-parallel ranks."""
        parallel = self.parallel
        context = 2 * parallel.context_parallel_size if parallel.context_parallel_size > 1 else 1
        return context * (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)

    @property
    def packing_multiple(self) -> int:
        """What each sequence in a packed row is padded to a multiple of: CP cuts every one on its own, SP the row."""
        context = self.parallel.context_parallel_size
        return 2 * context if context > 1 else 1

    @property
    def evaluation_sets(self) -> dict[str, str]:
        """File of each evaluation set, by name; empty when there is nothing to evaluate on."""
        paths = self.data.valid_data_path
        if paths is None:
            return {}
        return {DEFAULT_EVALUATION_SET: paths} if isinstance(paths, str) else dict(paths)

    @property
    def eval_micro_batch_size(self) -> int:
        return self.evaluation.eval_micro_batch_size or self.training.micro_batch_size

    @property
    def lr_decay_iters(self) -> int | None:
        """Iteration at which the decay ends; None only when train_iters is not set either."""
        return self.optimizer.lr_decay_iters or self.training.train_iters

    @property
    def tokenizer_path(self) -> str:
        if self.model.tokenizer_path is not None:
            return self.model.tokenizer_path
        source = Path(self.model.hf_path)
        return str(source.parent if source.suffix == ".json" else source)

    @property
    def distillation_losses(self) -> dict[str, DistillationLoss]:
        """The losses that need a teacher; weight 0 needs one too, to be logged."""
        return {name: loss for name, loss in self.losses.items() if isinstance(loss, DistillationLoss)}

    @property
    def teacher_tokenizer_path(self) -> str | None:
        """None without a teacher_path."""
        teacher = self.teacher
        if teacher.teacher_tokenizer_path is not None or teacher.teacher_path is None:
            return teacher.teacher_tokenizer_path
        source = Path(teacher.teacher_path)
        return str(source.parent if source.suffix == ".json" else source)

    @property
    def log_directory(self) -> Path:
        """Folder of metrics.jsonl and config.yaml; of an evaluation run, of metrics.jsonl and eval.json."""
        if self.logging.log_dir is not None:
            return Path(self.logging.log_dir)
        if self.evaluation.eval_only:  # never the checkpoints' folder
            return Path(f"runs/{DEFAULT_RUN_NAME}{EVALUATION_SUFFIX}")
        return Path(self.checkpoint.save or f"runs/{DEFAULT_RUN_NAME}")
