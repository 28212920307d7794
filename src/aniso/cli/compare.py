"""``aniso compare``: which method is best for a task, or for one model of several?"""

from __future__ import annotations

from typing import Any, final

import typer
from typer.core import TyperGroup

from aniso.cli.compare_addition import ADDITION, addition_command
from aniso.cli.compare_few_shot import few_shot

_FEW_SHOT = "few-shot"


@final
class CompareGroup(TyperGroup):
    """A command for every setting that can be compared in; without a name it is few-shot."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0].startswith("-"):
            args = [_FEW_SHOT, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), ADDITION]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return addition_command() if cmd_name == ADDITION else super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=CompareGroup,
    help="Compare methods on a task (few-shot), or for one model of several tasks (addition).",
)
app.command(_FEW_SHOT)(few_shot)
