"""The test process runs on the CPU: the substitutions have to be in place before any test imports megatron.core."""

from megatron_ext import platform

platform.setup("cpu")
