"""Device choice and the CPU substitutions; the process already runs under `platform.setup("cpu")` (conftest.py)."""

import subprocess
import sys

import pytest
import torch

from megatron_ext import platform
from megatron_ext.platform.device import choose_device_type
from megatron_ext.platform.optional_packages import block, detect_apex, detect_transformer_engine


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_auto_is_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device_type("auto") == "cpu"
    with pytest.raises(ValueError, match=r"training\.device is cuda.*sees no GPU.*--device cpu"):
        choose_device_type("cuda")


def test_auto_is_cuda_with_a_gpu_and_cpu_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device_type("auto") == "cuda"
    assert choose_device_type("cpu") == "cpu"


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="'tpu' is not known; use auto, cuda or cpu"):
        choose_device_type("tpu")


def test_setup_is_idempotent() -> None:
    assert platform.setup("cpu") is platform.setup("cpu")


def test_tensors_for_cuda_are_made_on_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.ones(2).to("cuda").device.type == "cpu"
    assert torch.ones(2).cuda().device.type == "cpu"


def test_type_names_are_those_megatron_checks_for() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_random_state_is_that_of_the_cpu_generator() -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_meta_device_context_still_works() -> None:
    # transformers builds models under this context; factories are recognised by identity there
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"


def test_streams_and_events_do_nothing() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
    event = stream.record_event()
    event.synchronize()
    assert event.query() and torch.cuda.memory_allocated() == 0


def test_split_sizes_of_all_to_all_may_be_tensors(tmp_path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sent, received = torch.arange(3.0), torch.empty(3)
        dist.all_to_all_single(received, sent, torch.tensor([3]), torch.tensor([3]))
        assert torch.equal(received, sent)
    finally:
        dist.destroy_process_group()


def test_too_late_setup_is_refused() -> None:
    result = run_python("import megatron.core\nfrom megatron_ext import platform\nplatform.setup('cpu')")
    assert "has to run before megatron.core is imported" in result.stderr


def test_nothing_is_substituted_before_setup() -> None:
    code = "import torch\nf = torch.zeros\nimport megatron_ext.platform\nassert torch.zeros is f\nprint('ok')"
    assert run_python(code).stdout.strip() == "ok"


def test_half_installed_packages_are_detected_and_blocked(tmp_path) -> None:
    broken = tmp_path / "transformer_engine"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libtransformer_engine.so: cannot open')\n")
    foreign = tmp_path / "apex"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")
    code = """
from megatron_ext.platform.optional_packages import *
te, apex = detect_transformer_engine(), detect_apex()
assert not te.usable and "cannot open" in te.problem, te
assert not apex.usable and "not NVIDIA Apex" in apex.problem, apex
keep_usable({"transformer_engine": te, "apex": apex})
for name in ("transformer_engine", "apex"):
    try:
        __import__(name)
    except ImportError:
        print("blocked", name)
"""
    result = run_python(code, PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}")
    assert result.stdout.splitlines() == ["blocked transformer_engine", "blocked apex"], result.stderr


def test_absent_packages_are_no_problem() -> None:
    block("transformer_engine", "apex")
    assert detect_transformer_engine().problem == "" and detect_apex().problem == ""
