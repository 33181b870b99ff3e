"""Rotary position embedding parameters of a Hugging Face config: one spelling for both of transformers'
layouts, and the frequencies they mean. Megatron-Core only applies them; its own Llama 3 scaling has fixed
factors.
"""

from collections.abc import Mapping
from copy import deepcopy
from math import isfinite
from reprlib import Repr
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_ext.models.families.base import HFConfig

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
REMEDY = "use the model's own config.json"  # for what no model has, so that the file was damaged or edited


_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_SMALLEST, _LARGEST = 1e-6, 1e15  # beyond these, fp32 frequencies overflow or torch refuses the number

_short = Repr(maxstring=60, maxother=60)


def shown(value: Any) -> str:
    """A malformed value as an error message shows it: on one line, however long or deep it is."""
    return _short.repr(value)


def is_finite(value: Any) -> bool:
    """Whether a JSON value is a number other than NaN, infinity and integers beyond a float's range."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


def read_rope(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), as one flat dict.

    Returns:
        The parameters, and one sentence for each that is malformed or not supported.
    """
    objects = {key: raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key) is not None}
    found = [
        f"{key} {shown(value)} is not an object; {REMEDY}"
        for key, value in objects.items()
        if not isinstance(value, Mapping)
    ]
    if found:
        return {}, found
    parameters = dict(objects.get("rope_scaling") or objects.get("rope_parameters") or {})
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in raw:
        parameters.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    return parameters, _problems(parameters)


def _problems(parameters: Mapping[str, Any]) -> list[str]:
    rope_type = parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        known = ", ".join(SUPPORTED_ROPE_TYPES)
        return [f"rope_type {shown(rope_type)} is not supported; these are: {known}"]
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        return [f"partial_rotary_factor {shown(partial)} is not supported; only 1.0 is"]
    found = []
    for key in ("rope_theta", *_NEEDED[rope_type]):
        if key not in parameters:
            found.append(f"rope_type {rope_type!r} lacks {key}; complete the model's config.json")
        elif not is_finite(parameters[key]) or not _SMALLEST <= parameters[key] <= _LARGEST:
            found.append(
                f"{key} {shown(parameters[key])} is not a finite positive number "
                f"({_SMALLEST:g} to {_LARGEST:g}); {REMEDY}"
            )
    if rope_type == "llama3" and not found:
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        if low >= high:  # transformers divides by the difference
            found.append(f"low_freq_factor {low} is not below high_freq_factor {high}; {REMEDY}")
    return found


def inverse_frequencies(hf: HFConfig) -> Tensor:
    """The model's inverse frequencies, exactly as transformers computes them.

    Returns:
        [head_dim / 2] fp32, on the CPU.
    """
    rope_type = hf.rope_parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim
        return 1.0 / (hf.rope_parameters["rope_theta"] ** exponents)
    # A copy: transformers writes rope_theta into the rope_scaling it is given.
    config = AutoConfig.for_model(
        hf.family.model_type, **deepcopy({key: value for key, value in hf.raw.items() if key != "model_type"})
    )
    frequencies, attention_scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
    if attention_scaling != 1.0:  # Megatron-Core's rotary embedding has no place for it
        raise ValueError(f"rope_type {rope_type!r} scales attention by {attention_scaling}; only 1.0 is supported")
    return frequencies
