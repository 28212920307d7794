"""A tour of aniso: every step is a command that a user could type."""

from aniso.demo.images import write_tasks
from aniso.demo.page import write_page
from aniso.demo.tour import Step, steps

__all__ = ["write_tasks", "steps", "Step", "write_page"]
