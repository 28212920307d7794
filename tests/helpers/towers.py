"""Small image towers with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def timm_directory(path: Path, name: str = "test_efficientnet", **settings: Any) -> Any:
    """Write a directory as timm pushes it, with random weights; the network is returned."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=7, **settings).eval()
    path.mkdir()
    save_file(
        {key: value.contiguous().clone() for key, value in network.state_dict().items()},
        path / "model.safetensors",
    )
    config = {"architecture": name, "num_classes": 7, "label_names": list("abcdefg"), "model_args": settings}
    (path / "config.json").write_text(json.dumps(config))
    return network
