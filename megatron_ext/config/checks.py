"""Which settings cannot go together, among themselves and with the number of ranks. It needs no process
group and no torch, and knows no model: heads and layers are checked where the model's own configuration is
read."""

import math

from megatron_ext.config.messages import ConfigError
from megatron_ext.config.paths import file_problems
from megatron_ext.config.schema import Config

MAX_LISTED = 8  # numbers named in a remedy
TOKEN_FILE_SUFFIXES = (".parquet", ".jsonl")


def check_layout(config: Config, world_size: int) -> None:
    """Raises ConfigError naming every impossible combination for this number of ranks."""
    problems = combination_problems(config) + layout_problems(config, world_size)
    if problems:
        raise ConfigError(problems)


def check_files(config: Config) -> None:
    """Raises ConfigError naming every path that is missing, of the wrong kind or not writable."""
    problems = file_problems(config)
    if problems:
        raise ConfigError(problems)


def purpose_problems(config: Config) -> list[str]:
    """What training needs, or an evaluation run, and other uses of a configuration (conversion) do not."""
    if config.evaluation.eval_only:
        if config.evaluation_sets:
            return []
        return ["data.valid_data_path is not set, as eval_only needs; give the JSONL file to evaluate on"]
    problems = []
    if config.data.train_data_path is None:
        problems.append("data.train_data_path is not set; give the JSONL file to train on")
    if config.training.train_iters is None:
        problems.append("training.train_iters is not set; give the number of optimizer steps to train for")
    return problems


def combination_problems(config: Config) -> list[str]:
    """Combinations that are impossible on any number of ranks."""
    return [
        *_parallel_problems(config),
        *_sequence_problems(config),
        *_recompute_problems(config),
        *_optimizer_problems(config),
        *_teacher_problems(config),
        *_evaluation_problems(config),
        *_export_problems(config),
        *_unused_problems(config),
    ]


def layout_problems(config: Config, world_size: int) -> list[str]:
    """Combinations that are impossible on this number of ranks."""
    if world_size < 1:
        return [f"WORLD_SIZE: {world_size} is not a number of ranks; start 1 rank or more (torchrun sets it)"]
    parallel, training = config.parallel, config.training
    size = config.model_parallel_size
    if world_size % size:
        return [
            f"world size {world_size} (the number of ranks started) is not divisible by {_product(config)}; "
            f"start a multiple of {size} ranks, or use sizes whose product divides {world_size}"
        ]
    problems = []
    ranks = config.data_parallel_size(world_size)
    room = parallel.context_parallel_size * ranks
    if room % parallel.expert_model_parallel_size:
        problems.append(
            f"parallel.expert_model_parallel_size: {parallel.expert_model_parallel_size} does not divide "
            f"context_parallel_size {parallel.context_parallel_size} x data-parallel size {ranks} = {room}, "
            f"the ranks that experts are spread over; use {_one_of(_divisors(room))}"
        )
    samples = training.micro_batch_size * ranks
    if config.evaluation.eval_only or config.data.packing:  # they have batches of their own
        pass
    elif training.global_batch_size % samples:
        problems.append(
            f"training.global_batch_size: {training.global_batch_size} is not divisible by "
            f"micro_batch_size {training.micro_batch_size} x data-parallel size {ranks} = {samples}; "
            f"use {_one_of(_near_multiples(training.global_batch_size, samples))}, "
            "or another micro_batch_size"
        )
    elif parallel.virtual_pipeline_model_parallel_size is not None:
        stages = parallel.pipeline_model_parallel_size
        count = config.num_micro_batches(world_size)
        if count % stages:
            nearest = [number * samples for number in _near_multiples(count, stages)]
            problems.append(
                f"training.global_batch_size: {training.global_batch_size} gives each rank {count} "
                "micro-batches, but the interleaved schedule takes only multiples of "
                f"pipeline_model_parallel_size {stages}; "
                f"use {_one_of(nearest)}, or leave out virtual_pipeline_model_parallel_size"
            )
    return problems


def _parallel_problems(config: Config) -> list[str]:
    parallel = config.parallel
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    problems = []
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        problems.append(
            "parallel.sequence_parallel: true has nothing to split over with tensor_model_parallel_size 1; "
            "use tensor_model_parallel_size 2 or more, or sequence_parallel false"
        )
    if chunks == 1:
        problems.append(
            "parallel.virtual_pipeline_model_parallel_size: 1 is not an interleaved schedule; "
            "use 2 or more, or null for the plain schedule"
        )
    elif chunks is not None and stages == 1:
        problems.append(
            f"parallel.virtual_pipeline_model_parallel_size: {chunks} needs a pipeline, but "
            "pipeline_model_parallel_size is 1; use pipeline_model_parallel_size 2 or more, or null"
        )
    for name, layers in (
        ("num_layers_in_first_pipeline_stage", parallel.num_layers_in_first_pipeline_stage),
        ("num_layers_in_last_pipeline_stage", parallel.num_layers_in_last_pipeline_stage),
    ):
        if layers is not None and stages == 1:
            problems.append(
                f"parallel.{name}: {layers} needs a pipeline, but pipeline_model_parallel_size is 1; "
                "use pipeline_model_parallel_size 2 or more, or null"
            )
        elif layers is not None and chunks is not None and layers % chunks:
            problems.append(
                f"parallel.{name}: {layers} is not divisible by "
                f"virtual_pipeline_model_parallel_size {chunks}; "
                f"use {_one_of(_near_multiples(layers, chunks))}"
            )
    if (
        parallel.expert_model_parallel_size > 1
        and parallel.tensor_model_parallel_size > 1
        and not parallel.sequence_parallel
    ):
        problems.append(
            f"parallel.sequence_parallel: false cannot go with expert_model_parallel_size "
            f"{parallel.expert_model_parallel_size} and tensor_model_parallel_size "
            f"{parallel.tensor_model_parallel_size}; use sequence_parallel true"
        )
    if parallel.overlap_param_gather:
        missing = [
            name
            for name, on in (
                ("optimizer.use_distributed_optimizer", config.optimizer.use_distributed_optimizer),
                ("parallel.overlap_grad_reduce", parallel.overlap_grad_reduce),
            )
            if not on
        ]
        if missing:
            problems.append(
                f"parallel.overlap_param_gather: true works only with {' and '.join(missing)}; "
                "set them to true, or overlap_param_gather to false"
            )
    if config.model.transformer_impl == "transformer_engine" and config.training.device == "cpu":
        problems.append(
            "model.transformer_impl: transformer_engine runs on GPUs only, but training.device is cpu; "
            "use transformer_impl auto or torch, or device cuda"
        )
    return problems


def _sequence_problems(config: Config) -> list[str]:
    length, multiple, parallel = config.data.seq_length, config.sequence_multiple, config.parallel
    if length % multiple == 0:
        return []
    reasons = []
    if parallel.context_parallel_size > 1:
        reasons.append(f"2 x context_parallel_size {parallel.context_parallel_size}")
    if parallel.sequence_parallel:
        reasons.append(f"tensor_model_parallel_size {parallel.tensor_model_parallel_size} (for sequence_parallel)")
    equals = f" = {multiple}" if len(reasons) > 1 or parallel.context_parallel_size > 1 else ""
    return [
        f"data.seq_length: {length} is not divisible by {' x '.join(reasons)}{equals}; "
        f"use {_one_of(_near_multiples(length, multiple))}"
    ]


def _recompute_problems(config: Config) -> list[str]:
    model = config.model
    granularity, modules, problems = model.recompute_granularity, model.recompute_modules, []
    for name, value, owner in (
        ("recompute_method", model.recompute_method, "full"),
        ("recompute_num_layers", model.recompute_num_layers, "full"),
        ("recompute_modules", modules, "selective"),
    ):
        if value is not None and granularity != owner:
            problems.append(
                f"model.{name}: {value} has no meaning with recompute_granularity {granularity or 'null'}; "
                f"use recompute_granularity {owner}, or leave out {name}"
            )
    if granularity == "full" and model.recompute_method is None:
        problems.append("model.recompute_method is not set, as recompute_granularity full needs; use uniform or block")
    if granularity == "full" and model.recompute_num_layers is None:
        problems.append(
            "model.recompute_num_layers is not set, as recompute_granularity full needs; "
            "use a number from 1 to the layers of a pipeline stage"
        )
    if modules is not None and (not modules or len(set(modules)) < len(modules)):
        problems.append(
            f"model.recompute_modules: {modules} is empty or names a part twice; "
            "name each part once, or leave it out for core_attn"
        )
    if model.distribute_saved_activations:
        needs = []
        if granularity != "full":
            needs.append("recompute_granularity full")
        if config.parallel.tensor_model_parallel_size == 1:
            needs.append("tensor_model_parallel_size 2 or more")
        if config.parallel.sequence_parallel:
            needs.append("sequence_parallel false (which splits activations already)")
        if needs:
            problems.append(
                f"model.distribute_saved_activations: true needs {' and '.join(needs)}; change that, or set it to false"
            )
    return problems


def _optimizer_problems(config: Config) -> list[str]:
    optimizer, problems = config.optimizer, []
    if optimizer.optimizer != "adam" and optimizer.use_distributed_optimizer:
        problems.append(
            f"optimizer.use_distributed_optimizer: true works only with adam, not {optimizer.optimizer}; "
            "use optimizer adam, or use_distributed_optimizer false"
        )
    if optimizer.min_lr > optimizer.lr:
        problems.append(f"optimizer.min_lr: {optimizer.min_lr} is above lr {optimizer.lr}; use at most {optimizer.lr}")
    if optimizer.lr_warmup_init > optimizer.lr:
        problems.append(
            f"optimizer.lr_warmup_init: {optimizer.lr_warmup_init} is above lr {optimizer.lr}; "
            f"use at most {optimizer.lr}"
        )
    end = config.lr_decay_iters
    if end is not None and optimizer.lr_warmup_iters >= end:
        source = "lr_decay_iters" if optimizer.lr_decay_iters is not None else "train_iters"
        problems.append(
            f"optimizer.lr_warmup_iters: {optimizer.lr_warmup_iters} is not below {source} {end}, "
            f"where the decay ends; use at most {end - 1}, or a larger {source}"
        )
    return problems


def _teacher_problems(config: Config) -> list[str]:
    """Losses against a teacher without one, a teacher that nothing asks, and two teachers at once."""
    teacher, losses = config.teacher, config.distillation_losses
    problems = []
    if teacher.teacher_path is None and teacher.teacher_cache is None:
        problems += [
            f"losses.{name}: a loss of type {loss.type} needs a teacher; set teacher.teacher_path or "
            f"teacher.teacher_cache, or leave {name} out"
            for name, loss in losses.items()
        ]
    for name in ("teacher_path", "teacher_cache"):
        value = getattr(teacher, name)
        if value is not None and not losses:
            problems.append(
                f"teacher.{name}: {value} does nothing without a loss of type forward_kl, reverse_kl or jsd; "
                f"add one to losses (weight 0: logged only), or leave {name} out"
            )
    if teacher.teacher_cache is None:
        return problems
    if teacher.teacher_path is not None:
        problems.append(
            f"teacher.teacher_cache: {teacher.teacher_cache} takes the place of a teacher, but teacher_path "
            f"{teacher.teacher_path} is set too; leave one of them out"
        )
    problems += [
        f"losses.{name}.top_k is not set, but teacher.teacher_cache holds the teacher's top k only; "
        "set it to the top_k that the store was written with"
        for name, loss in losses.items()
        if loss.top_k is None
    ]
    return problems


def _evaluation_problems(config: Config) -> list[str]:
    evaluation, problems = config.evaluation, []
    path = evaluation.per_token_outputs
    if path is not None and not evaluation.eval_only:
        problems.append(
            f"evaluation.per_token_outputs: {path} does nothing without evaluation.eval_only; "
            "set evaluation.eval_only, or leave evaluation.per_token_outputs out"
        )
    if path is not None and not path.endswith(TOKEN_FILE_SUFFIXES):
        problems.append(
            f"evaluation.per_token_outputs: {path} has no known kind of file; "
            f"let its name end with {' or '.join(TOKEN_FILE_SUFFIXES)}"
        )
    return problems


def _export_problems(config: Config) -> list[str]:
    """What a Hugging Face model of these families cannot say."""
    if config.checkpoint.save_hf is None:
        return []
    return [
        f"logits.{name}: {value} cannot go with checkpoint.save_hf {config.checkpoint.save_hf}: the exported model "
        f"would compute other logits; leave {name} out, or save_hf"
        for name, value, default in (
            ("logit_softcap", config.logits.logit_softcap, None),
            ("logit_scale", config.logits.logit_scale, 1.0),
        )
        if value != default
    ]


def _unused_problems(config: Config) -> list[str]:
    """Settings that would silently do nothing."""
    data, evaluation, checkpoint, logging = config.data, config.evaluation, config.checkpoint, config.logging
    teacher = config.teacher
    valid, problems = data.valid_data_path, []
    keys = [data.messages_key, data.prompt_key, data.completion_key]
    if len(set(keys)) < len(keys):
        problems.append(
            f"data.messages_key, data.prompt_key and data.completion_key: {', '.join(map(repr, keys))} "
            "are not three different keys; rename one"
        )
    logits = config.logits
    if logits.implementation == "materialized" and logits.chunk_tokens != "auto":
        problems.append(
            f"logits.chunk_tokens: {logits.chunk_tokens} does nothing with implementation materialized; "
            "use implementation chunked, or leave chunk_tokens out"
        )
    pairs = (
        ("evaluation.eval_interval", evaluation.eval_interval, "data.valid_data_path", valid),
        ("evaluation.eval_before_training", evaluation.eval_before_training, "data.valid_data_path", valid),
        (
            "evaluation.overwrite",
            evaluation.overwrite,
            "evaluation.per_token_outputs",
            evaluation.per_token_outputs,
        ),
        ("checkpoint.save_interval", checkpoint.save_interval, "checkpoint.save", checkpoint.save),
        ("checkpoint.no_save_optim", checkpoint.no_save_optim, "checkpoint.save", checkpoint.save),
        ("checkpoint.finetune", checkpoint.finetune, "checkpoint.load", checkpoint.load),
        ("checkpoint.no_load_optim", checkpoint.no_load_optim, "checkpoint.load", checkpoint.load),
        ("teacher.teacher_load", teacher.teacher_load, "teacher.teacher_path", teacher.teacher_path),
        (
            "teacher.teacher_tokenizer_path",
            teacher.teacher_tokenizer_path,
            "teacher.teacher_path",
            teacher.teacher_path,
        ),
        ("teacher.teacher_bf16", teacher.teacher_bf16, "teacher.teacher_path", teacher.teacher_path),
        ("logging.wandb_exp_name", logging.wandb_exp_name, "logging.wandb_project", logging.wandb_project),
    )
    for name, value, needed, needed_value in pairs:
        if value and needed_value is None:
            given = str(value).lower() if isinstance(value, bool) else value
            problems.append(f"{name}: {given} does nothing without {needed}; set {needed}, or leave {name} out")
    return problems


def _product(config: Config) -> str:
    parallel = config.parallel
    return (
        f"tensor_model_parallel_size {parallel.tensor_model_parallel_size} x "
        f"context_parallel_size {parallel.context_parallel_size} x "
        f"pipeline_model_parallel_size {parallel.pipeline_model_parallel_size} = {config.model_parallel_size}"
    )


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _near_multiples(number: int, of: int) -> list[int]:
    """The multiples of `of` just below (if positive) and above a number."""
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def _one_of(numbers: list[int]) -> str:
    """'8', '8 or 16', '1, 2 or 4', '1, 2, 3, 4, 5, 6, 8, 9 ...'"""
    if len(numbers) > MAX_LISTED:
        return ", ".join(map(str, numbers[:MAX_LISTED])) + " ..."
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
