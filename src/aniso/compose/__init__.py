"""Compositions: which coefficients exist, and a model at base + sum of coefficient * delta."""

from aniso.compose.bake import Baked
from aniso.compose.coefficients import Coefficients
from aniso.compose.composition import Composition
from aniso.compose.partition import Partition
from aniso.compose.plan import Plan
from aniso.compose.runtime import Runtime
from aniso.compose.tangent import Linearised, Tangent

__all__ = ["Composition", "Partition", "Coefficients", "Baked", "Runtime", "Plan", "Linearised", "Tangent"]
