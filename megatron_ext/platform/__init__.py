"""Device and backend choice, and the only place where third-party code is patched or kept away.

`setup` runs once per process, before anything imports megatron.core.
"""

from megatron_ext.platform import cpu
from megatron_ext.platform.device import DeviceRequest, Platform, choose_device_type
from megatron_ext.platform.optional_packages import detect_apex, detect_transformer_engine, keep_usable
from megatron_ext.platform.quiet import silence_expected_messages
from megatron_ext.platform.variables import set_layout_variables

__all__ = ["Platform", "set_layout_variables", "setup"]

_platform: Platform | None = None


def setup(device: DeviceRequest = "auto") -> Platform:
    """Choose the device of this process and prepare Megatron-Core for it.

    Args:
        device: "auto" takes a GPU where torch sees one, else the CPU.

    Returns:
        The platform; the same object on every later call for the same device.

    Raises:
        ValueError: the device does not exist, or another one was set up before.
    """
    global _platform
    device_type = choose_device_type(device)
    if _platform is not None:
        if device_type != _platform.device_type:
            raise ValueError(f"this process already runs on {_platform.device_type}; {device_type} needs a new one")
        return _platform
    silence_expected_messages()
    if device_type == "cpu":
        cpu.install()
        _platform = Platform("cpu", "gloo", has_transformer_engine=False, has_apex=False)
    else:
        found = {"transformer_engine": detect_transformer_engine(), "apex": detect_apex()}
        keep_usable(found)
        _platform = Platform(
            "cuda",
            "nccl",
            has_transformer_engine=found["transformer_engine"].usable,
            has_apex=found["apex"].usable,
        )
    # imports megatron.core, so only now
    from megatron_ext.platform.checkpoint_writer import write_in_process

    write_in_process()
    return _platform
