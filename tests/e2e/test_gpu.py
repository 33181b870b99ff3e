"""The same run on a GPU (NCCL) and on the CPU (gloo) gives the same curve; not run yet by anybody with a GPU."""

import pytest

from toy_run import ToyRun, read_metrics


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"bf16": "true"}, {"use_distributed_optimizer": "true"}], ids=str)
def test_gpu_repeats_the_cpu_curve(tmp_path, settings: dict) -> None:
    toy = ToyRun(tmp_path)
    losses = {}
    for device in ("cpu", "cuda"):
        log = tmp_path / device
        result = toy.run(1, device=device, log_dir=log, **settings)
        assert result.returncode == 0, result.stderr
        losses[device] = [record["loss"] for record in read_metrics(log)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-2 if settings.get("bf16") else 1e-4)
