"""A tour on a fresh machine: every step is a command that a user could type."""

from aniso.demo.pictures import write_tasks
from aniso.demo.steps import Step, steps
from aniso.demo.story import write_page

__all__ = ["write_tasks", "steps", "Step", "write_page"]
