"""aniso composes fine-tuned models: one learned coefficient per task vector and parameter block."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
