"""The test process runs on the CPU: the substitutions have to be in place before any test imports megatron.core."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()  # asked before the platform hides the GPUs from this process

from megatron_ext import platform  # noqa: E402

platform.setup("cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
