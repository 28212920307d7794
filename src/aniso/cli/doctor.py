"""``aniso doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from aniso.cli import show

if TYPE_CHECKING:
    from aniso.compose.machine_benchmark import MachineBenchmark

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


def doctor(
    bench: Annotated[
        bool,
        typer.Option("--bench", help="Also measure what compositions cost here; takes about a minute."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="For --bench: cpu, cuda and so on; default: the GPU if there is one.")
    ] = None,
    json: show.Json = False,
) -> None:
    """Check this machine and its packages."""
    packages = [_package(name) for name in _PACKAGES]
    machine = _machine()
    measured = _measured(device) if bench else None
    if json:
        found = {"machine": machine, "packages": [p._asdict() for p in packages]}
        show.as_json(found if measured is None else {**found, "benchmark": asdict(measured)})
    else:
        if measured is not None:
            _print_benchmark(measured)
        show.table(("machine", ""), list(machine.items()))
        show.table(
            ("package", "version", "state"),
            [(p.name, p.version, p.state) for p in packages],
        )
    broken = [p for p in packages if not p.ok and _PACKAGES[p.name] == "required"]
    if broken:
        raise typer.Exit(3)


def _measured(device: str | None) -> MachineBenchmark:
    from aniso.compose.machine_benchmark import benchmark_machine
    from aniso.experiments.device import find_device

    with show.item_progress() as progress:
        return benchmark_machine(find_device(device), progress)


def _print_benchmark(found: MachineBenchmark) -> None:
    facts = {
        "device": f"{found.device}, {found.threads} threads",
        "model": f"{found.parameters / 1e6:.1f} M parameters, {found.vectors} vectors",
        "floor": f"{1000 * found.floor:.0f} ms for the model's own step",
        "reading": f"{found.read_bandwidth / 1e9:.1f} GB/s",
        "vectors are added by": found.path,
    }
    show.table(("benchmark", ""), list(facts.items()))
    show.table(
        ("storage", "step", "step / floor", "memory"),
        [
            (c.storage, f"{1000 * c.step:.0f} ms", f"{c.ratio:.2f}", show.size(c.bytes_per_step))
            for c in found.storages
        ],
    )


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
