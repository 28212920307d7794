"""Compositions: models with weights base + sum of coefficient * delta, and their coefficients."""

from aniso.compose._engine.coefficient_index import BlockCoefficients, CoefficientIndex
from aniso.compose._engine.sharded import Sharding
from aniso.compose.bake import Baked
from aniso.compose.card import CardDetails
from aniso.compose.coefficients import Coefficients
from aniso.compose.composition import Composition, batch_runner
from aniso.compose.difference import difference_vector, folded
from aniso.compose.linearised import Linearised, Tangent
from aniso.compose.lora import FactorComposition, FactorModel, MergedAdapter, merge_adapters
from aniso.compose.partition import Partition
from aniso.compose.plain_model import PlainModel
from aniso.compose.plan import Plan
from aniso.compose.runtime import Runtime

__all__ = [
    "Composition",
    "batch_runner",
    "Sharding",
    "Partition",
    "Coefficients",
    "CoefficientIndex",
    "BlockCoefficients",
    "Baked",
    "PlainModel",
    "difference_vector",
    "folded",
    "CardDetails",
    "MergedAdapter",
    "merge_adapters",
    "FactorComposition",
    "FactorModel",
    "Linearised",
    "Tangent",
    "Plan",
    "Runtime",
    "parse_bytes",
    "show_bytes",
]
