"""Simulate selection among 10,000 to 1,000,000 adapters, and grids of as many cells, on 10 to 1,000 workers.

    python scripts/simulate_scale.py

A discrete-event model, not a measurement. What one adapter costs is read from the record of
`benchmarks/object_store.py`, and what a cell takes from the records of the few-shot experiment. Requests fail
and are repeated as in aniso; workers are slow, or die and start again; a store answers a limited number of
requests in a second. Writes benchmarks/results/scale.json and the tables of docs/scale.md.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COSTS = ROOT / "benchmarks/results/object_store.json"
CELLS = ROOT / "experiments/few-shot/records"
RECORD = ROOT / "benchmarks/results/scale.json"
PAGE = ROOT / "docs/scale.md"
ADAPTERS = (10_000, 100_000, 1_000_000)
WORKERS = (10, 30, 100, 300, 1000)


@dataclass(frozen=True)
class Costs:
    """CPU seconds of a worker: once, for each adapter that it lists or knows, and for each that it scores."""

    start: float
    list: float
    load: float
    header: float
    compare: float
    read: float
    score: float

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Costs:
        """Return the costs in a record of the benchmark."""
        (found,) = [row["costs"] for row in record["rows"] if row["costs"]]
        return cls(**found)


@dataclass(frozen=True)
class World:
    """Everything that is assumed, beside the costs."""

    latency: float
    """Seconds until a request is answered."""
    connections: int = 8
    page: int = 1000
    """Files in one answer to a listing."""
    requests_per_second: float = 5500.0
    """Of the store, for all workers together: what S3 promises for one prefix."""
    failed_requests: float = 0.01
    attempts: int = 4
    pause: float = 0.5
    slow_workers: float = 0.05
    slowness: float = 3.0
    deaths_per_hour: float = 0.1
    """Of each worker; it starts again, and repeats what was not written."""
    part: int = 256
    """Adapters in a file of scores."""
    changed: float = 0.01
    """Share of adapters that a refresh reads again."""
    lease: float = 600.0
    """Seconds until the cell of a dead worker is taken over."""


@dataclass(frozen=True)
class Outcome:
    """What a simulated selection, or grid, came to."""

    seconds: float
    """Until the last worker has finished."""
    busy: float
    """CPU seconds of all workers."""
    repeated: float
    """CPU seconds of work that was done again."""
    scored: int
    unreachable: int
    requests: int


class _Store:
    """Answers a limited number of requests in every second; others wait for a second that has room.

    Requests may come in any order of time: those of one adapter are known before others' earlier ones.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.requests = 0
        self._count: dict[int, int] = {}
        self._next: dict[int, int] = {}

    def answered(self, time: float) -> float:
        self.requests += 1
        if math.isinf(self.rate):
            return time
        second = self._with_room(int(time))
        self._count[second] = self._count.get(second, 0) + 1
        if self._count[second] >= self.rate:
            self._next[second] = second + 1
        return max(time, float(second))

    def _with_room(self, second: int) -> int:
        """Return the first second from this one on that is not full."""
        passed = []
        while second in self._next:
            passed.append(second)
            second = self._next[second]
        for full in passed:
            self._next[full] = second
        return second


@dataclass
class _Worker:
    """A worker's clock, and what it has to do."""

    speed: float
    left: int
    death: float
    free: float = 0.0
    """The time at which its processor has nothing to do."""
    ready: float = 0.0
    """The time at which it has started."""
    unwritten: int = 0
    unwritten_lost: int = 0
    unwritten_cpu: float = 0.0


def simulate_selection(
    costs: Costs, world: World, adapters: int, workers: int, *, catalogue: bool, seed: int = 0
) -> Outcome:
    """Return the outcome of one selection.

    With a catalogue, one process lists and reads what has changed, and workers read tensors alone. Without,
    every worker lists, and reads the headers of its own adapters.
    """
    return _Selection(costs, world, adapters, workers, catalogue, seed).run()


class _Selection:
    def __init__(
        self, costs: Costs, world: World, adapters: int, workers: int, catalogue: bool, seed: int
    ) -> None:
        self.world = world
        self.draw = random.Random(f"{seed} {adapters} {workers} {catalogue}")
        self.store = _Store(world.requests_per_second)
        self.busy = self.repeated = 0.0
        self.done = self.lost = 0
        self.requests_each = 1 if catalogue else 3
        self.each = costs.read + costs.compare + costs.score + (0.0 if catalogue else costs.header)
        pages = math.ceil(2 * adapters / world.page)
        self.store.requests += pages * (1 if catalogue else workers)
        self.start_cpu = costs.start + (costs.load if catalogue else costs.list) * adapters
        self.start_wait = 0.0 if catalogue else pages * world.latency
        self.begin = self._refresh(costs, adapters, pages) if catalogue else 0.0
        self.team = [_worker(world, self.draw, n) for n in _shards(self.draw, adapters, workers)]
        self.queue: list[tuple[float, int, int]] = []

    def _refresh(self, costs: Costs, adapters: int, pages: int) -> float:
        """Return the seconds in which one process refreshes the catalogue."""
        changed = round(self.world.changed * adapters)
        cpu = costs.start + costs.list * adapters + changed * (costs.header + costs.compare)
        self.busy += cpu
        self.store.requests += 2 * changed
        return cpu + (pages + 2 * changed / self.world.connections) * self.world.latency

    def run(self) -> Outcome:
        for i, worker in enumerate(self.team):
            self._start(worker, self.begin)
            for slot in range(self.world.connections):
                heapq.heappush(self.queue, (worker.ready, i, slot))
        while self.queue:
            time, i, slot = heapq.heappop(self.queue)
            worker = self.team[i]
            if worker.left and time < worker.ready:  # it has started again meanwhile
                heapq.heappush(self.queue, (worker.ready, i, slot))
            elif worker.left and time > worker.death:
                self._restart(worker)
                heapq.heappush(self.queue, (worker.ready, i, slot))
            elif worker.left:
                heapq.heappush(self.queue, (self._adapter(worker, time), i, slot))
        last = max((worker.free for worker in self.team), default=self.begin)
        return Outcome(last, self.busy, self.repeated, self.done, self.lost, self.store.requests)

    def _start(self, worker: _Worker, time: float) -> None:
        self.busy += self.start_cpu * worker.speed
        worker.free = worker.ready = time + self.start_cpu * worker.speed + self.start_wait

    def _restart(self, worker: _Worker) -> None:
        """Start again, and repeat what is not in a file of scores."""
        worker.left += worker.unwritten + worker.unwritten_lost
        self.done -= worker.unwritten
        self.lost -= worker.unwritten_lost
        self.repeated += worker.unwritten_cpu + self.start_cpu * worker.speed
        self._written(worker)
        self._start(worker, max(worker.free, worker.death))
        worker.death = worker.ready + _interval(self.draw, self.world.deaths_per_hour)

    def _adapter(self, worker: _Worker, time: float) -> float:
        """Read and score an adapter; returns when the connection is free for another."""
        worker.left -= 1
        reached = True
        for _ in range(self.requests_each):
            if reached:
                time, reached = _request(self.store, self.world, self.draw, time)
        if not reached:
            self.lost += 1
            worker.unwritten_lost += 1
            self._write(worker)
            return time
        own = self.each * worker.speed
        worker.free = max(worker.free, time) + own
        self.busy += own
        self.done += 1
        worker.unwritten += 1
        worker.unwritten_cpu += own
        self._write(worker)
        # no more is read ahead than there are connections
        return max(time, worker.free - self.world.connections * own)

    def _write(self, worker: _Worker) -> None:
        """Write a file of scores if there are enough, or if these are the last."""
        if worker.unwritten + worker.unwritten_lost >= self.world.part or not worker.left:
            self._written(worker)

    @staticmethod
    def _written(worker: _Worker) -> None:
        worker.unwritten, worker.unwritten_lost, worker.unwritten_cpu = 0, 0, 0.0


def _worker(world: World, draw: random.Random, share: int) -> _Worker:
    speed = world.slowness if draw.random() < world.slow_workers else 1.0
    return _Worker(speed, share, _interval(draw, world.deaths_per_hour))


def _request(store: _Store, world: World, draw: random.Random, time: float) -> tuple[float, bool]:
    """Return when a request is answered, and whether any of its tries was."""
    for attempt in range(world.attempts):
        time = store.answered(time) + world.latency
        if draw.random() >= world.failed_requests:
            return time, True
        time += world.pause * 2**attempt
    return time, False


def _interval(draw: random.Random, per_hour: float) -> float:
    return draw.expovariate(per_hour / 3600) if per_hour else math.inf


def _shards(draw: random.Random, items: int, workers: int) -> list[int]:
    """Sizes of shards by hash: binomial, one after another, in a normal approximation that adds up."""
    sizes = []
    for i in range(workers, 1, -1):
        mean = items / i
        size = round(draw.gauss(mean, math.sqrt(mean * (1 - 1 / i))))
        sizes.append(min(items, max(0, size)))
        items -= sizes[-1]
    return [*sizes, items]


def simulate_grid(
    durations: Sequence[float], world: World, cells: int, workers: int, *, claims: bool, seed: int = 0
) -> Outcome:
    """Return the outcome of a grid: each worker has a shard of its own, or they claim one cell at a time.

    A worker that dies with a shard starts again; a cell that it had claimed is taken over after the lease.
    """
    return _Grid(durations, world, cells, workers, claims, seed).run()


class _Grid:
    def __init__(
        self, durations: Sequence[float], world: World, cells: int, workers: int, claims: bool, seed: int
    ) -> None:
        self.durations, self.world, self.claims = durations, world, claims
        self.draw = random.Random(f"{seed} {cells} {workers} {claims} grid")
        self.team = [_worker(world, self.draw, n) for n in _shards(self.draw, cells, workers)]
        self.common = cells
        self.late: list[float] = []
        """When cells of dead workers are free again."""
        self.busy = self.repeated = self.last = 0.0
        self.done = 0

    def run(self) -> Outcome:
        queue = [(0.0, i) for i in range(len(self.team))]
        while queue:
            time, i = heapq.heappop(queue)
            wait = self._take(self.team[i], time)
            if wait is not None:
                heapq.heappush(queue, (self._cell(self.team[i], time) if wait <= time else wait, i))
        return Outcome(self.last, self.busy, self.repeated, self.done, 0, 0)

    def _take(self, worker: _Worker, time: float) -> float | None:
        """Take a cell; returns the time from which there is one, or None if there will be none."""
        if not self.claims:
            worker.left -= 1
            return time if worker.left >= 0 else None
        if self.late and self.late[0] <= time:
            return heapq.heappop(self.late)
        if self.common:
            self.common -= 1
            return time
        return self.late[0] if self.late else None

    def _cell(self, worker: _Worker, time: float) -> float:
        """Run a cell; returns when the worker is free."""
        while worker.death < time:  # it died without a cell
            worker.death += _interval(self.draw, self.world.deaths_per_hour)
        own = self.draw.choice(self.durations) * worker.speed
        if time + own <= worker.death:
            self.busy += own
            self.done += 1
            self.last = max(self.last, time + own)
            return time + own
        end = worker.death
        self.repeated += end - time
        self.busy += end - time
        if self.claims:
            heapq.heappush(self.late, end + self.world.lease)
        else:
            worker.left += 1
        worker.death = end + _interval(self.draw, self.world.deaths_per_hour)
        return end


# the record


def knee(rows: Sequence[dict[str, Any]], gain: float = 0.5) -> int:
    """Return the number of workers from which more of them add less than half of what they should.

    ``rows`` are of increasing numbers of workers. From one to the next, work should take as much less time as
    there are more workers; the knee is the last number before the speed-up falls below ``gain`` of that.
    """
    for before, after in itertools.pairwise(rows):
        speedup = before["seconds"] / after["seconds"]
        if speedup < 1 + gain * (after["workers"] / before["workers"] - 1):
            return int(before["workers"])
    return int(rows[-1]["workers"])


def selections(costs: Costs, world: World) -> Iterator[dict[str, Any]]:
    for adapters in ADAPTERS:
        for catalogue in (False, True):
            for workers in WORKERS:
                found = simulate_selection(costs, world, adapters, workers, catalogue=catalogue)
                facts = {"adapters": adapters, "workers": workers, "catalogue": catalogue}
                yield {**facts, **asdict(found)}


def grids(durations: Sequence[float], world: World) -> Iterator[dict[str, Any]]:
    for cells in ADAPTERS[:2]:
        for claims in (False, True):
            for workers in WORKERS:
                found = simulate_grid(durations, world, cells, workers, claims=claims)
                yield {"cells": cells, "workers": workers, "claims": claims, **asdict(found)}


def cell_seconds() -> list[float]:
    """Return the seconds of recorded cells."""
    from aniso.record_files import RecordStore

    return [record.seconds for record in RecordStore(CELLS).finished().values() if record.seconds]


def check(record: dict[str, Any], costs: Costs) -> dict[str, float]:
    """Compare the model of one worker without failures with the largest measured case."""
    row = max(record["rows"], key=lambda one: (one["adapters"], one["latency"]))
    usable = round(row["adapters"] * (1 - record["unfit_share"]))
    world = World(row["latency"], record["connections"], failed_requests=0, slow_workers=0, deaths_per_hour=0)
    costs = replace(costs, start=0.0, list=0.0, load=0.0)
    found = simulate_selection(costs, replace(world, changed=0.0), usable, 1, catalogue=True)
    stage = row["stages"]["scores"]
    return {
        "adapters": usable,
        "model_seconds": found.seconds,
        "measured_seconds": stage["seconds"],
        "measured_cpu_seconds": stage["cpu_seconds"],
    }


# the page


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _heading(what: str) -> list[str]:
    columns = " | ".join(f"{workers:,} workers" for workers in WORKERS)
    return [f"| {what} | | {columns} | knee |", "|---" * (len(WORKERS) + 3) + "|"]


def selection_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of selections in Markdown."""
    lines = _heading("adapters")
    for adapters in ADAPTERS:
        for catalogue, words in ((False, "every worker lists"), (True, "with a catalogue")):
            own = [r for r in rows if r["adapters"] == adapters and r["catalogue"] == catalogue]
            times = " | ".join(_time(row["seconds"]) for row in own)
            lines.append(f"| {adapters:,} | {words} | {times} | {knee(own):,} |")
    return "\n".join(lines)


def grid_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of grids in Markdown."""
    lines = _heading("cells")
    for cells in ADAPTERS[:2]:
        for claims, words in ((False, "`--shard`"), (True, "`--claim`")):
            own = [r for r in rows if r["cells"] == cells and r["claims"] == claims]
            times = " | ".join(_time(row["seconds"]) for row in own)
            lines.append(f"| {cells:,} | {words} | {times} | {knee(own):,} |")
    return "\n".join(lines)


def _between(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}{marks[2]}"


def page(text: str, record: dict[str, Any]) -> str:
    """Return the page with the tables of a record."""
    tables = {"selection": selection_table(record["selections"]), "grid": grid_table(record["grids"])}
    for name, table in tables.items():
        mark = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text = re.sub(mark, partial(_between, table), text, flags=re.DOTALL)
    return text


def main() -> None:
    measured = json.loads(COSTS.read_text())
    costs = Costs.of_record(measured)
    world = World(max(row["latency"] for row in measured["rows"]), measured["connections"])
    durations = cell_seconds()
    record: dict[str, Any] = {
        "what": "a simulation, not a measurement",
        "costs": asdict(costs),
        "world": asdict(world),
        "check": check(measured, costs),
        "mean_cell_seconds": sum(durations) / len(durations),
        "selections": list(selections(costs, world)),
        "grids": list(grids(durations, world)),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), record))
    print(selection_table(record["selections"]), "", grid_table(record["grids"]), record["check"], sep="\n")


if __name__ == "__main__":
    main()
