"""The schema: what each setting accepts and refuses, in which words, and what follows from the settings."""
# ruff: noqa: E501 (a table of messages has one case a line)

import pickle
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from megatron_ext.config import (
    Config,
    ConfigError,
    CrossEntropyLoss,
    ForwardKLLoss,
    JSDLoss,
    ReverseKLLoss,
    ZLoss,
    config_to_yaml,
)
from megatron_ext.config.base import AutoOrTokens, Section
from megatron_ext.config.base import setting as new_setting
from megatron_ext.config.losses import RESERVED_LOSS_NAMES
from megatron_ext.config.messages import explain
from megatron_ext.config.settings import bounds_of, sections, settings

# ------------------------------------------------------------------------------------------------- the settings

DEFAULTS = """
model: {hf_path: m, random_init: false, tokenizer_path: null, chat_template: null, transformer_impl: auto,
  make_vocab_size_divisible_by: 128, attention_dropout: 0.0, hidden_dropout: 0.0, recompute_granularity: null,
  recompute_method: null, recompute_num_layers: null, recompute_modules: null, distribute_saved_activations: false}
parallel: {tensor_model_parallel_size: 1, sequence_parallel: false, pipeline_model_parallel_size: 1,
  virtual_pipeline_model_parallel_size: null, num_layers_in_first_pipeline_stage: null,
  num_layers_in_last_pipeline_stage: null, context_parallel_size: 1, expert_model_parallel_size: 1,
  overlap_grad_reduce: false, overlap_param_gather: false, distributed_timeout_minutes: 10.0}
data: {train_data_path: null, valid_data_path: null, seq_length: 1024, messages_key: messages, prompt_key: prompt,
  completion_key: completion, pad_to: longest, packing: false, shuffle: true}
losses: {lm_loss: {type: cross_entropy, weight: 1.0, label_smoothing: 0.0}}
teacher: {teacher_path: null, teacher_load: null, teacher_tokenizer_path: null, teacher_bf16: null, teacher_cache: null}
logits: {implementation: chunked, chunk_tokens: auto, logit_softcap: null, logit_scale: 1.0}
optimizer: {optimizer: adam, lr: 1.0e-5, min_lr: 0.0, lr_decay_style: cosine, lr_warmup_iters: 0,
  lr_warmup_init: 0.0, lr_decay_iters: null, weight_decay: 0.0, adam_beta1: 0.9, adam_beta2: 0.95,
  adam_eps: 1.0e-8, clip_grad: 1.0, use_distributed_optimizer: false}
training: {train_iters: null, micro_batch_size: 1, global_batch_size: 8, loss_reduction: token_mean, seed: 1234,
  bf16: false, device: auto}
evaluation: {eval_interval: null, eval_before_training: false, eval_after_training: true,
  eval_micro_batch_size: null, eval_only: false, per_token_outputs: null, overwrite: false}
checkpoint: {save: null, load: null, save_interval: null, save_hf: null, finetune: false, no_load_optim: false,
  no_save_optim: false}
logging: {log_interval: 1, token_metrics: false, log_dir: null, wandb_project: null, wandb_exp_name: null}
"""


def config_of(**sections_given: Any) -> Config:
    return Config.from_dict({"model": {"hf_path": "m"}, **sections_given})


def problems_of(**sections_given: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config_of(**sections_given)
    return error.value.problems


def test_defaults_are_the_documented_ones() -> None:
    assert config_of().to_dict() == yaml.safe_load(DEFAULTS)


def test_every_setting_is_described_and_has_a_name_of_its_own() -> None:
    names = [name for model in sections(Config).values() for name in model.model_fields]
    assert len(names) == len(set(names)) == len(settings(Config))
    assert all(setting.info.description for setting in settings(Config).values())


def test_a_configuration_cannot_be_changed_but_can_be_sent_to_another_process() -> None:
    config = config_of()
    with pytest.raises(ValidationError):
        config.training.seed = 3
    assert pickle.loads(pickle.dumps(config)) == config
    error = ConfigError(["a", "b"])
    assert pickle.loads(pickle.dumps(error)).problems == ["a", "b"]
    assert str(error) == "a\nb"


def test_importing_the_configuration_imports_no_torch() -> None:
    code = "import sys, megatron_ext.config; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


# ------------------------------------------------------------------------------------------------ refused values

WHOLE = "use a whole number of at least 1 and at most 1000000000"
LENGTH = "use a whole number of at least 1 and at most 100000000"
RANKS = "use a whole number of at least 1 and at most 1000000"
TOKENS = "use auto or a whole number of at least 1 and at most 100000000 (default 'auto')"
REFUSED = [  # section, setting, value, the whole message
    ("training", "micro_batch_size", 0, f"0 is too small; {WHOLE} (default 1)"),
    ("training", "micro_batch_size", "3.5", f"'3.5' is not a whole number; {WHOLE} (default 1)"),
    ("training", "micro_batch_size", 2.0, f"2.0 is not a whole number; {WHOLE} (default 1)"),
    ("training", "micro_batch_size", True, f"true is not a whole number; {WHOLE} (default 1)"),
    ("training", "micro_batch_size", "4", f"'4' is not a whole number; {WHOLE} (default 1)"),
    ("training", "micro_batch_size", None, f"null is not a value of this setting; {WHOLE} (default 1)"),
    ("training", "micro_batch_size", [1], f"[1] is not a whole number; {WHOLE} (default 1)"),
    ("training", "train_iters", 0, f"0 is too small; {WHOLE}, or null"),
    ("training", "bf16", 1, "1 is not true or false; use true or false (default false)"),
    ("training", "bf16", "true", "'true' is not true or false; use true or false (default false)"),
    ("training", "device", "tpu", "'tpu' is not a known choice; use auto, cuda or cpu (default 'auto')"),
    ("data", "seq_length", -5, f"-5 is too small; {LENGTH} (default 1024)"),
    ("data", "seq_length", 10**9, f"1000000000 is too large; {LENGTH} (default 1024)"),
    ("training", "train_iters", 10**30, f"{10**30} is too large; {WHOLE}, or null"),
    ("training", "global_batch_size", 10**10, f"10000000000 is too large; {WHOLE} (default 8)"),
    ("model", "make_vocab_size_divisible_by", 10**7, f"10000000 is too large; {RANKS} (default 128)"),
    ("parallel", "tensor_model_parallel_size", 10**7, f"10000000 is too large; {RANKS} (default 1)"),
    ("data", "prompt_key", "", "the text is empty; use text (default 'prompt')"),
    ("data", "train_data_path", "", "the text is empty; use a path, or null"),
    ("data", "train_data_path", 7, "7 is not text; put it in quotes if it is meant as text"),
    ("optimizer", "lr", -1e-5, "-1e-05 is too small; use a number of at least 0 (default 1e-05)"),
    ("optimizer", "lr", float("nan"), "nan is not finite; use a number of at least 0 (default 1e-05)"),
    ("optimizer", "lr", float("inf"), "inf is not finite; use a number of at least 0 (default 1e-05)"),
    ("optimizer", "lr", "1e999", "inf is not finite; use a number of at least 0 (default 1e-05)"),
    ("optimizer", "lr", "small", "'small' is not a number; use a number of at least 0 (default 1e-05)"),
    ("optimizer", "lr", False, "false is not a number; use a number of at least 0 (default 1e-05)"),
    ("optimizer", "adam_beta1", 1.0, "1.0 is too large; use a number of at least 0 and below 1 (default 0.9)"),
    ("optimizer", "adam_eps", 0, "0 is too small; use a number above 0 (default 1e-08)"),
    ("parallel", "distributed_timeout_minutes", 0, "0 is too small; use a number above 0 and at most 10080 (default 10.0)"),
    ("model", "hidden_dropout", 1, "1 is too large; use a number of at least 0 and below 1 (default 0.0)"),
    ("logits", "implementation", "fused", "'fused' is not a known choice; use chunked or materialized (default 'chunked')"),
    ("logits", "chunk_tokens", 0, f"0 is too small; {TOKENS}"),
    ("logits", "chunk_tokens", -1, f"-1 is too small; {TOKENS}"),
    ("logits", "chunk_tokens", 10**9, f"1000000000 is too large; {TOKENS}"),
    ("logits", "chunk_tokens", "many", f"'many' is not auto or a whole number; {TOKENS}"),
    ("logits", "chunk_tokens", "256", f"'256' is not auto or a whole number; {TOKENS}"),
    ("logits", "chunk_tokens", 1.5, f"1.5 is not auto or a whole number; {TOKENS}"),
    ("logits", "chunk_tokens", float("nan"), f"nan is not auto or a whole number; {TOKENS}"),
    ("logits", "chunk_tokens", True, f"true is not auto or a whole number; {TOKENS}"),
    ("logits", "chunk_tokens", [256], f"[256] is not auto or a whole number; {TOKENS}"),
    ("logits", "chunk_tokens", None, f"null is not a value of this setting; {TOKENS}"),
    ("logits", "logit_softcap", 0, "0 is too small; use a number above 0, or null"),
    ("logits", "logit_softcap", -1, "-1 is too small; use a number above 0, or null"),
    ("logits", "logit_softcap", float("inf"), "inf is not finite; use a number above 0, or null"),
    ("logits", "logit_softcap", "auto", "'auto' is not a number; use a number above 0, or null"),
    ("logits", "logit_scale", 0, "0 is too small; use a number above 0 (default 1.0)"),
    ("logits", "logit_scale", -0.5, "-0.5 is too small; use a number above 0 (default 1.0)"),
    ("logits", "logit_scale", None, "null is not a value of this setting; use a number above 0 (default 1.0)"),
    ("training", "loss_reduction", "mean", "'mean' is not a known choice; use token_mean or sequence_mean (default 'token_mean')"),
    ("logging", "token_metrics", 1, "1 is not true or false; use true or false (default false)"),
    ("model", "recompute_granularity", "some", "'some' is not a known choice; use full or selective, or null"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "name", "value", "message"), REFUSED)
def test_a_value_is_refused_in_these_words(section: str, name: str, value: Any, message: str) -> None:
    given = {"hf_path": "m", name: value} if section == "model" else {name: value}
    assert problems_of(**{section: given}) == [f"{section}.{name}: {message}"]


def test_a_number_too_long_for_python_to_write_is_refused() -> None:
    start = "a number of very many digits is"
    assert problems_of(training={"train_iters": 10**5000}) == [
        f"training.train_iters: {start} too large; {WHOLE}, or null"
    ]
    assert problems_of(logits={"chunk_tokens": 10**5000}) == [f"logits.chunk_tokens: {start} too large; {TOKENS}"]
    assert problems_of(optimizer={"lr": 10**5000})[0].startswith(f"optimizer.lr: {start} not a number; use a number")


def test_every_whole_number_has_an_upper_bound() -> None:
    for setting in settings(Config).values():
        if int in setting.types:
            assert "le" in bounds_of(setting.info.annotation, setting.info), setting.path


@pytest.mark.parametrize(
    ("section", "name", "value", "kept"),
    [
        ("optimizer", "lr", "1e-4", 1e-4),  # YAML 1.1 reads 1e-4 as text
        ("optimizer", "lr", 1, 1.0),
        ("optimizer", "lr", 0, 0.0),
        ("optimizer", "adam_beta2", 0, 0.0),
        ("training", "train_iters", None, None),
        ("data", "valid_data_path", {"hard-1.5": "f"}, {"hard-1.5": "f"}),
        ("logits", "chunk_tokens", "auto", "auto"),
        ("logits", "chunk_tokens", 1, 1),
        ("logits", "chunk_tokens", 10**8, 10**8),
        ("logits", "logit_softcap", "3e1", 30.0),
        ("logits", "logit_softcap", None, None),
        ("logits", "logit_scale", 2, 2.0),
        ("parallel", "virtual_pipeline_model_parallel_size", 2, 2),
    ],
)
def test_a_value_is_taken(section: str, name: str, value: Any, kept: Any) -> None:
    taken = config_of(**{section: {name: value}}).to_dict()[section][name]
    assert taken == kept
    assert type(taken) is type(kept)


REFUSED_PLACES = [  # the sections given, the start of the one message
    ({"trainig": {}}, "trainig is not a known key; did you mean training?"),
    ({"zzz": {}}, "zzz is not a known key; the sections are model, parallel, data, losses, teacher, logits, optimizer"),
    ({"lr": 1}, "lr is not known; lr belongs to the section optimizer (write optimizer: {lr: ...})"),
    ({"optimizer.lr": 1}, "optimizer.lr is not known; lr belongs to the section optimizer"),
    ({"learning_rate": 1}, "learning_rate is not a known key; did you mean optimizer.lr?"),
    ({"data": {"lr": 1}}, "data.lr is not known; lr belongs to the section optimizer"),
    ({"optimizer": {"learnig_rate": 1}}, "optimizer.learnig_rate is not a known key; did you mean optimizer.lr?"),
    ({"optimizer": {"zzz": 1}}, "optimizer.zzz is not a known key; the keys of optimizer are optimizer, lr, min_lr"),
    ({"data": {"train_itres": 1}}, "data.train_itres is not a known key; did you mean training.train_iters?"),
    ({"parallel": {"tp": 2}}, "parallel.tp is not a known key; did you mean parallel.tensor_model_parallel_size?"),
    ({"training": {"bf-16": True}}, "training.bf-16 is not a known key; did you mean training.bf16?"),
    ({"data": {3: 1}}, "data.3: the key 3 is not text"),
    ({"data": None}, "data is empty (null); give it keys such as train_data_path, valid_data_path, seq_length"),
    ({"data": 5}, "data is 5, which is not a map of keys and values; give it keys such as train_data_path"),
    ({"data": [1]}, "data is [1], which is not a map of keys and values; give it keys such as train_data_path"),
    ({"optimizer": "adam"}, "optimizer is 'adam', which is not a map of keys and values; give it keys such as optimizer"),
    ({"losses": None}, "losses is empty (null); give it entries, or delete it"),
    ({"losses": {}}, "losses names no loss; use for example {lm_loss: {type: cross_entropy}}"),
    ({"losses": {"a": {}}}, "losses.a.type is not set; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    ({"losses": {"a": {"weight": 1}}}, "losses.a.type is not set; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    ({"losses": {"a": {"type": 3}}}, "losses.a.type: 3 is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    ({"losses": {"a": {"type": ["z_loss"]}}}, "losses.a.type: ['z_loss'] is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    ({"losses": {"a": {"type": None}}}, "losses.a.type: null is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    ({"losses": {"a": None}}, "losses.a is empty (null); give it keys such as type, weight, or delete it"),
    ({"losses": {"a": "z_loss"}}, "losses.a is 'z_loss', which is not a map of keys and values; give it keys such as type, weight, or delete it"),
    ({"losses": ["z_loss"]}, "losses is ['z_loss'], which is not a map of keys and values; give it entries"),
    ({"losses": {"a": {"type": "z_loss", "weight": -1}}}, "losses.a.weight: -1 is too small; use a number of at least 0 (default 1.0)"),
    ({"losses": {"a": {"type": "z_loss", "wieght": 1}}}, "losses.a.wieght is not a known key; did you mean losses.a.weight?"),
    ({"losses": {"a": {"type": "z_loss", "label_smoothing": 0.1}}}, "losses.a.label_smoothing is not a known key; the keys of losses.a (a z_loss) are type, weight"),
    ({"losses": {"a": {"type": "z_loss", "zzz": 1}}}, "losses.a.zzz is not a known key; the keys of losses.a (a z_loss) are type, weight"),
    ({"losses": {"a": {"type": "z_loss", "lr": 1}}}, "losses.a.lr is not known; lr belongs to the section optimizer"),
    ({"losses": {"a": {"type": "cross_entropy", "label_smoothing": 1.0}}}, "losses.a.label_smoothing: 1.0 is too large; use a number of at least 0 and below 1 (default 0.0)"),
    ({"losses": {"a": {"type": "cross_entropy", "label_smoothing": -0.1}}}, "losses.a.label_smoothing: -0.1 is too small; use a number of at least 0 and below 1"),
    ({"losses": {"a": {"type": "cross_entropy", "label_smoothing": float("nan")}}}, "losses.a.label_smoothing: nan is not finite; use a number of at least 0 and below 1"),
    ({"losses": {"a": {"type": "cross_entropy", "label_smoothing": None}}}, "losses.a.label_smoothing: null is not a value of this setting; use a number of"),
    ({"losses": {"a": {"type": "cross_entropy", "label_smoothing_factor": 0.1}}}, "losses.a.label_smoothing_factor is not a known key; did you mean losses.a.label_smoothing?"),
    ({"losses": {"a": {"type": "forward_kl", "temperature": 0}}}, "losses.a.temperature: 0 is too small; use a number above 0 (default 1.0)"),
    ({"losses": {"a": {"type": "reverse_kl", "temperature": -1}}}, "losses.a.temperature: -1 is too small; use a number above 0 (default 1.0)"),
    ({"losses": {"a": {"type": "jsd", "temperature": float("inf")}}}, "losses.a.temperature: inf is not finite; use a number above 0 (default 1.0)"),
    ({"losses": {"a": {"type": "jsd", "beta": 0}}}, "losses.a.beta: 0 is too small; use a number above 0 and below 1 (default 0.5)"),
    ({"losses": {"a": {"type": "jsd", "beta": 1}}}, "losses.a.beta: 1 is too large; use a number above 0 and below 1 (default 0.5)"),
    ({"losses": {"a": {"type": "forward_kl", "beta": 0.5}}}, "losses.a.beta is not a known key; the keys of losses.a (a forward_kl) are type, weight, temperature"),
    ({"losses": {"a": {"type": "forward_kl", "top_k": 0, "tail": "bucket"}}}, "losses.a.top_k: 0 is too small; use a whole number of at least 1"),
    ({"losses": {"a": {"type": "forward_kl", "top_k": 8, "tail": "drop"}}}, "losses.a.tail: 'drop' is not a known choice; use renormalize, bucket or ignore, or null"),
    ({"losses": {"a": {"type": "forward_kl", "top_k": 8}}}, "losses.a has top_k 8 and no tail, so what becomes of all other tokens is open; set tail to renormalize, bucket or ignore"),
    ({"losses": {"a": {"type": "jsd", "tail": "bucket"}}}, "losses.a has tail bucket and no top_k, so there is no tail; set top_k, or leave tail out"),
    ({"temperature": 2}, "temperature is not known; temperature belongs to an entry of losses"),
    ({"losses": {"teacher_entropy": {"type": "z_loss"}}}, "losses names a loss 'teacher_entropy', a metric with another meaning; use another name"),
    ({"teacher": {"teacher_pth": "t"}}, "teacher.teacher_pth is not a known key; did you mean teacher.teacher_path?"),
    ({"teacher": {"teacher_path": ""}}, "teacher.teacher_path: the text is empty; use a path, or null"),
    ({"teacher": {"teacher_bf16": "yes"}}, "teacher.teacher_bf16: 'yes' is not true or false; use true or false, or null"),
    ({"training": {"label_smoothing": 0.1}}, "training.label_smoothing is not known; label_smoothing belongs to an entry of losses (write losses: {NAME: {label_smoothing: ...}})"),
    ({"label_smoothing": 0.1}, "label_smoothing is not known; label_smoothing belongs to an entry of losses"),
    ({"optimizer": {"type": "adam"}}, "optimizer.type is not a known key; the keys of optimizer are optimizer, lr"),
    ({"logits": {"softcap": 30}}, "logits.softcap is not a known key; did you mean logits.logit_softcap?"),
    ({"logits": {"final_logit_softcapping": 30}}, "logits.final_logit_softcapping is not a known key; did you mean logits.logit_softcap?"),
    ({"chunk_tokens": 256}, "chunk_tokens is not known; chunk_tokens belongs to the section logits (write logits: {chunk_tokens: ...})"),
    ({"logits": None}, "logits is empty (null); give it keys such as implementation, chunk_tokens, logit_softcap"),
    ({"losses": {"a": {"type": "kl"}}}, "losses.a.type: 'kl' is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    ({"losses": {"a": {"type": "cross_entropy", "weight": -1}}}, "losses.a.weight: -1 is too small; use a number of"),
    ({"losses": {"a": {"type": "cross_entropy", "wieght": 1}}}, "losses.a.wieght is not a known key; did you mean losses.a.weight?"),
    ({"losses": {"loss": {"type": "cross_entropy"}}}, "losses names a loss 'loss', a metric with another meaning; use another name, such as lm_loss"),
    ({"losses": {"entropy": {"type": "z_loss"}}}, "losses names a loss 'entropy', a metric with another meaning; use another name, such as entropy_loss"),
    ({"losses": {"a.b": {"type": "cross_entropy"}}}, "losses names a loss 'a.b'; use letters, digits"),
    ({"data": {"valid_data_path": {"train": "f"}}}, "data.valid_data_path names a set 'train', as the training metrics"),
    ({"data": {"valid_data_path": {"a/b": "f"}}}, "data.valid_data_path names a set 'a/b'; use a name of letters"),
    ({"data": {"valid_data_path": {"a": None}}}, "data.valid_data_path gives the set 'a' the file None; use the path"),
    ({"data": {"valid_data_path": {}}}, "data.valid_data_path is neither a file nor a map from set name to file; use"),
    ({"data": {"valid_data_path": 3}}, "data.valid_data_path is neither a file nor a map from set name to file; use"),
    ({"model": {}}, "model.hf_path is not set; use a path: Hugging Face directory"),
    ({"model": {"hf_path": None}}, "model.hf_path: null is not a value of this setting; use a path"),
    ({"model": {"hf_path": "m", "recompute_modules": ["mlp", "x"]}}, "model.recompute_modules[1]: 'x' is not a known choice; use core_attn, layernorm or mlp"),
    ({"model": {"hf_path": "m", "recompute_modules": "mlp"}}, "model.recompute_modules: 'mlp' is not a list of core_attn, layernorm or mlp; use"),
]  # fmt: skip


@pytest.mark.parametrize(("given_sections", "start"), REFUSED_PLACES)
def test_a_misplaced_or_misspelt_key_is_refused_with_the_right_one(given_sections: dict[str, Any], start: str) -> None:
    problems = problems_of(**given_sections)
    assert len(problems) == 1
    assert problems[0].startswith(start)
    assert "\n" not in problems[0]


@pytest.mark.parametrize("name", RESERVED_LOSS_NAMES)
def test_no_loss_is_called_as_another_metric_or_output_is(name: str) -> None:
    problems = problems_of(losses={name: {"type": "z_loss"}})
    assert len(problems) == 1
    assert problems[0].startswith(f"losses names a loss {name!r}, a metric with another meaning; use another name")
    suggested = problems[0].rpartition(" ")[2]
    assert list(config_of(losses={suggested: {"type": "z_loss"}}).losses) == [suggested]


def test_the_names_of_what_is_reported_are_reserved() -> None:
    """Every key of a metrics record and of a per-token output."""
    written = {
        *("split", "iteration", "consumed_samples", "loss", "num_tokens", "num_input_tokens", "grad_norm", "lr"),
        *(
            "iteration_time_ms",
            "tokens_per_second",
            "token_accuracy",
            "entropy",
            "teacher_entropy",
            "teacher_agreement",
        ),
        *("logprobs", "elementwise_loss", "loss_mask", "sample_id", "token_ids", "labels", "set", "mean_loss"),
        *("perplexity", "sequences", "seconds", "negative_log_likelihood"),
    }
    assert written <= set(RESERVED_LOSS_NAMES)


def test_each_type_of_loss_is_built_from_its_name() -> None:
    losses = {"a": {"type": "z_loss", "weight": "1e-4"}, "b": {"type": "cross_entropy", "label_smoothing": 0.1}}
    assert config_of(losses=losses).losses == {
        "a": ZLoss(type="z_loss", weight=1e-4),
        "b": CrossEntropyLoss(type="cross_entropy", weight=1.0, label_smoothing=0.1),
    }


def test_losses_against_a_teacher_are_built_from_their_names() -> None:
    top_k = {"top_k": 8, "tail": "bucket"}
    losses = {
        "f": {"type": "forward_kl", "temperature": 2, "scale_by_temperature_squared": True},
        "r": {"type": "reverse_kl", "weight": 0, **top_k},
        "j": {"type": "jsd", "beta": 0.1},
        "lm": {"type": "cross_entropy"},
    }
    config = config_of(losses=losses)
    assert config.losses == {
        "f": ForwardKLLoss(type="forward_kl", temperature=2.0, scale_by_temperature_squared=True),
        "r": ReverseKLLoss(type="reverse_kl", weight=0.0, **top_k),
        "j": JSDLoss(type="jsd", beta=0.1),
        "lm": CrossEntropyLoss(type="cross_entropy"),
    }
    assert list(config.distillation_losses) == ["f", "r", "j"]
    loss = config.losses["j"]
    assert (loss.temperature, loss.scale_by_temperature_squared, loss.top_k, loss.tail) == (1.0, False, None, None)


@pytest.mark.parametrize(
    ("teacher", "tokenizer"),
    [
        ({}, None),
        ({"teacher_path": "t"}, "t"),
        ({"teacher_path": "t/config.json"}, "t"),
        ({"teacher_path": "t/m.gguf"}, "t/m.gguf"),
        ({"teacher_path": "t", "teacher_tokenizer_path": "k"}, "k"),
    ],
)
def test_where_the_teachers_tokenizer_is(teacher: dict[str, Any], tokenizer: str | None) -> None:
    assert config_of(teacher=teacher).teacher_tokenizer_path == tokenizer


def test_problems_of_several_losses_are_told_at_once() -> None:
    losses = {
        "a": {"type": "cross_entropy", "label_smoothing": 2, "weight": -1},
        "b": {"type": "kl"},
        "c": {"type": "z_loss", "beta": 1},
    }
    problems = problems_of(losses=losses, logits={"chunk_tokens": 0})
    assert [problem.split()[0] for problem in problems] == [
        "losses.a.weight:",
        "losses.a.label_smoothing:",
        "losses.b.type:",
        "losses.c.beta",
        "logits.chunk_tokens:",
    ]


def test_auto_or_a_number_in_an_entry_of_a_map_is_one_mistake_at_its_place() -> None:
    class Entry(Section):
        tokens: AutoOrTokens | None = new_setting(None, "tokens", unit="tokens", le=None)

    class Root(Section):
        entries: dict[str, Entry]

    assert Root.model_validate({"entries": {"a": {"tokens": 3}, "b": {"tokens": None}}})
    with pytest.raises(ValidationError) as error:
        Root.model_validate({"entries": {"a": {"tokens": 0}, "b": {"tokens": "x"}}})
    wanted = "use auto or a whole number of at least 1 and at most 100000000, or null"
    assert [problem.text for problem in explain(error.value, Root)] == [
        f"entries.a.tokens: 0 is too small; {wanted}",
        f"entries.b.tokens: 'x' is not auto or a whole number; {wanted}",
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_schema() -> None:
    problems = problems_of(data={"seq_length": 0}, training={"seed": -1, "epochs": 3}, foo=1, optimizer=None)
    assert [problem.split()[0] for problem in problems] == [
        "data.seq_length:",
        "optimizer",
        "training.seed:",
        "training.epochs",
        "foo",
    ]


def test_a_missing_model_section_names_the_setting_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"^model\.hf_path is not set; use a path"):
        Config.from_dict({})


def test_problems_inside_a_union_of_sections_are_named_without_its_tag() -> None:
    class Other(Section):
        type: Literal["other"]
        beta: int = Field(1, ge=1)

    class Root(Section):
        losses: dict[str, Annotated[CrossEntropyLoss | Other, Field(discriminator="type")]]

    with pytest.raises(ValidationError) as error:
        Root.model_validate(
            {
                "losses": {
                    "a": {"type": "other", "beta": 0},
                    "b": {"type": "x"},
                    "c": {},
                    "d": {"type": "other", "bet": 1},
                }
            }
        )
    assert [problem.text for problem in explain(error.value, Root)] == [
        "losses.a.beta: 0 is too small; use a whole number of at least 1 (default 1)",
        "losses.b.type: 'x' is not a known choice; use cross_entropy or other",
        "losses.c.type is not set; use cross_entropy or other",
        "losses.d.bet is not a known key; did you mean losses.d.beta?",
    ]


# ------------------------------------------------------------------------------------------------ derived values


def test_batch_arithmetic() -> None:
    config = config_of(
        parallel={
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 3,
            "context_parallel_size": 5,
        },
        training={"micro_batch_size": 2, "global_batch_size": 24},
    )
    assert config.model_parallel_size == 30
    assert config.data_parallel_size(120) == 4
    assert config.num_micro_batches(120) == 3


@pytest.mark.parametrize(
    ("tp", "sp", "cp", "multiple"),
    [
        (1, False, 1, 1),
        (3, False, 1, 1),
        (3, True, 1, 3),
        (1, False, 2, 4),
        (2, False, 2, 4),
        (2, True, 2, 8),
    ],
)
def test_sequence_multiple(tp: int, sp: bool, cp: int, multiple: int) -> None:
    parallel = {"tensor_model_parallel_size": tp, "sequence_parallel": sp, "context_parallel_size": cp}
    config = config_of(parallel=parallel)
    assert config.sequence_multiple == multiple
    assert config.packing_multiple == (2 * cp if cp > 1 else 1)


def test_values_that_follow_from_others() -> None:
    config = config_of(training={"train_iters": 7, "micro_batch_size": 3})
    assert config.lr_decay_iters == 7
    assert config.eval_micro_batch_size == 3
    assert config.evaluation_sets == {}
    assert config.tokenizer_path == "m"
    assert str(config.log_directory) == "runs/sft"
    config = config_of(
        model={"hf_path": "m/config.json", "random_init": True},
        data={"valid_data_path": "v"},
        optimizer={"lr_decay_iters": 9},
        training={"train_iters": 7},
        evaluation={"eval_micro_batch_size": 5},
        checkpoint={"save": "out"},
    )
    assert config.lr_decay_iters == 9
    assert config.eval_micro_batch_size == 5
    assert config.evaluation_sets == {"validation": "v"}
    assert config.tokenizer_path == "m"
    assert str(config.log_directory) == "out"
    config = config_of(
        model={"hf_path": "m", "tokenizer_path": "t"},
        data={"valid_data_path": {"a": "x", "b": "y"}},
        checkpoint={"save": "out"},
        logging={"log_dir": "logs"},
    )
    assert config.evaluation_sets == {"a": "x", "b": "y"}
    assert config.tokenizer_path == "t"
    assert str(config.log_directory) == "logs"


# --------------------------------------------------------------------------------------------------- round trips

NAMES = st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True).filter(
    lambda name: name != "train" and name not in RESERVED_LOSS_NAMES
)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    ["null", "1e-4", "yes", "12:30:00", "2024-01-01", "~", "=", "<<", "- a", "0x1f", "'", "a: b", "{", "#"]
)


def values_for(annotation: Any, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Any valid value of a setting, by its type and bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return values_for(arguments[0], bounds)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_for(arguments[0], {}), max_size=3)
    if origin is dict:
        return st.dictionaries(NAMES, TEXTS, min_size=1, max_size=3)
    if arguments:
        return st.one_of([values_for(argument, bounds) for argument in arguments])
    if annotation is int:
        return st.integers(bounds.get("ge", 0), bounds.get("le", 10**9))
    if annotation is float:
        low = bounds.get("ge", bounds.get("gt"))
        high = bounds.get("le", bounds.get("lt", 1e300))
        return st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
    return {bool: st.booleans(), str: TEXTS, type(None): st.none()}[annotation]


VALUES = st.fixed_dictionaries(
    {"model.hf_path": TEXTS},
    optional={
        setting.path: values_for(setting.info.annotation, bounds_of(setting.info.annotation, setting.info))
        for name, setting in settings(Config).items()
        if name != "hf_path"
    },
)
LOSSES = st.dictionaries(
    NAMES,
    st.fixed_dictionaries(
        {"type": st.just("cross_entropy")},
        optional={"weight": st.floats(0, 1e300), "label_smoothing": st.floats(0, 1, exclude_max=True)},
    )
    | st.fixed_dictionaries({"type": st.just("z_loss")}, optional={"weight": st.floats(0, 1e300)})
    | st.fixed_dictionaries(
        {"type": st.just("jsd"), "top_k": st.integers(1, 100), "tail": st.sampled_from(["bucket", "ignore"])},
        optional={"beta": st.floats(0, 1, exclude_min=True, exclude_max=True)},
    ),
    min_size=1,
    max_size=3,
)


@given(values=VALUES, losses=LOSSES)
@example(values={"model.hf_path": "´\x85,b#"}, losses={"on": {"type": "cross_entropy", "weight": 5e-324}})
@hypothesis_settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_a_written_configuration_reads_back_equal(values: dict[str, Any], losses: dict[str, Any]) -> None:
    nested: dict[str, Any] = {"losses": losses}
    for path, value in values.items():
        section, name = path.split(".")
        nested.setdefault(section, {})[name] = value
    config = Config.from_dict(nested)
    text = config_to_yaml(config)
    assert Config.from_dict(yaml.safe_load(text)) == config
    assert Config.from_dict(config.to_dict()) == config
