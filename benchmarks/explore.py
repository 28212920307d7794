"""How long the mixing desk takes to answer when a slider moves, against composing and predicting everything.

    python benchmarks/explore.py --out benchmarks/results/explore.json
    python benchmarks/explore.py --case MiniLM --base DIR --bank DIR --task DIR --out …/explore.json

The first command takes ``mini`` and drawn images; the second adds a case to the file. Requests go through the
server, as those of the page do. A move changes one coefficient, or all coefficients of one vector, and every
move is to new numbers. The first answer has the predictions of six items and the accuracy on a part of the
sample; the whole sample may take several answers. Moving all coefficients composes every block again from
vectors in memory; a full recompute also reads the bank again, as a new process would, and predicts items and
sample in one answer. Moves of all kinds take turns. The seconds of the CPU
are those of this process, and hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GOAL = 300  # milliseconds to the first answer
Table = list[list[float | None]]


def draw_task(root: Path, classes: int = 10, each: int = 160) -> Path:
    """Write a task of smooth random images, a folder for each class."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in range(classes):
        folder = root / f"class {label}"
        folder.mkdir(parents=True)
        for i in range(each):
            coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            coarse.resize((96, 96), Image.Resampling.BICUBIC).save(folder / f"{i}.png")
    return root


class Slider:
    """Moves coefficients of a desk and asks its server, as the page does."""

    def __init__(self, server: Any, values: Table) -> None:
        self.server = server
        self.values = [list(row) for row in values]
        self.random = random.Random(0)
        self.cells = [(r, c) for r, row in enumerate(values) for c, x in enumerate(row) if x is not None]

    def move_cell(self) -> None:
        row, column = self.random.choice(self.cells)
        self.values[row][column] = round(self.random.uniform(-0.3, 0.3), 6)

    def move_vector(self) -> None:
        row = self.random.randrange(len(self.values))
        value = round(self.random.uniform(-0.3, 0.3), 6)
        self.values[row] = [None if x is None else value for x in self.values[row]]

    def move_all(self) -> None:
        for row in range(len(self.values)):
            value = round(self.random.uniform(-0.1, 0.1), 6)
            self.values[row] = [None if x is None else value for x in self.values[row]]

    def ask(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=600)
        body = json.dumps({"values": self.values})
        connection.request("POST", "/measure", body, {"X-Aniso-Token": self.server.token})
        found = json.loads(connection.getresponse().read())
        connection.close()
        return dict(found)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of the clock and of this process."""
    begun, spent = time.perf_counter(), time.process_time()
    call()
    return 1000 * (time.perf_counter() - begun), 1000 * (time.process_time() - spent)


def summary(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, spent = (sorted(column) for column in zip(*times, strict=True))
    late = min(len(wall) - 1, round(0.95 * (len(wall) - 1)))
    return {
        "median": round(statistics.median(wall), 1),
        "95th percentile": round(wall[late], 1),
        "CPU, median": round(statistics.median(spent), 1),
        "CPU, 95th percentile": round(spent[late], 1),
    }


def measure(options: Any, rounds: int, recomputes: int) -> dict[str, Any]:
    """Return milliseconds of all kinds of moves on one desk."""
    from aniso.explore import DeskServer, open_desk

    desk = open_desk(options)
    assert desk.predictor is not None
    composition = desk.predictor.composition
    kinds: dict[str, list[tuple[float, float]]] = {}
    with DeskServer(desk).running() as server:
        while not desk.geometry()["ready"]:
            time.sleep(0.1)
        slider = Slider(server, desk.preset("mean"))  # type: ignore[arg-type]
        slider.ask()

        def whole_sample() -> None:
            while not slider.ask()["complete"]:
                pass

        def full() -> None:
            composition.release()
            desk.measure(slider.values, 3600.0)

        def note(name: str, call: Callable[[], object]) -> None:
            kinds.setdefault(name, []).append(timed(call))

        whole_sample()
        for number in range(rounds):
            for kind, move in (("one coefficient", slider.move_cell), ("one vector", slider.move_vector)):
                move()
                note(f"{kind}, first answer", slider.ask)
                move()
                note(f"{kind}, whole sample", whole_sample)
            slider.move_all()
            note("all coefficients, first answer", slider.ask)
            slider.move_all()
            note("all coefficients, whole sample", whole_sample)
            if number < recomputes:
                slider.move_cell()
                note("full recompute", full)
    sample = desk.predictor.measure(desk.table.read(slider.values), 3600.0).total
    return {
        "table": f"{len(desk.table.vectors)} x {len(desk.table.blocks)}",
        "items": len(desk.item_list()),
        "sample": sample,
        "milliseconds": {name: summary(times) for name, times in kinds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="mini", help="name of the case in the results")
    parser.add_argument("--bank", default="mini")
    parser.add_argument("--base", default="mini")
    parser.add_argument("--task", help="default: drawn images")
    parser.add_argument("--sample", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recomputes", type=int, default=5, help="rounds with a full recompute")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from aniso.explore import DeskOptions

    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as place:
        task = given.task or str(draw_task(Path(place) / "drawn"))
        options = DeskOptions(given.bank, base=given.base, task=task, sample=given.sample)
        case = measure(options, given.rounds, given.recomputes)
    case |= {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "load before": load}
    known = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    found = {**known, "goal": f"first answer within {GOAL} ms", given.case: case}
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
