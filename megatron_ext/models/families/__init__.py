"""The families that can be trained, by the architecture that config.json names."""

from megatron_ext.models.families.base import Family
from megatron_ext.models.families.llama import LLAMA

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA,)}
