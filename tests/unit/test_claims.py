"""Claims on cells: one worker each, taken over from workers that died, never from those that live."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from aniso.addresses import Shard
from aniso.experiments.claims import CLAIMS, Claims

CELL = hashlib.sha256(b"cell").hexdigest()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def worker(directory: Path, clock: Clock | None = None, lease: float = 60.0) -> Claims:
    """A worker without a heartbeat of its own; tests call ``beat``."""
    (directory / CLAIMS).mkdir(exist_ok=True)
    return Claims(directory, lease, clock or Clock())


def test_a_cell_has_one_worker_until_it_is_released(tmp_path):
    first, second = worker(tmp_path), worker(tmp_path)
    assert first.take(CELL) and first.take(CELL) and not second.take(CELL)
    second.release(CELL)  # not its own: nothing happens
    assert not second.take(CELL)
    first.release(CELL)
    assert second.take(CELL) and not first.take(CELL)


def test_a_claim_without_a_heartbeat_is_taken_over_after_a_lease(tmp_path):
    clock = Clock()
    first, second = worker(tmp_path), worker(tmp_path, clock)
    assert first.take(CELL) and not second.take(CELL)
    clock.now = 59.0
    assert not second.take(CELL)
    first.beat()
    clock.now = 61.0
    assert not second.take(CELL)  # it has changed: the lease begins again
    clock.now = 120.0
    assert not second.take(CELL)
    clock.now = 121.0
    assert second.take(CELL)
    assert first.lost == set()
    first.beat()
    assert first.lost == {CELL}
    first.release(CELL)  # the claim is another's now
    second.beat()
    assert second.lost == set() and not worker(tmp_path).take(CELL)


@pytest.mark.parametrize("hours", [-1, 1])
def test_clocks_of_other_machines_do_not_matter(tmp_path, hours):
    """Neither the clock of the claim's worker nor the times of files are looked at."""
    clock = Clock()
    clock.now = 1e6 + 3600 * hours
    first, second = worker(tmp_path, clock), worker(tmp_path)
    assert first.take(CELL)
    os.utime(tmp_path / CLAIMS / CELL, (time.time() + 3600 * hours,) * 2)
    assert not second.take(CELL) and not second.take(CELL)


def test_of_two_that_find_a_stale_claim_one_takes_it_over(tmp_path):
    clock = Clock()
    dead, first, second = worker(tmp_path), worker(tmp_path, clock), worker(tmp_path, clock)
    assert dead.take(CELL) and not first.take(CELL) and not second.take(CELL)
    clock.now = 60.0
    stale = (tmp_path / CLAIMS / CELL).read_text()
    assert first.take(CELL)
    assert not second._take_over(CELL, stale)  # as if it had looked before the first took it
    assert (tmp_path / CLAIMS / CELL).read_text().startswith(first.worker)
    first.beat()
    assert first.lost == set()
    assert [path.name for path in (tmp_path / CLAIMS).iterdir()] == [CELL]


def test_a_claim_that_was_moved_aside_is_made_again(tmp_path):
    first = worker(tmp_path)
    assert first.take(CELL)
    (tmp_path / CLAIMS / CELL).unlink()
    first.beat()
    assert first.lost == set() and not worker(tmp_path).take(CELL)


def test_a_context_beats_and_gives_up_what_it_holds(tmp_path):
    with Claims(tmp_path, lease=0.2) as first:
        assert first.take(CELL)
        begun = (tmp_path / CLAIMS / CELL).read_text()
        deadline = time.monotonic() + 30
        while (tmp_path / CLAIMS / CELL).read_text() == begun:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not (tmp_path / CLAIMS).exists()


def _work(directory: Path, cells: list[str], seed: int, dies: bool) -> None:
    """Record every cell that nobody else has; one that dies does so in the middle of a cell."""
    rng = random.Random(seed)
    left = list(cells)
    rng.shuffle(left)
    with Claims(directory, lease=1.0) as claims:
        while left:
            for cell in list(left):
                record = directory / f"{cell}.json"
                if record.exists():
                    left.remove(cell)
                elif claims.take(cell):
                    time.sleep(0.01)
                    if dies and rng.random() < 0.3:
                        os._exit(1)
                    fresh = directory / f"{cell}.{claims.worker}"
                    fresh.write_text(cell)
                    fresh.replace(record)
                    with (directory / "log").open("a") as log:
                        log.write(f"{cell}\n")
                    claims.release(cell)
                    left.remove(cell)
            time.sleep(0.02)


def test_four_processes_of_which_two_die_record_every_cell(tmp_path):
    cells = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(40)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_work, args=(tmp_path, cells, n, n < 2)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, 1, 0, 0]
    assert {path.stem for path in tmp_path.glob("*.json")} == set(cells)
    assert all(path.read_text() == path.stem for path in tmp_path.glob("*.json"))


def test_shards_part_the_cells():
    cells = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100)]
    for count in (1, 3, 8):
        shards = [[c for c in cells if Shard.parse(f"{n}/{count}").has(c)] for n in range(1, count + 1)]
        assert sorted(cell for part in shards for cell in part) == sorted(cells) and all(shards)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "-1/2", "1/0", ""])
def test_what_is_not_a_shard(refused, text):
    with refused("USAGE", 2, "2/8"):
        Shard.parse(text)
