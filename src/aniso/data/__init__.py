"""Tasks: classes, prompts and splits; texts; both as batches."""

from aniso.classes import ClassList
from aniso.data.batches import Batch, Batches
from aniso.data.passages import Passages, read_examples
from aniso.data.splits import Labelled, Split, Unlabelled
from aniso.data.task import Task, load_task
from aniso.data.unlabelled import unlabelled_pictures

__all__ = [
    "load_task",
    "unlabelled_pictures",
    "Task",
    "Labelled",
    "Unlabelled",
    "Split",
    "Passages",
    "read_examples",
    "ClassList",
    "Batches",
    "Batch",
]
