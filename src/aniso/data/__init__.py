"""Tasks: classes, prompts and splits; texts; both as batches."""

from aniso.classes import ClassList
from aniso.data.batches import Batch, Batches, by_length, loader
from aniso.data.card import known_tasks as list_tasks
from aniso.data.content import IMAGES, ImageLists, content_hash
from aniso.data.items import Items
from aniso.data.padding import Pieces, cat_padded
from aniso.data.splits import Labelled, Split, Unlabelled
from aniso.data.task import Task, load_task
from aniso.data.text_dataset import TextDataset, read_examples
from aniso.data.unlabelled import unlabelled_images

__all__ = [
    "load_task",
    "list_tasks",
    "unlabelled_images",
    "Task",
    "Labelled",
    "Unlabelled",
    "Split",
    "TextDataset",
    "read_examples",
    "ClassList",
    "Batches",
    "loader",
    "Batch",
    "by_length",
    "cat_padded",
    "Pieces",
    "Items",
    "content_hash",
    "ImageLists",
    "IMAGES",
]
