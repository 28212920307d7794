"""Starts: the coefficients that learning begins at, in place of zero.

``fit(start.composition(model), objective, schedule, start=start)`` with one of::

    start = starts.constant(bank, 0.3)
    start = starts.depth_profile(bank, (0.1, 0.5))
    start = starts.least_squares(bank)
    start = starts.from_coefficients(bank, Coefficients.load("coefficients.safetensors"))
    start = starts.from_rule(bank, merge.TSV())
"""

from aniso.learn.starts.least_squares import least_squares
from aniso.learn.starts.profiles import constant, depth_profile, from_coefficients, interpolated
from aniso.learn.starts.rules import from_rule, from_vector
from aniso.learn.starts.start import Start

__all__ = [
    "Start",
    "constant",
    "depth_profile",
    "least_squares",
    "from_coefficients",
    "from_rule",
    "from_vector",
    "interpolated",
]
