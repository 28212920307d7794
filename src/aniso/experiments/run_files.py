"""Names of the files that a run leaves in its directory."""

from __future__ import annotations

SPEC = "spec.yaml"
RECORD = "record.json"
METRICS = "metrics.jsonl"
COEFFICIENTS = "coefficients.safetensors"
WEIGHTS = "weights.safetensors"
HEAD = "head.safetensors"
ADAPTER = "adapter"
FAILURE = "failure.json"
COMPARISON = "comparison.json"
TENSORBOARD = "tensorboard"
WANDB = "wandb"
