"""Methods: what is trained or searched to answer a setting's question. One file each."""

from aniso.experiments.methods.method import Method, TrainingMethod
from aniso.registry import METHODS

register = METHODS.register

__all__ = ["Method", "TrainingMethod", "register"]
