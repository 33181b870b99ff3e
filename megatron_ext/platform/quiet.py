"""Keeps import-time messages off the terminal that say nothing to a user of this project.

Megatron-Core warns about each optional package it does without (this package has already decided which are used), and
logs that GPTModel and its own asynchronous saving (which is not used here) are deprecated; torch reports a missing
CUDA runtime although a CPU was asked for, and names its own functions that Megatron-Core calls and it means to rename.
Warnings of the user's own code, and errors of all, stay.
"""

import logging
import warnings


def silence_expected_messages() -> None:
    """Filter the messages above, for the rest of the process."""
    warnings.filterwarnings("ignore", module=r"megatron\.core(\..*)?$")
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.(c10d_logger|checkpoint\..*|_shard\..*)$")
    for name in (
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.dist_checkpointing.strategies.torch",
        "torch.utils.cpp_extension",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
