"""Environment variables that a layout needs, set before CUDA starts. What a site or a launcher sets is left alone."""

import os

from megatron_ext.config import Config


def set_layout_variables(config: Config) -> None:
    """Set what Megatron-Core wants of the environment for this layout; call it before anything touches the GPU.

    CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor and context parallelism: up to Hopper, Megatron-Core orders a collective
    and the matrix multiplication that should overlap it by launching them in that order, which holds on the GPU only
    with one hardware queue; with more the multiplication may take all of the GPU first. Other layouts keep CUDA's
    own number, for one queue would keep data-parallel collectives waiting behind computation.
    """
    parallel = config.parallel
    if parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
