"""What happens between a configuration and the first process group: every mistake that one process alone can find is
found, and the model's configuration, its weights and the data are opened. The same for training and evaluation runs.

Imports megatron.core through the models, so `platform.setup` comes first. Runs nothing.
"""

from dataclasses import dataclass

from megatron_ext.cached_teacher import plan_cache
from megatron_ext.config import Config, check_files, check_layout
from megatron_ext.data import RunData, load_run_data
from megatron_ext.models.hf_config import HFConfig, check_model_layout, load_hf_config
from megatron_ext.models.sources import TensorSource, open_source
from megatron_ext.run_folder import check_load, check_outputs, check_save, teacher_settings
from megatron_ext.teacher import TeacherPlan, plan_teacher
from megatron_ext.teacher_cache import TeacherCache


@dataclass(frozen=True)
class Preparation:
    """What a run is made of, beside its configuration: the model's own, the weights to start from, the data."""

    hf: HFConfig
    source: TensorSource
    data: RunData
    teacher: TeacherPlan | TeacherCache | None


def prepare(config: Config, *, world_size: int, makes_folders: bool) -> Preparation:
    """Check everything and read the data.

    Args:
        world_size: the number of ranks that the run has.
        makes_folders: also make the folders that the run writes to, as the last check; one rank's work.

    Raises:
        ValueError: naming the setting or the file and row, the reason and the remedy.
    """
    check_layout(config, world_size)
    check_files(config)
    hf = load_hf_config(config.model.hf_path)
    check_model_layout(hf, config)
    teacher = plan_cache(config, hf) or plan_teacher(config, hf)
    teacher_settings(config)  # looks at the teacher's files while they are there
    check_load(config, hf)
    check_save(config)
    source = open_source(hf, config.model.random_init, config.training.seed)
    data = load_run_data(config).for_vocabulary(hf.vocab_size if teacher is None else teacher.vocab_size)
    if isinstance(teacher, TeacherCache):
        teacher.check_samples(data.named())
    if makes_folders:
        check_outputs(config)
    return Preparation(hf, source, data, teacher)
