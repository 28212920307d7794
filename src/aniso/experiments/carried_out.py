"""Which kind of work a setting is."""

from __future__ import annotations

from aniso.data import Task
from aniso.experiments.language_work import LanguageWork
from aniso.experiments.outcome import RunOptions
from aniso.experiments.settings import BaseSetting, Language, PictureSetting
from aniso.experiments.work import Work


def work_of(
    setting: BaseSetting, options: RunOptions | None = None, tasks: dict[str, Task] | None = None
) -> Work | LanguageWork:
    """With ``plan`` and ``run``: about texts, or about images. ``tasks`` were loaded before, if given."""
    if isinstance(setting, Language):
        return LanguageWork(setting, options)
    assert isinstance(setting, PictureSetting)  # there are no others
    return Work(setting, options, tasks)
