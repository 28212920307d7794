"""The mixing desk: a page over a composition whose coefficients are moved by hand."""

from aniso.explore.desk import Desk
from aniso.explore.opening import DeskOptions, open_desk
from aniso.explore.server import DeskServer

__all__ = ["Desk", "DeskOptions", "open_desk", "DeskServer"]
