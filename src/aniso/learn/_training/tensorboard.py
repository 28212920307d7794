"""Epoch rows for TensorBoard; metrics.jsonl has the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from aniso.errors import UsageError
from aniso.records import EpochRow


@final
class TensorBoardWriter:
    """Writes the losses and accuracies of every epoch's row it is called with."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "MODEL-LIBRARY", "TensorBoard is not installed", fix="pip install tensorboard"
            ) from None
        make: Any = SummaryWriter
        self._writer = make(str(directory))

    def __call__(self, row: EpochRow) -> None:
        numbers = {f"accuracy/{name}": value for name, value in row.accuracy.items()}
        numbers |= {f"perplexity/{name}": value for name, value in row.perplexity.items()}
        numbers |= {f"loss/{name}": value for name, value in row.terms.items()}
        if row.loss is not None:
            numbers["loss"] = row.loss
        for name, value in numbers.items():
            self._writer.add_scalar(name.replace(" ", "_"), value, row.epoch)
        self._writer.flush()
