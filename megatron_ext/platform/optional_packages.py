"""Detects Transformer Engine and NVIDIA Apex, and keeps unusable copies of them away from Megatron-Core.

Megatron-Core guards those imports with `except ImportError` only. A half-installed Transformer Engine raises
RuntimeError, OSError or FileNotFoundError instead (seen with 0.19.2), and the `apex` on PyPI is another project
that imports fine and then lacks everything. Both have to be found out before megatron.core is first imported.
"""

import importlib
import importlib.util
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class PackageState:
    """usable: can be imported and is the right package; problem: why not, "" when it is simply absent."""

    usable: bool
    problem: str = ""


def _installed(name: str) -> bool:
    if sys.modules.get(name, ...) is None:  # blocked earlier by `block`
        return False
    return importlib.util.find_spec(name) is not None


def detect_transformer_engine() -> PackageState:
    """Import transformer_engine.pytorch for real: only that tells a whole install from half of one."""
    if not _installed("transformer_engine"):
        return PackageState(False)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        return PackageState(
            False,
            f"transformer_engine is installed but does not import ({type(error).__name__}: {reason}); "
            "reinstall it with the extra `te`, or remove it",
        )
    return PackageState(True)


def detect_apex() -> PackageState:
    """NVIDIA Apex ships apex.optimizers; the unrelated PyPI project of that name does not."""
    if not _installed("apex"):
        return PackageState(False)
    try:
        importlib.import_module("apex.optimizers")
    except (ImportError, OSError, RuntimeError, AttributeError):
        return PackageState(
            False,
            "the installed package `apex` is not NVIDIA Apex (PyPI's apex is another project) or is broken; "
            "remove it, or install NVIDIA Apex from its source repository",
        )
    return PackageState(True)


def block(*names: str) -> None:
    """Make `import NAME` raise ImportError from now on, the one error Megatron-Core's guards expect."""
    for name in names:
        for loaded in [module for module in sys.modules if module.split(".")[0] == name]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]


def keep_usable(detected: dict[str, PackageState]) -> None:
    """Block the packages that cannot be used, and warn about those that look installed."""
    for name, state in detected.items():
        if state.usable:
            continue
        if state.problem:
            warnings.warn(f"{state.problem}; running without it", stacklevel=2)
        block(name)
