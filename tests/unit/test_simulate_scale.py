"""The simulation of scale: no work is lost, seeds decide, and simple cases have closed forms."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from aniso.experiments.claims import LEASE
from aniso.learn.selection.adapter_scoring import PART
from aniso.vectors.catalogue_refresh import CONNECTIONS
from aniso.weights.object_store import Retry

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_scale", ROOT / "scripts/simulate_scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scale = _script()
COSTS = scale.Costs(start=2.0, list=1e-4, load=1e-5, header=3e-3, compare=1e-3, read=2e-3, score=4e-3)
IDEAL = scale.World(
    0.0, 1, requests_per_second=float("inf"), failed_requests=0, slow_workers=0, deaths_per_hour=0, changed=0
)
HARSH = scale.World(0.02, 8, failed_requests=0.3, slow_workers=0.2, deaths_per_hour=60, part=16)


def test_one_worker_takes_the_sum_of_costs() -> None:
    plain = scale.simulate_selection(COSTS, IDEAL, 500, 1, catalogue=False)
    assert plain.seconds == pytest.approx(2.0 + 500 * (1e-4 + 3e-3 + 1e-3 + 2e-3 + 4e-3))
    assert plain.busy == pytest.approx(plain.seconds) and plain.repeated == 0
    known = scale.simulate_selection(COSTS, IDEAL, 500, 1, catalogue=True)
    assert known.seconds == pytest.approx(2 * 2.0 + 500 * (1e-4 + 1e-5 + 1e-3 + 2e-3 + 4e-3))
    waiting = replace(IDEAL, latency=0.5, page=1000)
    assert scale.simulate_selection(COSTS, waiting, 500, 1, catalogue=False).seconds == pytest.approx(
        2.0 + 500 * 1e-4 + 0.5 + 500 * 3 * 0.5 + 500 * 0.01, rel=0.01
    )


@pytest.mark.parametrize("catalogue", [False, True])
@pytest.mark.parametrize("workers", [1, 7, 40])
@pytest.mark.parametrize("world", [IDEAL, HARSH], ids=["ideal", "harsh"])
def test_no_adapter_is_lost_or_counted_twice(world, workers: int, catalogue: bool) -> None:
    found = scale.simulate_selection(COSTS, world, 2000, workers, catalogue=catalogue)
    assert found.scored + found.unreachable == 2000
    assert found.unreachable == 0 if world is IDEAL else found.repeated > 0
    each = COSTS.read + COSTS.compare + COSTS.score + (0 if catalogue else COSTS.header)
    # what is busy is useful, repeated, or the start of a worker
    assert found.busy - found.repeated >= found.scored * each * 0.999
    assert found.seconds * workers * 3 >= found.scored * each
    again = scale.simulate_selection(COSTS, world, 2000, workers, catalogue=catalogue)
    assert again == found
    if world is HARSH:
        other = scale.simulate_selection(COSTS, world, 2000, workers, catalogue=catalogue, seed=1)
        assert other != found and other.scored + other.unreachable == 2000


def test_a_store_with_a_limit_bounds_the_speed() -> None:
    slow = replace(IDEAL, requests_per_second=100.0)
    for workers in (10, 100):
        assert scale.simulate_selection(COSTS, slow, 3000, workers, catalogue=True).seconds >= 30


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("workers", [1, 9])
def test_no_cell_of_a_grid_is_lost(workers: int, claims: bool) -> None:
    ideal = scale.simulate_grid([2.0], IDEAL, 90, workers, claims=claims)
    assert ideal.scored == 90
    assert ideal.busy == pytest.approx(180)
    if workers == 1 or claims:
        assert ideal.seconds == pytest.approx(180 / workers)
    harsh = scale.simulate_grid([2.0, 5.0], HARSH, 90, workers, claims=claims)
    assert harsh.scored == 90 and harsh.repeated > 0
    assert harsh == scale.simulate_grid([2.0, 5.0], HARSH, 90, workers, claims=claims)


def test_shards_add_up() -> None:
    import random

    for workers in (1, 3, 1000):
        sizes = scale._shards(random.Random(1), 10_000, workers)
        assert sum(sizes) == 10_000 and len(sizes) == workers and min(sizes) >= 0


def test_the_knee_is_where_workers_stop_paying() -> None:
    def rows(*seconds: float) -> list[dict[str, float]]:
        return [{"workers": w, "seconds": s} for w, s in zip((10, 30, 100), seconds, strict=True)]

    assert scale.knee(rows(90, 30, 9)) == 100
    assert scale.knee(rows(90, 30, 25)) == 30
    assert scale.knee(rows(90, 80, 79)) == 10


def test_the_model_has_the_limits_of_the_library() -> None:
    world = scale.World(0.02)
    assert (world.part, world.lease, world.connections) == (PART, LEASE, CONNECTIONS)
    assert (world.attempts, world.pause) == (Retry().attempts, Retry().pause)


def test_the_record_is_made_of_the_measured_costs_and_the_page_of_the_record() -> None:
    measured, record = (json.loads(path.read_text()) for path in (scale.COSTS, scale.RECORD))
    costs = scale.Costs.of_record(measured)
    assert record["costs"] == scale.asdict(costs)
    world = scale.World(max(row["latency"] for row in measured["rows"]), measured["connections"])
    assert record["world"] == scale.asdict(world)
    row = record["selections"][0]
    found = scale.simulate_selection(
        costs, world, row["adapters"], row["workers"], catalogue=row["catalogue"]
    )
    assert {**row, **scale.asdict(found)} == row
    assert record["check"] == scale.check(measured, costs)
    text = scale.PAGE.read_text()
    assert scale.page(text, record) == text and "simulation" in text
