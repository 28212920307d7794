"""Compositions of LoRA adapters that are written as one adapter again."""

from aniso.compose.lora.factor_composition import FactorComposition, FactorModel
from aniso.compose.lora.merged_adapter import MergedAdapter, merge_adapters

__all__ = ["MergedAdapter", "merge_adapters", "FactorComposition", "FactorModel"]
