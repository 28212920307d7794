"""Settings: which data, vectors, objective and keep rule a question needs. One file each."""

from aniso.experiments.settings.setting import Setting
from aniso.registry import SETTINGS

register = SETTINGS.register

__all__ = ["Setting", "register"]
