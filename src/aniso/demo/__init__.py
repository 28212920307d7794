"""A tour on a fresh machine: every step is a command that a user could type."""

from aniso.demo.pictures import write_tasks
from aniso.demo.story import write_page
from aniso.demo.tour import Step, steps

__all__ = ["write_tasks", "steps", "Step", "write_page"]
