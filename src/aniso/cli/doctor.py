"""``aniso doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

from aniso.cli import show

_PACKAGES = {
    "torch": "required",
    "torchvision": "required",
    "safetensors": "required",
    "huggingface_hub": "required",
    "transformers": "pip install 'aniso[hf]'",
    "open_clip": "pip install 'aniso[openclip]'",
    "peft": "pip install 'aniso[peft]'",
    "matplotlib": "pip install 'aniso[plot]'",
}
_DISTRIBUTIONS = {"open_clip": "open_clip_torch"}


def doctor(json: show.Json = False) -> None:
    """Check this machine and its packages."""
    import typer

    packages = [_package(name) for name in _PACKAGES]
    machine = _machine()
    if json:
        show.as_json({"machine": machine, "packages": [p._asdict() for p in packages]})
    else:
        show.table(("machine", ""), list(machine.items()))
        show.table(
            ("package", "version", "state"),
            [(p.name, p.version, p.state) for p in packages],
        )
    broken = [p for p in packages if not p.ok and _PACKAGES[p.name] == "required"]
    if broken:
        raise typer.Exit(3)


class _Package(NamedTuple):
    name: str
    version: str
    ok: bool
    state: str


def _package(name: str) -> _Package:
    try:
        version = importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return _Package(name, "", False, f"missing: {_PACKAGES[name]}")
    try:
        importlib.import_module(name)
    except Exception as e:
        # a mismatched pair (torch and torchvision above all) fails in ways of its own
        return _Package(name, version, False, f"does not import: {e}")
    return _Package(name, version, True, "ok")


def _machine() -> dict[str, str | int | None]:
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    offline = [v for v in ("ANISO_OFFLINE", "HF_HUB_OFFLINE") if os.environ.get(v, "") not in ("", "0")]
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "memory": show.size(memory),
        "free disk here": show.size(shutil.disk_usage(Path.cwd()).free),
        "accelerator": str(torch.accelerator.current_accelerator() or "none")
        if torch.accelerator.is_available()
        else "none",
        "offline": ", ".join(offline) or "no",
    }
