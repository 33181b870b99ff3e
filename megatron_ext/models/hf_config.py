"""Reads a Hugging Face model config from a directory, a config.json or a GGUF file, and checks that the
model can be trained as configured. Owns no weights and starts nothing: every error here comes before any
process group.
"""

import json
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any, Literal

from megatron_ext.config import Config, ConfigError
from megatron_ext.models.families import FAMILIES
from megatron_ext.models.families.base import Family, HFConfig
from megatron_ext.models.gguf_file import gguf_architecture, gguf_config
from megatron_ext.models.rope import REMEDY, is_finite, read_rope, shown

__all__ = ["HFConfig", "check_model_layout", "hf_config_from_dict", "load_hf_config"]

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_LARGEST = 10**7  # a size beyond it is a damaged file, and would take hours or all memory to find out
_LARGEST_OF = {"num_hidden_layers": 10**4, "max_position_embeddings": 10**9}
_DERIVED = ("num_key_value_heads", "head_dim")  # follow from the others where they are left out


def load_hf_config(path: str | Path) -> HFConfig:
    """Read the config of a model directory, of a config.json, or of a .gguf file.

    Raises:
        ValueError: there is no config, it is broken, or it describes a model that is not supported.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"hf_path {path} does not exist; give the path of a GGUF file")
        architecture = gguf_architecture(path)
        for family in FAMILIES.values():
            if family.gguf is not None and family.gguf.architecture == architecture:
                return hf_config_from_dict(gguf_config(path, family, family.gguf), path, "gguf")
        known = ", ".join(family.gguf.architecture for family in FAMILIES.values() if family.gguf is not None)
        raise ValueError(f"{path}: GGUF architecture {architecture!r} is not supported; supported: {known}")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"hf_path {path} has no config.json; give a Hugging Face directory, a config.json or a .gguf file"
        )
    raw = read_json(file, "valid JSON")
    if not isinstance(raw, dict):
        raise ValueError(f"{file} is not a JSON object; give the config.json of a model")
    return hf_config_from_dict(raw, path, "directory" if path.is_dir() else "config")


def read_json(file: Path, what: str) -> Any:
    """What a JSON file holds; `what` says what the file should be.

    Raises:
        ValueError: the file cannot be read as JSON, whatever the reason.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file} is not {what} (it is nested too deeply); download it again") from error
    except (ValueError, OSError) as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise ValueError(f"{file} is not {what} ({error}); download it again") from error


def hf_config_from_dict(
    raw: Mapping[str, Any], path: str | Path, kind: Literal["directory", "config", "gguf"] = "config"
) -> HFConfig:
    """The checked config of the entries of a config.json; `path` is where they came from.

    Raises:
        ValueError: one line for each thing that is missing, malformed or not supported.
    """
    family = _family_of(raw, path)
    entries = {**family.defaults, **{key: value for key, value in raw.items() if value is not None}}
    sizes, found = _read_sizes(entries)
    for key in ("rms_norm_eps", "initializer_range"):
        if not is_finite(entries[key]) or entries[key] < 0:
            found.append(f"{key} {shown(entries[key])} is not a number of at least 0; {REMEDY}")
    flags = {key: default for key, default in family.defaults.items() if isinstance(default, bool)}
    malformed = {key: default for key, default in flags.items() if not isinstance(entries[key], bool)}
    found += [f"{key} {shown(entries[key])} is not true or false; {REMEDY}" for key in malformed]
    rope, rope_problems = read_rope(entries)
    found += family.problems({**entries, **malformed}) + rope_problems
    if "quantization_config" in entries:
        found.append("quantization_config: quantised weights cannot be trained; use the unquantised model")
    if found:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in found))
    return HFConfig(
        raw=dict(raw),
        path=Path(path),
        kind=kind,
        family=family,
        tied=entries["tie_word_embeddings"],
        layernorm_epsilon=float(entries["rms_norm_eps"]),
        initializer_range=float(entries["initializer_range"]),
        rope_parameters=rope,
        **sizes,
    )


def _family_of(raw: Mapping[str, Any], path: str | Path) -> Family:
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"{path}: architectures {shown(architectures)} is not a list of names; {REMEDY}")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"{path}: model_type {shown(model_type)} is not a name; {REMEDY}")
    architecture = architectures[0] if architectures else None
    if architecture is None:  # configs that were never saved with a model name only the model type
        by_type = {family.model_type: family.architecture for family in FAMILIES.values()}
        architecture = by_type.get(model_type)
    if architecture not in FAMILIES:
        named = architecture if architecture is not None else f"none (model_type {model_type!r})"
        raise ValueError(f"{path}: architecture {named} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def _read_sizes(entries: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """The sizes under Megatron's names, and what is wrong with them."""
    sizes: dict[str, int] = {}
    found = []
    for name, key in _SIZES.items():
        value = entries.get(key)
        if value is None:
            if key not in _DERIVED:
                found.append(f"{key} is missing; complete the model's config.json")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(f"{key} {shown(value)} is not a whole number of at least 1; {REMEDY}")
        elif value > _LARGEST_OF.get(key, _LARGEST):
            limit = _LARGEST_OF.get(key, _LARGEST)
            found.append(f"{key} {shown(value)} is not plausible (more than {limit}); {REMEDY}")
        else:
            sizes[name] = value
    if found:
        return sizes, found
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    groups = sizes.setdefault("num_query_groups", heads)
    if "head_dim" not in sizes and hidden % heads:
        found.append(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}, and head_dim is missing")
    head_dim = sizes.setdefault("head_dim", hidden // heads)
    if heads % groups:
        found.append(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    if head_dim % 2:
        found.append(f"head_dim {head_dim} is odd, which RoPE cannot rotate")
    return sizes, found


def check_model_layout(hf: HFConfig, config: Config) -> None:
    """Check that the model can be divided as configured and takes the configured sequences.

    Raises:
        ConfigError: one line for each problem, naming the field, its value, the reason and the remedy.
    """
    problems = _tensor_parallel_problems(hf, config) + _pipeline_problems(hf, config)
    if config.data.seq_length > hf.max_position_embeddings:
        problems.append(
            f"seq_length {config.data.seq_length} is longer than the model's max_position_embeddings "
            f"{hf.max_position_embeddings}; use {hf.max_position_embeddings} or less"
        )
    ep = config.parallel.expert_model_parallel_size
    if ep > 1:
        problems.append(f"expert_model_parallel_size {ep} needs experts, and {hf.family.architecture} has none; use 1")
    if problems:
        raise ConfigError(problems)


def _divisors(number: int) -> str:
    """All divisors, in words: "1, 3 or 9"."""
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def _tensor_parallel_problems(hf: HFConfig, config: Config) -> list[str]:
    tp = config.parallel.tensor_model_parallel_size
    all_fit = _divisors(gcd(hf.num_query_groups, hf.ffn_hidden_size))
    reason = "what divides attention heads, key-value heads and intermediate_size"
    checked = (
        ("num_attention_heads", hf.num_attention_heads, _divisors(hf.num_attention_heads)),
        ("num_key_value_heads", hf.num_query_groups, f"{all_fit} ({reason})"),
        ("intermediate_size", hf.ffn_hidden_size, f"{all_fit} ({reason})"),
    )
    return [
        f"{key} {size} is not divisible by tensor_model_parallel_size {tp}; use {remedy}"
        for key, size, remedy in checked
        if size % tp
    ]


def _pipeline_problems(hf: HFConfig, config: Config) -> list[str]:
    """Megatron-Core's rules for placing layers: fixed first and last stages, equal others, equal chunks."""
    parallel = config.parallel
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    pp = parallel.pipeline_model_parallel_size
    fixed = [layers for layers in (first, last) if layers is not None]
    if pp == 1:
        return ["num_layers_in_first/last_pipeline_stage need pipeline_model_parallel_size > 1"] if fixed else []
    left, stages = hf.num_layers - sum(fixed), pp - len(fixed)
    if not fixed:
        if left % pp:
            return [
                f"num_hidden_layers {left} is not divisible by pipeline_model_parallel_size {pp}; use "
                f"{_divisors(left)}, or set num_layers_in_first_pipeline_stage or "
                "num_layers_in_last_pipeline_stage"
            ]
    elif left < 0 or bool(left) != bool(stages) or (stages and left % stages):
        return [
            f"num_layers_in_first_pipeline_stage {first} and num_layers_in_last_pipeline_stage {last} leave "
            f"{left} of {hf.num_layers} layers to the other {stages} of {pp} pipeline stages; "
            "each of those needs the same number of layers, at least 1"
        ]
    vpp = parallel.virtual_pipeline_model_parallel_size
    if vpp is None:
        return []
    per_stage = {*fixed, *([left // stages] if stages else [])}
    return [
        f"a pipeline stage of {layers} layers is not divisible by virtual_pipeline_model_parallel_size "
        f"{vpp}; use {_divisors(gcd(*per_stage))}"
        for layers in sorted(per_stage)
        if layers % vpp
    ][:1]
