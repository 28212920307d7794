"""Kill every command that writes, again and again, and compare with what it does undisturbed.

    python scripts/crash_safety.py [--kills 100] [--seconds 3600] [--seed 0] [--only NAME]

Each command runs in a process group of its own, which gets SIGKILL at a random time: half of the kills are
spread evenly over its duration, half come while a temporary file is there. After every kill each output must
be the old one or the new one, never half; only the journal of ``select --gradients``, to which lines are
added, may end in a cut line, which the next reader removes. The command is then run again (or resumed), and
must end with the same bytes as undisturbed; of records, ``seconds`` and ``peak_memory_bytes`` are not
compared. After that no temporary file may be left, neither beside the outputs nor in the cache. Exits with 1
if one of these does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from PIL import Image

from aniso.cli import main as aniso
from aniso.models import mini_directory
from aniso.vectors import Bank
from aniso.weights import SafetensorsFile, open_weights, save_safetensors
from aniso.weights.files import RawFile
from aniso.weights.temporary import TEMPORARY

JOURNAL = "gradients.jsonl"
NOT_COMPARED = ("seconds", "peak_memory_bytes")
Snapshot = dict[str, str]
Words = Sequence[object]


# what commands work on


@dataclass(frozen=True)
class World:
    """Inputs, which nobody changes, and a place that is emptied before every trial."""

    root: Path

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def place(self) -> Path:
        return self.root / "place"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def make(self) -> None:
        self.inputs.mkdir(parents=True)
        drawn = random.Random(0)
        for part, count in (("train", 6), ("test", 3)):
            for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
                (self.inputs / "task" / part / name).mkdir(parents=True)
                for i in range(count):
                    shade = tuple(min(255, c + drawn.randrange(50)) for c in colour)
                    Image.new("RGB", (48, 48), shade).save(self.inputs / "task" / part / name / f"{i}.png")
        source = open_weights(mini_directory())
        for seed, name in enumerate(("a", "b", "c")):
            generator = torch.Generator().manual_seed(seed)
            tensors = {key: source.read(key) for key in source.tensors}
            for key, value in tensors.items():
                if key.startswith("vision_model.encoder") and value.is_floating_point():
                    noise = torch.randn(value.shape, generator=generator)
                    tensors[key] = value + 0.02 * value.float().std() * noise
            save_safetensors(self.inputs / f"{name}.safetensors", tensors)
        small = Bank.load("mini").only("mnist", "svhn")
        small.save(self.inputs / "bank", storage="int8")
        self.run("coefficients", "make", "mnist=0.3", "--bank", self.inputs / "bank", "-o", self.inputs / "c")
        lora = ("--bank", "mini-lora4", "-o", self.inputs / "c-lora")
        self.run("coefficients", "make", "mnist=0.3", *lora)
        (self.inputs / "records").mkdir()
        for seed in range(2):
            record = {
                "schema": 1, "status": "ok", "id": str(seed), "experiment": "few-shot", "label": "learned",
                "spec": {"setting": "few-shot", "model": "mini", "method": "coefficients", "task": "a",
                         "shots": 4, "seed": seed},
                "metrics": {"accuracy": {"a": {"correct": 1 + seed, "total": 2, "accuracy": (1 + seed) / 2}}},
                "inputs": {"model": "m", "data": {"a": "d"}},
            }  # fmt: skip
            (self.inputs / "records" / f"{seed}.json").write_text(json.dumps(record))
        (self.inputs / "spec.yaml").write_text(
            "schema: 1\nname: small\nbase:\n  setting: few-shot\n  model: mini\n"
            f"  bank: {self.inputs / 'bank'}\n  task: {self.inputs / 'task'}\n  shots: 2\n  compare: false\n"
            "  schedule: { epochs: 1, batch_size: 4, min_steps_per_epoch: 1 }\n"
            "variants:\n  - label: good\n    grid: { seed: [0, 1] }\n"
        )

    def empty(self) -> None:
        for directory in (self.place, self.cache):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()

    def run(self, *words: object) -> None:
        code = Started(self, words).wait()
        if code != 0:
            sys.exit(f"aniso {' '.join(map(str, words))} ended with {code}:\n{self.log.read_text()}")

    @property
    def log(self) -> Path:
        return self.root / "log"

    def temporaries(self) -> list[Path]:
        return [
            p for place in (self.place, self.cache) for p in place.rglob("*") if TEMPORARY.fullmatch(p.name)
        ]


class Started:
    """One command in a forked process and a process group of its own."""

    def __init__(self, world: World, words: Words) -> None:
        args = [str(word) for word in words]
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                fd = os.open(world.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for stream in (1, 2):
                    os.dup2(fd, stream)
                os.environ["ANISO_CACHE"] = str(world.cache)
                sys.argv = ["aniso", *args]  # model cards quote it
                code = aniso(args)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, until: Callable[[], bool] = lambda: False) -> int | None:
        """Its exit code, or None if something else happened first."""
        while self.poll() is None and not until():
            time.sleep(0.002)
        return self.code

    def kill(self) -> bool:
        """End the whole group; True if the command was still running."""
        alive = self.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        return alive


# commands


def snapshot(place: Path) -> Snapshot:
    """Hashes by path, of everything that has its final name."""
    found: Snapshot = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place)
        if path.is_file() and not any(TEMPORARY.fullmatch(part) for part in name.parts):
            found[str(name)] = hashlib.sha256(_compared(path)).hexdigest()
    return found


def _compared(path: Path) -> bytes:
    """Return the content of a file; that of records, one in a file or one per line, without times."""
    content = path.read_bytes()
    if path.suffix == ".jsonl":
        return b"\n".join(map(_without_times, content.splitlines()))
    return _without_times(content) if path.suffix == ".json" else content


def _without_times(content: bytes) -> bytes:
    with contextlib.suppress(ValueError):
        said = json.loads(content)
        if isinstance(said, dict) and "seconds" in said:
            return json.dumps({k: v for k, v in said.items() if k not in NOT_COMPARED}).encode()
    return content


def old_or_new(world: World, old: Snapshot, new: Snapshot) -> bool:
    return snapshot(world.place) in (old, new)


def whole_files(world: World, old: Snapshot, new: Snapshot) -> bool:
    """Of a run's directory: every file with its final name can be read to its end."""
    try:
        for path in world.place.rglob("*"):
            parts = path.relative_to(world.place).parts
            if path.is_dir() or any(TEMPORARY.fullmatch(part) for part in parts):
                continue
            if path.suffix == ".safetensors":
                source = SafetensorsFile(RawFile(path))  # also factors of an adapter, which are no model
                for name in source.tensors:
                    source.read(name)
            elif path.suffix in (".json", ".jsonl"):
                for text in _texts(path):
                    json.loads(text)
    except Exception as e:
        print(f"{path}: {e}")
        return False
    return True


def _texts(path: Path) -> list[str]:
    """The JSON texts in a file: one, or one a line."""
    text = path.read_text()
    if path.suffix == ".json":
        return [text]
    if path.name == JOURNAL:
        text = text[: text.rfind("\n") + 1]
    return text.splitlines()


def sound_bank(world: World, old: Snapshot, new: Snapshot) -> bool:
    """Of a bank changed in place: the manifest is the old or the new one, and what it names is whole."""
    manifest = "bank/manifest.json"
    Bank.load(world.place / "bank").check()
    return snapshot(world.place)[manifest] in (old[manifest], new[manifest])


@dataclass(frozen=True)
class Command:
    name: str
    words: Words
    before: tuple[Words, ...] = ()
    """Commands that make the old output."""
    resume: Words = ()
    """Added when it is run again."""
    copied: tuple[str, ...] = ()
    """Inputs that are changed in place."""
    sound: Callable[[World, Snapshot, Snapshot], bool] = old_or_new


def commands(world: World) -> Iterator[Command]:
    given, place = world.inputs, world.place
    base = ("--base", "mini")
    quick = ("--epochs", 2, "--batch-size", 4, "--min-steps-per-epoch", 1)
    task = ("--task", given / "task")
    few = ("fit", "few-shot", "--model", "mini", "--bank", given / "bank", *task, "--shots", 2, *quick)
    yield Command(
        "fit few-shot", (*few, "--no-compare", "-o", place / "run"), resume=("--resume",), sound=whole_files
    )
    tune = ("finetune", "--model", "mini", *task, *quick, "--no-compare", "-o", place / "run")
    yield Command("finetune", tune, resume=("--resume",), sound=whole_files)
    yield Command("finetune --lora", (*tune, "--lora", 2), resume=("--resume",), sound=whole_files)
    yield Command(
        "run", ("run", given / "spec.yaml", "-o", place / "records", "--jobs", 2), sound=whole_files
    )
    build = ("bank", "build", *base, "-o", place / "bank")
    files = [given / f"{name}.safetensors" for name in "abc"]
    yield Command("bank build", (*build, *files))
    yield Command("bank build --overwrite", (*build, *files, "--overwrite"), before=((*build, files[2]),))
    yield Command(
        "bank add", ("bank", "add", place / "bank", files[0], *base), copied=("bank",), sound=sound_bank
    )
    features = ("bank", "features", place / "bank", "--model", "mini", "--task", f"mnist={given / 'task'}")
    yield Command("bank features", features, copied=("bank",), sound=sound_bank)
    thin = ("bank", "quantise", given / "bank", "-o", place / "thin", "--overwrite", "--storage")
    yield Command("bank quantise", (*thin, "int4"), before=((*thin, "bf16"),))
    yield Command("vector make", ("vector", "make", *base, files[0], "-o", place / "deep" / "v.safetensors"))
    bake = ("bake", given / "c", "--bank", given / "bank", *base, "--overwrite")
    for kind in ("safetensors", "open_clip", "huggingface"):
        out = ("-o", place / ("m.safetensors" if kind == "safetensors" else "model"), "--to", kind)
        yield Command(f"bake --to {kind}", (*bake, *out), before=((*bake, *out, "--dtype", "bf16"),))
    peft = ("bake", given / "c-lora", "--bank", "mini-lora4", *base, "--to", "peft", "-o", place / "adapter")
    yield Command("bake --to peft", peft)
    make = ("coefficients", "make", "--bank", given / "bank", "-o", place / "c.safetensors", "--overwrite")
    yield Command("coefficients make", (*make, "mnist=1", "svhn=0.5"), before=((*make, "mnist=2"),))
    yield Command("convert", ("convert", files[0], "-o", place / "deep" / "t.safetensors"))
    yield Command(
        "convert --to open_clip", ("convert", mini_directory(), "--to", "open_clip", "-o", place / "other")
    )
    yield Command("report", ("report", given / "records", "-o", place / "report", "--overwrite"))
    choose = ("select", "--model", "mini", "--bank", given / "bank", *task, "--budget", 1, "--shots", 2)
    kept = ("--gradients", place / JOURNAL, "-o", place / "small", "--overwrite")
    yield Command("select", (*choose, *kept), sound=whole_files)


# trials


@dataclass
class Row:
    """What became of one command."""

    name: str
    kills: int = 0
    sound: int = 0
    resumed: int = 0
    identical: int = 0
    trials: int = 0
    orphans: int = 0
    left: int = 0
    failures: list[str] = field(default_factory=list)


class Trials:
    """One command: undisturbed first, then killed until it has been killed often enough."""

    def __init__(self, world: World, command: Command, chance: random.Random) -> None:
        self._world = world
        self._command = command
        self._chance = chance
        self.row = Row(command.name)
        self._begin()
        self._old = snapshot(world.place)
        begun = time.monotonic()
        world.run(*command.words)
        self._duration = time.monotonic() - begun
        self._new = snapshot(world.place)

    def _begin(self) -> None:
        self._world.empty()
        for name in self._command.copied:
            shutil.copytree(self._world.inputs / name, self._world.place / name)
        for words in self._command.before:
            self._world.run(*words)

    def run(self, kills: int, deadline: float) -> Row:
        row, world = self.row, self._world
        attempts = 0
        while row.kills < kills and attempts < 5 * kills and time.monotonic() < deadline:
            attempts += 1
            self._begin()
            hits = sum(self._killed() for _ in range(self._chance.choice((1, 1, 2))))
            if hits:
                row.kills += hits
                self._complete(hits)
        row.left += len(world.temporaries())
        return row

    def _killed(self) -> bool:
        """Start the command, kill it, and look at what is there; False if it was faster."""
        world, row = self._world, self.row
        if snapshot(world.place) == self._new:
            return False
        started = Started(world, (*self._command.words, *self._command.resume))
        begun, moment = time.monotonic(), self._chance.uniform(0, self._duration)
        if self._chance.random() < 0.5:
            started.wait(lambda: time.monotonic() - begun > moment)
        else:  # while something is being written
            before = set(world.temporaries())
            started.wait(lambda: bool(set(world.temporaries()) - before))
            time.sleep(self._chance.uniform(0, 0.02))
        hit = started.kill()
        row.orphans += len(world.temporaries())
        if hit and self._command.sound(world, self._old, self._new):
            row.sound += 1
        elif hit:
            row.failures.append(f"half an output after {time.monotonic() - begun:.2f} s")
        return hit

    def _complete(self, hits: int) -> None:
        world, row, command = self._world, self.row, self._command
        row.trials += 1
        if snapshot(world.place) != self._new or command.resume:
            code = Started(world, (*command.words, *command.resume)).wait()
            if code != 0:
                row.failures.append(f"ended with {code}: {world.log.read_text()[-500:]}")
                return
        row.resumed += 1
        now = snapshot(world.place)
        if now == self._new:
            row.identical += 1
        else:
            other = sorted(k for k in {*now, *self._new} if now.get(k) != self._new.get(k))
            row.failures.append(f"other files in the end: {', '.join(other)}")
        left = world.temporaries()
        row.left += len(left)
        if left:
            row.failures.append(f"left: {', '.join(p.name for p in left)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="of all commands together, at least")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no trial after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a command's name; may be repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    deadline = time.monotonic() + given.seconds
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="crash-safety-") as directory:
        world = World(Path(directory))
        world.make()
        chosen = [c for c in commands(world) if not given.only or c.name in given.only]
        rows: list[Row] = []
        for command in chosen:
            row = Trials(world, command, chance).run(-(-given.kills // len(chosen)), deadline)
            print(f"{row.name}: {row.kills} kills, {len(row.failures)} failures", file=sys.stderr, flush=True)
            rows.append(row)
    print_table(rows)
    return int(any(row.failures for row in rows))


def print_table(rows: Sequence[Row]) -> None:
    columns = ("command", "kills", "old or new after each", "run again", "identical in the end",
               "temporary files after kills", "in the end")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for row in rows:
        done = f"{row.resumed} of {row.trials} | {row.identical} of {row.trials}"
        print(
            f"| {row.name} | {row.kills} | {row.sound} of {row.kills} | {done} | {row.orphans} | {row.left} |"
        )
    print(
        f"\n{sum(row.kills for row in rows)} kills; of records, {' and '.join(NOT_COMPARED)} are not compared"
    )
    for row in rows:
        for failure in row.failures:
            print(f"FAILED {row.name}: {failure}")


if __name__ == "__main__":
    sys.exit(main())
