"""The real pretrained model that tests use, where it has been fetched (`make models`)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATH = Path(os.environ.get("SMOLLM2_GGUF", ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))


def require_smollm2() -> Path:
    """The GGUF file; without it the test is skipped, but not in continuous integration, where it has to be there."""
    if not PATH.is_file():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{PATH} is missing, and continuous integration does not skip tests for it")
        pytest.skip(f"{PATH} is not there; `make models` fetches it")
    return PATH


def load_with_transformers(path: Path):
    """transformers' own model and tokenizer from the same file, fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32), AutoTokenizer.from_pretrained(
        **location
    )
