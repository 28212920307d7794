"""What tests of commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def done(aniso: Callable[..., Any]) -> Callable[..., Any]:
    """Run a command that must end well; gives what it printed as JSON."""

    def run(*args: object) -> Any:
        ran = aniso(*args, "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return run
