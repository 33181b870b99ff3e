"""megatron_ext: supervised fine-tuning and distillation on Megatron-Core.

This file owns the package's version and imports nothing: `megatron.core` must not be imported before
`megatron_ext.platform` has chosen the device.
"""

__version__ = "0.1.0"
