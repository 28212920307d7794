"""Experiments on other engines: the records are those of a local run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs

from aniso.experiments.engines import make_engine

SPEC = """
schema: 1
name: grid
base:
  setting: few-shot
  model: {model}
  bank: {bank}
  task: ./photos
  compare: false
  schedule: {{ epochs: 1, batch_size: 4 }}
grid: {{ seed: [0, 1, 2], shots: [1, 2] }}
variants:
  - label: learned
  - label: one coefficient per vector
    base: {{ partition: whole }}
"""
RAISES = """
  - label: missing
    base: { task: ./nowhere }
    grid: { seed: [0], shots: [1] }
"""


@pytest.fixture
def spec(tmp_path, shelf):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC.format(model=shelf.model, bank=shelf.bank))
    return path


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return runs.shelf(tmp_path_factory.mktemp("shelf"))


def run(*args: object) -> subprocess.Popen[str]:
    """Start ``aniso run`` in a process of its own, as a user does."""
    command = [sys.executable, "-m", "aniso", "run", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def results(records: Path, count: int) -> dict[str, object]:
    """What must not depend on the engine, of as many records."""
    assert len(runs.recorded(records)) == count
    return {
        one["id"]: {key: one[key] for key in ("label", "metrics", "coefficients", "inputs", "spec")}
        for one in runs.recorded(records)
    }


def compare(spec: Path, data: Path, engine: tuple[str, ...], given: tuple[str, ...], count: int) -> None:
    """Run a grid with one cell that fails locally and on another engine, and compare what they wrote."""
    spec.write_text(spec.read_text() + RAISES)
    own, other = (spec.parent / name for name in ("own", "other"))
    for out, how in ((own, ("--jobs", "2")), (other, engine)):
        ran = run(spec, "--data", data, *given, *how, "-o", out)
        said = ran.communicate(timeout=400)[0]
        assert ran.returncode == 7, said
        assert f"{count + 1} cells: {count} recorded, 1 failed" in said and "nowhere" in said
        assert f"[{count + 1}/{count + 1}]" in said
    assert results(own, count) == results(other, count)
    failures = [json.loads(path.read_text()) for out in (own, other) for path in out.glob("*.failed.json")]
    assert len(failures) == 2 and failures[0] == failures[1]


@pytest.mark.cluster
def test_a_grid_on_ray_has_the_records_of_a_local_run(spec, shelf):
    pytest.importorskip("ray", reason="needs pip install 'aniso[ray]'")
    compare(spec, shelf.data, ("--engine", "ray"), (), 12)


@pytest.mark.cluster
def test_a_grid_as_jobs_has_the_records_of_a_local_run(spec, shelf):
    """submitit starts processes here in place of SLURM's jobs."""
    pytest.importorskip("submitit", reason="needs pip install 'aniso[slurm]'")
    engine = ("--engine", "slurm", "--engine-option", "cluster=local", "--jobs", "2")
    compare(spec, shelf.data, engine, ("--set", "grid.seed=[0]"), 4)


@pytest.mark.cluster
def test_a_ray_worker_that_is_killed_is_replaced(spec, shelf, tmp_path):
    pytest.importorskip("ray", reason="needs pip install 'aniso[ray]'")
    given = (spec, "--data", shelf.data, "--set", "base.schedule.epochs=20", "--only", "learned")
    other = run(*given, "--engine", "ray", "-o", tmp_path / "other")
    deadline = time.monotonic() + 120
    while not (states := list(tmp_path.glob("other/.states/*/state-*"))):
        assert time.monotonic() < deadline and other.poll() is None
        time.sleep(0.02)
    assert states
    workers = subprocess.run(
        ["pgrep", "-f", "ray::_run_remotely"], capture_output=True, text=True, check=True
    ).stdout.split()
    own = [int(pid) for pid in workers if _descends(int(pid), other.pid)]
    os.kill(own[0], signal.SIGKILL)
    said = other.communicate(timeout=400)[0]
    assert other.returncode == 0, said
    alone = run(*given, "--jobs", 2, "-o", tmp_path / "alone")
    said = alone.communicate(timeout=400)[0]
    assert alone.returncode == 0, said
    assert results(tmp_path / "other", 6) == results(tmp_path / "alone", 6)


def _descends(pid: int, ancestor: int) -> bool:
    """Whether a process was started by another, directly or not."""
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor


@pytest.mark.parametrize(
    ("name", "options", "mentions"),
    [
        ("ray", ["gpu=1"], ("gpu", "gpus=0", "retries=2")),
        ("ray", ["cpus=none"], ("cpus", "number")),
        ("slurm", ["minutes=0"], ("minutes", "partition")),
        ("local", ["cpus=1"], ("cpus", "no options")),
    ],
)
def test_options_that_an_engine_does_not_have(refused, name, options, mentions):
    with refused("USAGE", 2, *mentions):
        make_engine(name, options)


def test_an_unknown_engine_names_the_known_ones(aniso, spec):
    ran = aniso("run", spec, "--engine", "dask")
    assert ran.code == 2 and "local" in ran.err and "ray" in ran.err and "slurm" in ran.err


def test_claims_are_for_the_local_engine(aniso, spec):
    ran = aniso("run", spec, "--engine", "ray", "--claim")
    assert ran.code == 2 and "leave out one of the two" in ran.err
