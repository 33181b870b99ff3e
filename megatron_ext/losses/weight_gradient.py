"""The gradient of the output weight: summed over chunks of tokens in fp32, then handed to whoever keeps gradients."""

import torch

from megatron_ext.losses import looking

# Rows of the weight to multiply at once where the product has a 16-bit type, so that it is added from a cache.
_ROWS_AT_ONCE = {"cpu": 1024}
_ROWS_AT_ONCE_ELSEWHERE = 16384


class WeightGradient:
    """Accumulates gradient.T @ hidden.

    Args:
        weight: [vocab/tp, h] the output weight, padding included.
        num_columns: of its rows, how many are real tokens; the others' gradient is 0.
        num_products: how many chunks there will be.
    """

    def __init__(self, weight: torch.Tensor, num_columns: int, num_products: int) -> None:
        self._weight = weight
        self._num_columns = num_columns
        # The sum of two products is rounded once and to the gradient's type, so that fp32 would add nothing.
        keeps_16_bit = weight.dtype != torch.float32 and getattr(weight, "main_grad", None) is None
        self._sums_16_bit = num_products <= 2 and keeps_16_bit
        self._sum: torch.Tensor | None = None  # [vocab/tp, h] fp32
        self._short: torch.Tensor | None = None  # [vocab/tp, h] 16-bit, in place of it

    def add(self, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add one chunk: `gradient` [tokens, columns] with respect to the logits, `hidden` [tokens, h]."""
        keeps_fp32_sums = hidden.dtype == torch.float32 or hidden.device.type == "cuda"  # of cuBLAS
        is_first = self._sum is None and self._short is None
        if is_first and not keeps_fp32_sums:
            self._short = self._empty(hidden.dtype)
        if self._short is not None and (is_first or self._sums_16_bit):
            # beta 0 leaves out what the memory held before; the sum of two is rounded once
            real = self._short[: self._num_columns]
            torch.addmm(real, gradient.t(), hidden, beta=0 if is_first else 1, out=real)
            return
        if self._sum is None:
            self._sum = self._empty(torch.float32) if self._short is None else self._short.float()
            self._short = None
        real = self._sum[: self._num_columns]
        if hidden.dtype == torch.float32:
            torch.addmm(real, gradient.t(), hidden, beta=0 if is_first else 1, out=real)
            return
        step = min(max(1, len(real)), _ROWS_AT_ONCE.get(hidden.device.type, _ROWS_AT_ONCE_ELSEWHERE))
        product = hidden.new_empty(step, hidden.size(1), dtype=torch.float32 if keeps_fp32_sums else hidden.dtype)
        for start in range(0, len(real), step):
            into = real[start : start + step]
            factor, out = gradient[:, start : start + step].t(), product[: len(into)]
            if keeps_fp32_sums:
                torch.mm(factor, hidden, out_dtype=torch.float32, out=out)
            else:  # rounded once
                torch.mm(factor, hidden, out=out)
            if is_first:
                into.copy_(out)
            else:
                into.add_(out)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the sum, with the padding's rows at 0."""
        made = torch.empty(self._weight.shape, dtype=dtype, device=self._weight.device)
        made[self._num_columns :].zero_()
        return made

    def deliver(self, factor: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient to return from backward, times `factor`. To be called once.

        Megatron's DDP keeps an fp32 `main_grad` for a 16-bit weight: the sum goes there as it is, and what backward
        returns only tells that it is there. DDP's hook does not add it, as `grad_added_to_main_grad` says, unless
        the weight is also the embedding (`zero_out_wgrad`), whose own gradient then arrives in the same place.
        """
        weight, total = self._weight, self._sum if self._short is None else self._short
        if total is None:  # no token at all
            total = torch.zeros_like(weight)
        # looking saves a pass over the gradient
        if factor is not None and not (looking.is_free(factor) and factor == 1):
            total = total.mul_(factor) if total.dtype == torch.float32 else total.float().mul_(factor)
        main_grad = getattr(weight, "main_grad", None)
        if weight.dtype == torch.float32 or main_grad is None:
            return total.to(weight.dtype)
        main_grad.add_(total)
        weight.grad_added_to_main_grad = True
        made = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return made(weight)
