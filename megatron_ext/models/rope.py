"""Rotary position embedding parameters of a Hugging Face config: one spelling for both of transformers'
layouts, and the frequencies they mean. Megatron-Core only applies them; its own Llama 3 scaling has fixed
factors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_ext.models.families.base import HFConfig

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


def rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), as one flat dict."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in raw:
        parameters.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    return parameters


def rope_problems(parameters: Mapping[str, Any]) -> list[str]:
    """What the parameters ask for and this implementation does not have, one sentence each."""
    rope_type = parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        return [f"rope_type {rope_type!r} is not supported; these are: {', '.join(SUPPORTED_ROPE_TYPES)}"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return [f"partial_rotary_factor {parameters['partial_rotary_factor']} is not supported; only 1.0 is"]
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    return [
        f"rope_type {rope_type!r} lacks {key}; complete the model's config.json"
        for key in needed[rope_type]
        if key not in parameters
    ]


def inverse_frequencies(hf: HFConfig) -> Tensor:
    """The model's inverse frequencies, exactly as transformers computes them.

    Returns:
        [head_dim / 2] fp32, on the CPU.
    """
    rope_type = hf.rope_parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim
        return 1.0 / (hf.rope_parameters["rope_theta"] ** exponents)
    config = AutoConfig.for_model(
        hf.family.model_type, **{key: value for key, value in hf.raw.items() if key != "model_type"}
    )
    frequencies, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
    if attention_scaling != 1.0:  # Megatron-Core's rotary embedding has no place for it
        raise ValueError(f"rope_type {rope_type!r} scales attention by {attention_scaling}; only 1.0 is supported")
    return frequencies
