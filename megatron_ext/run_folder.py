"""The folder of a run on disk: the pointer to its newest checkpoint, what a checkpoint says about itself (`run.json`),
and what has to agree before a run continues one or writes beside it. Needs no process group; the tensors are
`checkpoint.py`'s.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config import Config, ConfigError
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.teacher_cache import stored_teacher, weights_fingerprint
from megatron_ext.token_file import temporary_path

LATEST = "latest_checkpointed_iteration.txt"
RUN_FILE = "run.json"
EVALUATION_FILE = "eval.json"
FORMAT = 1


def checkpoint_directory(root: Path, iteration: int) -> Path:
    return root / f"iter_{iteration:07d}"


def latest_iteration(root: Path) -> int | None:
    """The newest complete checkpoint under `root`, None if there is none.

    Raises:
        ValueError: the pointer file is there but does not hold a number, or points at nothing.
    """
    pointer = root / LATEST
    if not pointer.exists():
        return None
    try:
        text = pointer.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{pointer} cannot be read ({error}); write the number of a checkpoint into it") from None
    if not re.fullmatch(r"\d{1,12}", text):
        raise ValueError(f"{pointer} holds {text[:20]!r}, not an iteration; write the number of a checkpoint into it")
    iteration = int(text)
    if not (checkpoint_directory(root, iteration) / RUN_FILE).exists():
        raise ValueError(
            f"{pointer} names iteration {iteration}, but {checkpoint_directory(root, iteration)} is not a complete "
            f"checkpoint of this project; write the number of another checkpoint into {LATEST}"
        )
    return iteration


def model_identity(hf: HFConfig) -> dict[str, Any]:
    """What makes two models the same for a checkpoint: the architecture and its sizes, not where it came from."""
    names = [
        "vocab_size",
        "hidden_size",
        "ffn_hidden_size",
        "num_layers",
        "num_attention_heads",
        "num_query_groups",
        "head_dim",
        "tied",
        "layernorm_epsilon",
    ]
    sizes = {name: getattr(hf, name) for name in names}
    return {"architecture": hf.family.architecture, **sizes, "rope_parameters": dict(hf.rope_parameters)}


def teacher_settings(config: Config) -> dict[str, Any]:
    """Which teacher a run has, by its weights and not by where they are; a store stands for the teacher it is of. Empty
    without one. Looks at the files once."""
    teacher = config.teacher
    if teacher.teacher_cache is not None:
        return dict(stored_teacher(teacher.teacher_cache))
    if teacher.teacher_path is None:
        return {}
    load = None
    if teacher.teacher_load is not None:
        iteration = latest_iteration(Path(teacher.teacher_load))
        assert iteration is not None, "check_load has found one"
        load = checkpoint_directory(Path(teacher.teacher_load), iteration)
    bf16 = config.training.bf16 if teacher.teacher_bf16 is None else teacher.teacher_bf16
    return {"weights": weights_fingerprint(teacher.teacher_path, load), "bf16": bf16}


def training_settings(config: Config) -> dict[str, Any]:
    """What determines the loss curve. The layout, the micro-batch size, how logits are computed and the logging are
    free to change."""
    optimizer = config.optimizer.model_dump()
    optimizer["lr_decay_iters"] = config.lr_decay_iters
    settings: dict[str, Any] = {f"optimizer.{name}": value for name, value in optimizer.items()}
    settings |= {f"losses.{name}": loss.model_dump() for name, loss in config.losses.items()}
    for section, names in {
        "training": ("global_batch_size", "loss_reduction", "seed", "bf16"),
        "logits": ("logit_softcap", "logit_scale"),
        "model": ("attention_dropout", "hidden_dropout"),
    }.items():
        values = getattr(config, section).model_dump()
        settings |= {f"{section}.{name}": values[name] for name in names}
    settings |= {f"teacher.{name}": value for name, value in teacher_settings(config).items()}
    return settings


def _with_later_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint, and the defaults of those that came after the version that wrote it: what they
    choose now is what it did then."""
    losses = {name.removeprefix("losses."): loss for name, loss in saved.items() if name.startswith("losses.")}
    try:
        config = Config.from_dict({"model": {"hf_path": "any"}, "losses": losses})
    except ConfigError:  # losses that this version does not know: they differ from any it could have
        return dict(saved)
    settings = training_settings(config)
    return {**settings, **{name: value for name, value in saved.items() if not name.startswith("losses.")}}


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    names = sorted(saved.keys() | current.keys())
    absent = "absent"
    return [
        f"{name} was {saved.get(name, absent)} and is now {current.get(name, absent)}"
        for name in names
        if saved.get(name, absent) != current.get(name, absent)
    ]


def read_run_file(directory: Path) -> dict[str, Any]:
    """What a checkpoint says about itself.

    Raises:
        ValueError: the file is missing, damaged, or of a newer format.
    """
    path = directory / RUN_FILE
    kinds = {"iteration": int, "model": dict, "settings": dict, "has_optimizer": bool, "layout": dict, "loader": dict}
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        version = run["format"]
        if version == FORMAT:
            damaged = [name for name, kind in kinds.items() if not isinstance(run.get(name), kind)]
            if damaged:
                raise ValueError(f"{', '.join(damaged)}: missing or of the wrong kind")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {directory} is not a complete checkpoint") from None
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this version reads {FORMAT}; use the version that wrote it")
    return run


def check_load(config: Config, hf: HFConfig) -> None:
    """Refuse a checkpoint that does not belong to this model and these settings. Needs no process group.

    Raises:
        ValueError: naming every difference.
    """
    if config.checkpoint.load is None:
        return
    root = Path(config.checkpoint.load)
    iteration = latest_iteration(root)
    if iteration is None:
        raise ValueError(f"checkpoint.load {root} holds no checkpoint ({LATEST} is missing); give the folder of a run")
    run = read_run_file(checkpoint_directory(root, iteration))
    different = _differences(run["model"], model_identity(hf))
    if different:
        raise ValueError(f"checkpoint.load {root} is of another model: {'; '.join(different)}; give its own model")
    if config.checkpoint.finetune or config.evaluation.eval_only:  # they take the weights alone
        return
    different = _differences(_with_later_settings(run["settings"]), training_settings(config))
    if config.checkpoint.no_load_optim:
        different = [difference for difference in different if not difference.startswith("optimizer.")]
    elif not run["has_optimizer"]:
        raise ValueError(f"checkpoint.load {root} was saved without optimizer states; add --no-load-optim")
    if different:
        raise ValueError(
            f"checkpoint.load {root} cannot be continued with other settings: {'; '.join(different)}; "
            "set them as they were (lr_decay_iters follows train_iters unless it is set), "
            "or start a new run from its weights with --finetune"
        )


def check_save(config: Config) -> None:
    """Refuse to mix a new run into the checkpoints of another one.

    Raises:
        ValueError: `save` already holds checkpoints and is not what `load` continues.
    """
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is None or config.evaluation.eval_only or not (Path(save) / LATEST).exists():
        return
    continues = load is not None and Path(load).resolve() == Path(save).resolve() and not config.checkpoint.finetune
    if not continues:
        raise ValueError(
            f"checkpoint.save {save} already holds the checkpoints of a run; continue it with --load {save}, "
            "or give another folder"
        )


def check_outputs(config: Config) -> None:
    """Make the folders that the run will write to, and see that it can: found out now, not after the training.

    The last check, on one rank; nothing else is wrong by then.

    Raises:
        ValueError: naming the setting, the path and the system's reason.
    """
    if config.evaluation.per_token_outputs is not None:
        check_token_file(Path(config.evaluation.per_token_outputs))
    folders = {}
    trains = not config.evaluation.eval_only
    if trains and config.checkpoint.save is not None:
        folders["checkpoint.save"] = config.checkpoint.save
    if trains and config.checkpoint.save_hf is not None:
        folders["checkpoint.save_hf"] = str(Path(config.checkpoint.save_hf).parent)
    folders["logging.log_dir"] = str(config.log_directory)
    for setting, folder in folders.items():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if setting == "logging.log_dir":
                for name in ("metrics.jsonl", "config.yaml") if trains else ("metrics.jsonl",):
                    (Path(folder) / name).open("a", encoding="utf-8").close()
                if (Path(folder) / EVALUATION_FILE).is_dir():
                    raise IsADirectoryError(f"{EVALUATION_FILE} in it is a directory")
        except (OSError, ValueError) as error:
            raise ValueError(f"{setting}: {folder} cannot be written to ({error}); give another folder") from None


def check_token_file(path: Path) -> None:
    """See that the file of per-token outputs can be written, under the name that it has until it is complete.

    Raises:
        ValueError: naming the setting, the path and the system's reason.
    """
    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.open("wb").close()
        temporary.unlink()
    except OSError as error:
        raise ValueError(
            f"evaluation.per_token_outputs: {path} cannot be written ({error}); give another path"
        ) from None


def folders_written_to(config: Config) -> list[str]:
    """The folders that `check_outputs` has made, in which two runs would write to the same files."""
    folders = [str(config.log_directory)]
    saves = config.checkpoint.save is not None and not config.evaluation.eval_only
    return [*folders, config.checkpoint.save] if saves else folders


def write_durably(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old text or the new one, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
