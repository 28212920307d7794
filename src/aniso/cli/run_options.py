"""Options of commands that run a setting: how it is executed, and what becomes of the result."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from aniso.experiments.options import Options, option


class RuntimeOptions(Options):
    """How a run is executed; the result does not depend on it."""

    data: Path | None = option(
        None, help="Directory of data sets; default: $ANISO_DATA, or ./data.", group="Runtime"
    )
    workers: int = option(0, help="Processes that decode images.", group="Runtime", ge=0)
    device: str | None = option(
        None, help="cpu, cuda, cuda:1 and so on; default: the GPU if there is one.", group="Runtime"
    )
    devices: int = option(
        1,
        help="Processes that share the bank and every batch: one per GPU, or on the CPU.",
        group="Runtime",
        ge=1,
    )
    shard_base: bool = option(
        False,
        help="With --devices: each process also keeps only its part of the base, and a weight is gathered "
        "when its layer runs. For bases that one GPU cannot hold.",
        group="Runtime",
    )
    memory: str | None = option(
        None,
        help="Memory for task vectors, such as 8GiB; the rest is streamed from disk. "
        "Default: 80 % of the free memory.",
        group="Runtime",
    )


class OutputOptions(Options):
    """What a command writes and prints."""

    out: Path | None = option(
        None,
        help="Directory of the run: coefficients, record, checkpoints.",
        group="Output",
        flags=("-o", "--out"),
    )
    resume: bool = option(False, help="Resume the run in the directory.", group="Output")
    allow_env_change: bool = option(
        False, help="Resume although software, device or threads differ.", group="Output"
    )
    track: Literal["trackio", "wandb", "tensorboard"] | None = option(
        None, help="Also send the numbers of every epoch to a tracker; it cannot stop a run.", group="Output"
    )
    tensorboard: bool = option(False, help="The earlier name of --track tensorboard.", group="Output")
    plan: bool = option(
        False, help="Print what would be read, trained and written, and stop.", group="Output"
    )
    print_spec: bool = option(False, help="Print the equivalent spec as YAML, and stop.", group="Output")
    json_: bool = option(False, help="Print JSON for programs.", group="Output", flags=("--json",))
