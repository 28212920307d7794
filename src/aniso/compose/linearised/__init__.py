"""Linearised models: f(x; theta0) + J(x; theta0) tau, linear in the coefficients."""

from aniso.compose.linearised.tangent import Linearised, Tangent

__all__ = ["Linearised", "Tangent"]
