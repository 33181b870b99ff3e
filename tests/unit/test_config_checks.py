"""Combinations of settings: each impossible one is refused in given words, each possible one passes, and nothing that
Megatron-Core's own configuration classes refuse gets past these checks."""
# ruff: noqa: E501 (a table of messages has one case a line)

import itertools
from typing import Any

import pytest

from megatron_ext.config import Config, ConfigError, check_layout
from megatron_ext.config.checks import combination_problems, layout_problems
from megatron_ext.config.settings import settings


def config_of(**leaves: Any) -> Config:
    """A configuration of settings named by their leaves."""
    values: dict[str, dict[str, Any]] = {"model": {"hf_path": "m"}, "training": {"train_iters": 10}}
    for name, value in leaves.items():
        if name == "losses":
            values[name] = value
        else:
            values.setdefault(settings(Config)[name].section, {})[name] = value
    return Config.from_dict(values)


TP, PP, VPP, CP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
LAYOUTS = [  # settings, world size, the problem (or None)
    ({}, 1, None),
    ({}, 8, None),
    ({TP: 2, CP: 2, PP: 2}, 16, None),
    ({TP: 3}, 2, "world size 2 (the number of ranks started) is not divisible by tensor_model_parallel_size 3 x context_parallel_size 1 x pipeline_model_parallel_size 1 = 3; start a multiple of 3 ranks, or use sizes whose product divides 2"),
    ({TP: 2, PP: 2}, 6, "world size 6 (the number of ranks started) is not divisible by tensor_model_parallel_size 2 x context_parallel_size 1 x pipeline_model_parallel_size 2 = 4; start a multiple of 4 ranks, or use sizes whose product divides 6"),
    ({}, 3, "training.global_batch_size: 8 is not divisible by micro_batch_size 1 x data-parallel size 3 = 3; use 6 or 9, or another micro_batch_size"),
    ({"micro_batch_size": 5, "global_batch_size": 4}, 1, "training.global_batch_size: 4 is not divisible by micro_batch_size 5 x data-parallel size 1 = 5; use 5, or another micro_batch_size"),
    ({"micro_batch_size": 2, "global_batch_size": 12}, 3, None),
    ({"eval_only": True, "micro_batch_size": 5}, 3, None),
    ({"eval_only": True, PP: 2, VPP: 2, "global_batch_size": 3}, 2, None),
    ({"packing": True, "micro_batch_size": 5, "global_batch_size": 7}, 3, None),
    ({"packing": True, PP: 2, VPP: 2, "global_batch_size": 3}, 4, None),
    ({PP: 2, VPP: 2, "global_batch_size": 6}, 2, None),
    ({PP: 2, VPP: 2, "global_batch_size": 6}, 4, "training.global_batch_size: 6 gives each rank 3 micro-batches, but the interleaved schedule takes only multiples of pipeline_model_parallel_size 2; use 4 or 8, or leave out virtual_pipeline_model_parallel_size"),
    ({PP: 2, "global_batch_size": 6}, 4, None),
    ({PP: 4, VPP: 2, "global_batch_size": 2}, 4, "training.global_batch_size: 2 gives each rank 2 micro-batches, but the interleaved schedule takes only multiples of pipeline_model_parallel_size 4; use 4, or leave out virtual_pipeline_model_parallel_size"),
    ({"expert_model_parallel_size": 2}, 2, None),
    ({"expert_model_parallel_size": 2, CP: 2}, 2, None),
    ({"expert_model_parallel_size": 3}, 4, "parallel.expert_model_parallel_size: 3 does not divide context_parallel_size 1 x data-parallel size 4 = 4, the ranks that experts are spread over; use 1, 2 or 4"),
    ({"expert_model_parallel_size": 7, "global_batch_size": 360}, 360, "parallel.expert_model_parallel_size: 7 does not divide context_parallel_size 1 x data-parallel size 360 = 360, the ranks that experts are spread over; use 1, 2, 3, 4, 5, 6, 8, 9 ..."),
]  # fmt: skip


@pytest.mark.parametrize(("leaves", "world_size", "problem"), LAYOUTS)
def test_layouts(leaves: dict[str, Any], world_size: int, problem: str | None) -> None:
    config = config_of(**leaves)
    assert layout_problems(config, world_size) == ([] if problem is None else [problem])
    if problem is None:
        check_layout(config, world_size)
    else:
        with pytest.raises(ConfigError) as error:
            check_layout(config, world_size)
        assert error.value.problems == [problem]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
KL = {"lm_loss": {"type": "cross_entropy"}, "kl": {"type": "forward_kl"}}
LOGGED_KL = {"lm_loss": {"type": "cross_entropy"}, "kl": {"type": "jsd", "weight": 0}}
TOP_KL = {"kl": {"type": "reverse_kl", "top_k": 8, "tail": "bucket"}}
COMBINATIONS = [  # settings, the start of each problem
    ({TP: 2, "sequence_parallel": True}, []),
    ({"sequence_parallel": True}, ["parallel.sequence_parallel: true has nothing to split over with tensor_model_parallel_size 1; use"]),
    ({PP: 2, VPP: 2}, []),
    ({PP: 2, VPP: 1}, ["parallel.virtual_pipeline_model_parallel_size: 1 is not an interleaved schedule; use 2 or more, or null"]),
    ({VPP: 2}, ["parallel.virtual_pipeline_model_parallel_size: 2 needs a pipeline, but pipeline_model_parallel_size is 1; use"]),
    ({PP: 2, "num_layers_in_first_pipeline_stage": 3}, []),
    ({"num_layers_in_first_pipeline_stage": 3}, ["parallel.num_layers_in_first_pipeline_stage: 3 needs a pipeline"]),
    ({"num_layers_in_last_pipeline_stage": 3}, ["parallel.num_layers_in_last_pipeline_stage: 3 needs a pipeline"]),
    ({PP: 2, VPP: 2, "num_layers_in_last_pipeline_stage": 4}, []),
    ({PP: 2, VPP: 2, "num_layers_in_last_pipeline_stage": 3}, ["parallel.num_layers_in_last_pipeline_stage: 3 is not divisible by virtual_pipeline_model_parallel_size 2; use 2 or 4"]),
    ({"expert_model_parallel_size": 2, TP: 2, "sequence_parallel": True}, []),
    ({"expert_model_parallel_size": 2, TP: 2}, ["parallel.sequence_parallel: false cannot go with expert_model_parallel_size 2 and tensor_model_parallel_size 2; use sequence_parallel true"]),
    ({"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": True}, []),
    ({"overlap_param_gather": True, "overlap_grad_reduce": True}, ["parallel.overlap_param_gather: true works only with optimizer.use_distributed_optimizer; set"]),
    ({"overlap_param_gather": True}, ["parallel.overlap_param_gather: true works only with optimizer.use_distributed_optimizer and parallel.overlap_grad_reduce; set"]),
    ({"transformer_impl": "transformer_engine", "device": "cuda"}, []),
    ({"transformer_impl": "transformer_engine", "device": "auto"}, []),
    ({"transformer_impl": "transformer_engine", "device": "cpu"}, ["model.transformer_impl: transformer_engine runs on GPUs only, but training.device is cpu; use"]),
    # sequences
    ({CP: 2, "seq_length": 8}, []),
    ({CP: 2, "seq_length": 10}, ["data.seq_length: 10 is not divisible by 2 x context_parallel_size 2 = 4; use 8 or 12"]),
    ({CP: 2, "seq_length": 3}, ["data.seq_length: 3 is not divisible by 2 x context_parallel_size 2 = 4; use 4"]),
    ({TP: 3, "sequence_parallel": True, "seq_length": 9}, []),
    ({TP: 3, "seq_length": 10}, []),
    ({TP: 3, "sequence_parallel": True, "seq_length": 10}, ["data.seq_length: 10 is not divisible by tensor_model_parallel_size 3 (for sequence_parallel); use 9 or 12"]),
    ({TP: 2, CP: 2, "sequence_parallel": True, "seq_length": 12}, ["data.seq_length: 12 is not divisible by 2 x context_parallel_size 2 x tensor_model_parallel_size 2 (for sequence_parallel) = 8; use 8 or 16"]),
    # recomputation
    (FULL, []),
    ({"recompute_granularity": "full"}, ["model.recompute_method is not set, as recompute_granularity full needs; use", "model.recompute_num_layers is not set, as recompute_granularity full needs; use"]),
    ({"recompute_granularity": "selective"}, []),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]}, []),
    ({"recompute_granularity": "selective", "recompute_modules": []}, ["model.recompute_modules: [] is empty or names a part twice; name"]),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp", "mlp"]}, ["model.recompute_modules: ['mlp', 'mlp'] is empty or names"]),
    ({"recompute_granularity": "selective", "recompute_num_layers": 1}, ["model.recompute_num_layers: 1 has no meaning with recompute_granularity selective; use recompute_granularity full, or"]),
    ({"recompute_method": "block"}, ["model.recompute_method: block has no meaning with recompute_granularity null; use recompute_granularity full, or"]),
    ({**FULL, "recompute_modules": ["mlp"]}, ["model.recompute_modules: ['mlp'] has no meaning with recompute_granularity full; use recompute_granularity selective, or"]),
    ({**FULL, "distribute_saved_activations": True, TP: 2}, []),
    ({**FULL, "distribute_saved_activations": True, TP: 2, "sequence_parallel": True}, ["model.distribute_saved_activations: true needs sequence_parallel false"]),
    ({"distribute_saved_activations": True}, ["model.distribute_saved_activations: true needs recompute_granularity full and tensor_model_parallel_size 2 or more; change"]),
    # optimizer
    ({"lr": 1e-3, "min_lr": 1e-3}, []),
    ({"lr": 1e-3, "min_lr": 1e-2}, ["optimizer.min_lr: 0.01 is above lr 0.001; use at most 0.001"]),
    ({"lr": 1e-3, "lr_warmup_init": 1e-2}, ["optimizer.lr_warmup_init: 0.01 is above lr 0.001; use at most 0.001"]),
    ({"lr_warmup_iters": 9}, []),
    ({"lr_warmup_iters": 10}, ["optimizer.lr_warmup_iters: 10 is not below train_iters 10, where the decay ends; use at most 9, or a larger train_iters"]),
    ({"lr_warmup_iters": 10, "lr_decay_iters": 20}, []),
    ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, ["optimizer.lr_warmup_iters: 5 is not below lr_decay_iters 5"]),
    ({"optimizer": "sgd"}, []),
    ({"optimizer": "sgd", "use_distributed_optimizer": True}, ["optimizer.use_distributed_optimizer: true works only with adam, not sgd; use"]),
    # a teacher and the losses that need one
    ({"losses": KL, "teacher_path": "t"}, []),
    ({"losses": LOGGED_KL, "teacher_path": "t", "teacher_load": "c", "teacher_tokenizer_path": "k", "teacher_bf16": True}, []),
    ({"losses": TOP_KL, "teacher_path": "t"}, []),
    ({"losses": TOP_KL, "teacher_cache": "s"}, []),
    ({"losses": KL}, ["losses.kl: a loss of type forward_kl needs a teacher; set teacher.teacher_path or teacher.teacher_cache, or leave kl out"]),
    ({"losses": LOGGED_KL}, ["losses.kl: a loss of type jsd needs a teacher; set"]),
    ({"teacher_path": "t"}, ["teacher.teacher_path: t does nothing without a loss of type forward_kl, reverse_kl or jsd; add one to losses (weight 0: logged only), or leave teacher_path out"]),
    ({"teacher_cache": "s"}, ["teacher.teacher_cache: s does nothing without a loss of type forward_kl, reverse_kl or jsd; add"]),
    ({"losses": TOP_KL, "teacher_path": "t", "teacher_cache": "s"}, ["teacher.teacher_cache: s takes the place of a teacher, but teacher_path t is set too; leave one"]),
    ({"losses": KL, "teacher_cache": "s"}, ["losses.kl.top_k is not set, but teacher.teacher_cache holds the teacher's top k only; set"]),
    ({"losses": TOP_KL, "teacher_cache": "s", "teacher_load": "c", "teacher_tokenizer_path": "k", "teacher_bf16": True}, ["teacher.teacher_load: c does nothing without teacher.teacher_path; set", "teacher.teacher_tokenizer_path: k does nothing without teacher.teacher_path; set", "teacher.teacher_bf16: true does nothing without teacher.teacher_path; set"]),
    # settings that would do nothing
    ({"valid_data_path": "v", "eval_interval": 2, "eval_before_training": True}, []),
    ({"eval_interval": 2, "eval_before_training": True}, ["evaluation.eval_interval: 2 does nothing without data.valid_data_path; set", "evaluation.eval_before_training: true does nothing without data.valid_data_path; set"]),
    ({"eval_only": True, "valid_data_path": "v", "per_token_outputs": "o.parquet", "overwrite": True}, []),
    ({"eval_only": True, "valid_data_path": "v", "per_token_outputs": "o.jsonl"}, []),
    ({"eval_only": True, "valid_data_path": "v", "per_token_outputs": "o.csv"}, ["evaluation.per_token_outputs: o.csv has no known kind of file; let its name end with .parquet or .jsonl"]),
    ({"per_token_outputs": "o.jsonl"}, ["evaluation.per_token_outputs: o.jsonl does nothing without evaluation.eval_only; set"]),
    ({"overwrite": True}, ["evaluation.overwrite: true does nothing without evaluation.per_token_outputs; set"]),
    ({"save": "s", "save_interval": 2, "no_save_optim": True}, []),
    ({"save_interval": 2, "no_save_optim": True}, ["checkpoint.save_interval: 2 does nothing without checkpoint.save; set", "checkpoint.no_save_optim: true does"]),
    ({"load": "s", "finetune": True, "no_load_optim": True}, []),
    ({"finetune": True, "no_load_optim": True}, ["checkpoint.finetune: true does nothing without checkpoint.load; set", "checkpoint.no_load_optim: true does"]),
    ({"wandb_project": "p", "wandb_exp_name": "n"}, []),
    ({"wandb_exp_name": "n"}, ["logging.wandb_exp_name: n does nothing without logging.wandb_project; set"]),
    ({"implementation": "materialized"}, []),
    ({"implementation": "materialized", "chunk_tokens": "auto"}, []),
    ({"chunk_tokens": 256}, []),
    ({"implementation": "materialized", "chunk_tokens": 256}, ["logits.chunk_tokens: 256 does nothing with implementation materialized; use implementation chunked, or leave chunk_tokens out"]),
    ({"implementation": "materialized", "logit_softcap": 30, "logit_scale": 2, "token_metrics": True}, []),
    ({"prompt_key": "question"}, []),
    ({"prompt_key": "completion"}, ["data.messages_key, data.prompt_key and data.completion_key: 'messages', 'completion', 'completion' are not three different keys"]),
]  # fmt: skip


@pytest.mark.parametrize(("leaves", "starts"), COMBINATIONS)
def test_combinations(leaves: dict[str, Any], starts: list[str]) -> None:
    problems = combination_problems(config_of(**leaves))
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)
        assert ";" in problem
        assert "\n" not in problem


def test_all_problems_are_reported_at_once() -> None:
    config = config_of(sequence_parallel=True, min_lr=1.0, finetune=True, global_batch_size=7)
    with pytest.raises(ConfigError) as error:
        check_layout(config, 2)
    fields = [problem.split(":")[0] for problem in error.value.problems]
    assert fields == [
        "parallel.sequence_parallel",
        "optimizer.min_lr",
        "checkpoint.finetune",
        "training.global_batch_size",
    ]


@pytest.mark.filterwarnings("ignore")
def test_what_megatron_refuses_is_refused_here_first() -> None:
    """Megatron-Core's own classes are the reference, over every combination of these settings."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    refused = 0
    for granularity, method, layers, distribute, tp, sp, vpp in itertools.product(
        (None, "full", "selective"),
        (None, "block"),
        (None, 1),
        (False, True),
        (1, 2),
        (False, True),
        (None, 2),
    ):
        leaves = {
            "recompute_granularity": granularity,
            "recompute_method": method,
            "recompute_num_layers": layers,
            "distribute_saved_activations": distribute,
            TP: tp,
            "sequence_parallel": sp,
            PP: 2,
            VPP: vpp,
            "num_layers_in_first_pipeline_stage": 1,
        }
        try:
            TransformerConfig(
                num_layers=3, hidden_size=8, num_attention_heads=2, pipeline_dtype=torch.float32, **leaves
            )
        except (ValueError, AssertionError):
            refused += 1
            assert combination_problems(config_of(**leaves)), leaves
    assert refused > 40


@pytest.mark.filterwarnings("ignore")
def test_schedules_that_megatron_refuses_are_refused_here_first() -> None:
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    groups = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    refused = 0
    for lr, min_lr, warmup_init, warmup, decay in itertools.product(
        (0.0, 1.0), (0.0, 0.5), (0.0, 2.0), (0, 3, 4), (3, 4)
    ):
        leaves = {
            "lr": lr,
            "min_lr": min_lr,
            "lr_warmup_init": warmup_init,
            "lr_warmup_iters": warmup,
            "lr_decay_iters": decay,
        }
        try:
            OptimizerParamScheduler(groups, warmup_init, lr, min_lr, warmup, decay, "cosine", 0.0, 0.0, 1, "constant")
        except AssertionError:
            refused += 1
            assert combination_problems(config_of(**leaves)), leaves
        else:
            assert not combination_problems(config_of(**leaves)), leaves
    assert refused > 20


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"^WORLD_SIZE: {world_size} is not a number of ranks; start 1 rank or more"):
        check_layout(config_of(), world_size)


def test_an_export_that_would_compute_other_logits_is_refused() -> None:
    from megatron_ext.config.checks import combination_problems

    values = {"model": {"hf_path": "m"}, "logits": {"logit_softcap": 30.0, "logit_scale": 0.5}}
    assert combination_problems(Config.from_dict(values)) == []
    problems = combination_problems(Config.from_dict({**values, "checkpoint": {"save": "a", "save_hf": "b"}}))
    assert [problem.partition(":")[0] for problem in problems] == ["logits.logit_softcap", "logits.logit_scale"]
    assert "the exported model would compute other logits" in problems[0]
