"""Saves a run in Megatron's torch_dist layout and resumes it, also under another layout.

On disk: `iter_0000012/` per checkpoint and `latest_checkpointed_iteration.txt`, which moves only after everything else
is written. Each checkpoint carries `run.json`: what has to agree before anything is loaded, readable without torch.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ext.config import Config
from megatron_ext.data import TrainLoader
from megatron_ext.models.factory import finish_parameter_gathers
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.optimizer import initialize_optimizer_state, load_optimizer_state
from megatron_ext.parallel import ParallelContext
from megatron_ext.run_folder import (
    FORMAT,
    LATEST,
    RUN_FILE,
    checkpoint_directory,
    latest_iteration,
    model_identity,
    read_run_file,
    training_settings,
    write_durably,
)


class Checkpointer:
    """Writes and reads the checkpoints of one run."""

    def __init__(self, config: Config, hf: HFConfig, parallel: ParallelContext) -> None:
        self.config = config
        self.hf = hf
        self.parallel = parallel

    # ----------------------------------------------------------------------------------------------- public

    def save(
        self,
        iteration: int,
        chunks: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        loader: TrainLoader,
    ) -> Path | None:
        """Write one checkpoint; returns its folder. A kill at any moment leaves the previous one in place.

        Does nothing (and returns None) if this iteration is the newest checkpoint there already, as after resuming a
        finished run.
        """
        assert self.config.checkpoint.save is not None
        root = Path(self.config.checkpoint.save)
        directory = checkpoint_directory(root, iteration)
        if self._agree(latest_iteration(root) == iteration):
            return None
        temporary = directory.with_name(directory.name + ".incomplete")
        if self.parallel.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # the remains of a save that was cut off
            temporary.mkdir(parents=True)
        finish_parameter_gathers(chunks)
        dist.barrier()
        state = self._state(chunks, None if self.config.checkpoint.no_save_optim else optimizer, is_loading=False)
        state |= {"iteration": iteration, "opt_param_scheduler": scheduler.state_dict(), "rng_state": self._rng_state()}
        dist_checkpointing.save(state, str(temporary), async_strategy="mcore")
        if self.parallel.is_main:
            self._write_run_file(temporary, iteration, loader)
            shutil.rmtree(directory, ignore_errors=True)  # of a later iteration than the one that was resumed
            os.replace(temporary, directory)
            write_durably(root / LATEST, f"{iteration}\n")
        dist.barrier()
        return directory

    def _agree(self, found: bool) -> bool:
        """Rank 0's answer, on every rank: another one may look when the file system has moved on."""
        answer = torch.tensor(int(found), device=self.parallel.device)
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def resume(
        self,
        chunks: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        loader: TrainLoader,
    ) -> int:
        """Restore everything in place from the newest checkpoint of `load`; `check_load` has passed.

        Returns:
            The iteration to continue after.
        """
        directory, run = self._newest()
        loader.load_state_dict(run["loader"])  # first: it refuses other data
        with_optimizer = not self.config.checkpoint.no_load_optim
        same_layout = run["layout"] == self._layout()

        state = self._state(chunks, optimizer if with_optimizer else None, is_loading=True)
        if same_layout:
            state["rng_state"] = self._rng_state()
        loaded = self._read(state, directory)
        self._set_weights(chunks, loaded)
        if with_optimizer:
            load_optimizer_state(optimizer, loaded["optimizer"])
        else:
            optimizer.reload_model_params()  # master weights follow the loaded weights
        if same_layout:
            self._restore_rng(loaded["rng_state"])
        scheduler.step(increment=run["iteration"])
        return run["iteration"]

    def load_weights(self, chunks: list[torch.nn.Module]) -> int:
        """Take only the weights of the newest checkpoint of `load`; returns the iteration they are from.

        An optimizer that exists already has to `reload_model_params()` afterwards.
        """
        directory, run = self._newest()
        self._set_weights(chunks, self._read(self._state(chunks, None, is_loading=True), directory))
        return run["iteration"]

    def _newest(self) -> tuple[Path, dict[str, Any]]:
        assert self.config.checkpoint.load is not None
        root = Path(self.config.checkpoint.load)
        iteration = latest_iteration(root)
        assert iteration is not None, "check_load has found one"
        directory = checkpoint_directory(root, iteration)
        return directory, read_run_file(directory)

    @staticmethod
    def _read(state: dict[str, Any], directory: Path) -> dict[str, Any]:
        try:
            return dist_checkpointing.load(state, str(directory))
        # torch, pickle and Megatron-Core each have their own kinds; torch's is no Exception, and quotes tracebacks
        except (Exception, CheckpointException) as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0][:200]
            raise ValueError(
                f"checkpoint {directory} cannot be loaded ({type(error).__name__}: {reason}); "
                f"write the number of another checkpoint into {directory.parent / LATEST}"
            ) from error

    def _set_weights(self, chunks: list[torch.nn.Module], loaded: dict[str, Any]) -> None:
        for chunk, key in zip(unwrap_model(chunks), self._model_keys(len(chunks)), strict=True):
            chunk.load_state_dict(loaded[key])

    # ------------------------------------------------------------------------------------------------ state

    @staticmethod
    def _model_keys(count: int) -> list[str]:
        return ["model"] if count == 1 else [f"model{i}" for i in range(count)]

    def _metadata(self) -> dict[str, Any]:
        return {
            "dp_cp_group": self.parallel.pg.dp_cp,
            # the only kind that can change TP and PP, and that works with torch's Adam (0.19.2)
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }

    def _state(
        self, chunks: list[torch.nn.Module], optimizer: MegatronOptimizer | None, *, is_loading: bool
    ) -> dict[str, Any]:
        """The sharded state dict: a description of where every tensor of this rank lies in the whole."""
        metadata = self._metadata()
        models = zip(self._model_keys(len(chunks)), unwrap_model(chunks), strict=True)
        state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in models}
        if optimizer is not None:
            if is_loading:
                initialize_optimizer_state(optimizer)
            state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state

    def _layout(self) -> dict[str, int]:
        p = self.parallel
        return {"tp": p.tp_size, "pp": p.pp_size, "vp": p.vp_size, "cp": p.cp_size, "dp": p.dp_size}

    def _rng_state(self) -> ShardedObject:
        """Random states of this rank. Data-parallel replicas have their own: they draw for batches of other lengths."""
        p = self.parallel
        state = {
            "random": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(),
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        grid = (p.pp_size, p.tp_size, p.pg.dp_cp.size())
        return ShardedObject("rng_state", state, grid, (p.pp_rank, p.tp_rank, p.pg.dp_cp.rank()))

    @staticmethod
    def _restore_rng(state: dict[str, Any]) -> None:
        random.setstate(state["random"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        torch.cuda.set_rng_state(state["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])

    def _write_run_file(self, directory: Path, iteration: int, loader: TrainLoader) -> None:
        run = {
            "format": FORMAT,
            "iteration": iteration,
            "model": model_identity(self.hf),
            "settings": training_settings(self.config),
            "has_optimizer": not self.config.checkpoint.no_save_optim,
            "layout": self._layout(),
            "loader": loader.state_dict(),
        }
        write_durably(directory / RUN_FILE, json.dumps(run, indent=1) + "\n")
