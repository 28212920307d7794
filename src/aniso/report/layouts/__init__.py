"""Layouts of tables by setting; a setting of another package gets the generic one."""

from aniso.report.layouts.addition import Addition
from aniso.report.layouts.few_shot import FewShot, FineTuning, Fractions
from aniso.report.layouts.generic import Generic
from aniso.report.layouts.language import LanguageModelling
from aniso.report.layouts.layout import Layout, field_text
from aniso.report.layouts.negation import KEPT, Negation
from aniso.report.layouts.test_time import TestTime

__all__ = ["Layout", "layout_for", "field_text", "KEPT"]

_LAYOUTS: dict[str, Layout] = {
    "few-shot": FewShot(),
    "data-fraction": Fractions(),
    "addition": Addition(),
    "negation": Negation(),
    "finetune": FineTuning(),
    "test-time": TestTime(),
    "lm": LanguageModelling(),
}
_GENERIC = Generic()


def layout_for(setting: str) -> Layout:
    """Return the layout of a setting."""
    return _LAYOUTS.get(setting, _GENERIC)
