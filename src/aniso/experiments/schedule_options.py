"""The optimiser's options: those of ``Schedule``, each of which may be left to the setting."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import create_model

from aniso.experiments.options import Options, option
from aniso.schedule import Schedule

_TYPES = get_type_hints(Schedule)
_FIELDS: dict[str, Any] = {
    field.name: (
        _TYPES[field.name] | None,
        option(None, help=field.metadata["help"], group="Optimiser"),
    )
    for field in dataclasses.fields(Schedule)
}

if TYPE_CHECKING:

    class ScheduleOptions(Options):
        """What differs from the default schedule of a setting and method."""

        optimiser: str | None = None
        lr: float | None = None
else:
    ScheduleOptions = create_model(
        "ScheduleOptions",
        __base__=Options,
        __doc__="What differs from the default schedule of a setting and method.",
        **_FIELDS,
    )


def overridden(default: Schedule, given: ScheduleOptions) -> Schedule:
    """Return the schedule with the given values in place of the default ones."""
    return dataclasses.replace(
        default, **{name: value for name, value in given.model_dump().items() if value is not None}
    )
