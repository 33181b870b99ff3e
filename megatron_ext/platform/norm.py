"""RMSNorm and LayerNorm in plain torch whose parameters take part in sequence parallelism.

Megatron-Core's own torch norm (`WrappedTorchNorm`, 0.19.2) refuses sequence parallelism. What it lacks is one mark:
under SP each TP rank normalises its slice of the sequence, so the weight's gradient is partial on every rank, and
`finalize_model_grads` sums the gradients of parameters that carry `sequence_parallel`.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def _mark_sequence_parallel(norm: torch.nn.Module, config: TransformerConfig) -> torch.nn.Module:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


class RMSNorm(torch.nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), the mean in fp32 (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        _mark_sequence_parallel(self, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden] in any float type; the result has the type of x."""
        if x.dtype == torch.float32:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # round the normalised value before the weight is applied, as the Llama implementations do
        normalised = torch.nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normalised.to(x.dtype)


class TorchNorm:
    """Builds the norm that `config.normalization` names; the signature is Megatron-Core's `LayerNormBuilder`."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "layernorm_zero_centered_gamma True is not supported by the torch norms; "
                "use --transformer-impl transformer_engine"
            )
        if config.normalization == "RMSNorm":
            return RMSNorm(config, hidden_size, eps)
        if config.normalization == "LayerNorm":
            norm = torch.nn.LayerNorm(hidden_size, eps=eps, dtype=config.params_dtype)
            return _mark_sequence_parallel(norm, config)
        raise ValueError(f"normalization {config.normalization!r} is not known; use RMSNorm or LayerNorm")
