"""Models: Hugging Face configs and weights in, Megatron-Core models, and Hugging Face directories out.

Importing this package imports megatron.core, so `platform.setup` comes first.
"""

from megatron_ext.models.export import check_export_directory, export_hf
from megatron_ext.models.factory import build_model, unwrap_model
from megatron_ext.models.hf_config import HFConfig, check_model_layout, load_hf_config
from megatron_ext.models.sources import open_source
from megatron_ext.models.transformer_config import padded_vocab_size
from megatron_ext.models.weights import load_hf_weights, load_initial_weights

__all__ = [
    "HFConfig",
    "build_model",
    "check_export_directory",
    "check_model_layout",
    "export_hf",
    "load_hf_config",
    "load_hf_weights",
    "load_initial_weights",
    "open_source",
    "padded_vocab_size",
    "unwrap_model",
]
