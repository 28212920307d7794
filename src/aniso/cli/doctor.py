"""``aniso doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from aniso.cli import show
from aniso.json_value import JsonObject

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
        show.as_json({"machine": machine, "packages": packages})
    else:
        show.table(("machine", ""), list(machine.items()))
        show.table(
            ("package", "version", "state"),
            [(p["name"], p["version"], p["state"]) for p in packages],
        )
    broken = [p for p in packages if not p["ok"] and _PACKAGES[str(p["name"])] == "required"]
    if broken:
        raise typer.Exit(3)


def _package(name: str) -> JsonObject:
    try:
        version = importlib.metadata.version(_DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return {"name": name, "version": "", "ok": False, "state": f"missing: {_PACKAGES[name]}"}
    try:
        importlib.import_module(name)
    except Exception as e:
        # a mismatched pair (torch and torchvision above all) fails in ways of its own
        return {"name": name, "version": version, "ok": False, "state": f"does not import: {e}"}
    return {"name": name, "version": version, "ok": True, "state": "ok"}


def _machine() -> JsonObject:
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
