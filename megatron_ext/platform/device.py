"""Which device this process trains on, and with which collective backend.

Owns the choice only; what a CPU-only process has to substitute in third-party code is in `cpu.py`, and which
optional GPU packages are usable is in `optional_packages.py`. Nothing here imports megatron.core.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch

DeviceRequest = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True)
class Platform:
    """The device kind of this process, fixed for its lifetime."""

    device_type: Literal["cuda", "cpu"]
    backend: Literal["nccl", "gloo"]
    has_transformer_engine: bool
    has_apex: bool

    def local_device(self) -> torch.device:
        """The device of this rank: the GPU numbered LOCAL_RANK (set by torchrun), or the CPU."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def choose_device_type(requested: DeviceRequest) -> Literal["cuda", "cpu"]:
    """Resolve `training.device`.

    Raises:
        ValueError: "cuda" was asked for and torch sees no GPU, or the name is not known.
    """
    if requested not in ("auto", "cuda", "cpu"):
        raise ValueError(f"training.device {requested!r} is not known; use auto, cuda or cpu")
    if requested == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if requested == "cuda":
        built_for = torch.version.cuda or "no CUDA at all"
        raise ValueError(
            f"training.device is cuda, but torch {torch.__version__} (built for CUDA {built_for}) sees no GPU; "
            "use --device cpu, or install a driver and a torch build that match"
        )
    return "cpu"
