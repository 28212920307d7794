"""Which kind of work a setting is."""

from __future__ import annotations

from aniso.experiments.language_work import LanguageWork
from aniso.experiments.outcome import Circumstances
from aniso.experiments.settings import BaseSetting, Language, PictureSetting
from aniso.experiments.work import Work


def work_of(setting: BaseSetting, circumstances: Circumstances | None = None) -> Work | LanguageWork:
    """With ``plan`` and ``run``: about texts, or about pictures."""
    if isinstance(setting, Language):
        return LanguageWork(setting, circumstances)
    assert isinstance(setting, PictureSetting)  # there are no others
    return Work(setting, circumstances)
