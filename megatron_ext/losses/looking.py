"""When the value of a tensor may decide what is computed next."""

import torch


def is_free(tensor: torch.Tensor) -> bool:
    """Reading a value of it waits for nothing: it is on the CPU. Elsewhere it would wait for the device."""
    return tensor.device.type == "cpu"
