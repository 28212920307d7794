"""Check that a change of the code changes no number: run small cells of every setting, compare two runs.

    python scripts/same_numbers.py run before.json        # with the code as it was
    python scripts/same_numbers.py run after.json         # with the code as it is
    python scripts/same_numbers.py compare before.json after.json

Every cell is a command on a tiny model, a bank and images of two colours, all made from fixed seeds. What is
kept of a cell are hashes of the values that it learned and the images that it got right, bit for bit. The two
runs have to be made on one machine with one number of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QUICK = ("--epochs", "2", "--batch-size", "3", "--min-steps-per-epoch", "2")
SHORT = ("--epochs", "2", "--batch-size", "4")
WORDS = [(noun, word) for noun in ("cat", "dog", "sun", "sea") for word in ("red", "old")]


def few_shot_cells() -> Iterator[tuple[str, ...]]:
    """Options beside model, bank and task."""
    for partition in ("blocks", "whole", "rows", "columns", "random:3", "blocks@weight"):
        yield ("--partition", partition)
    yield ("--seed", "1")
    yield ("--keep", "best")
    yield ("--linearised",)
    yield ("--optimiser", "sgd", "--lr-schedule", "constant", "--lr", "0.01")
    yield ("--micro-batch", "2")
    for head in ("tip", "lpp", "linear"):
        yield ("--head", head)
        yield ("--head", head, "--method", "none")
    yield ("--head", "tip", "--joint")
    for rule in ("random", "gradient", "blockwise-gradient", "pursuit"):
        yield ("--select", rule, "--budget", "1")
    for method in ("search", "weights", "vector", "none"):
        yield ("--method", method)
    yield ("--method", "gradient-free", "--evaluations", "12")
    yield ("--method", "weights", "--lora", "2")


def cells(data: Path) -> Iterator[tuple[str, ...]]:
    """Every cell as the words of a command, without model, bank and output."""
    photos, cars, dtd = str(data / "photos"), str(data / "cars"), str(data / "dtd")
    for more in few_shot_cells():
        yield ("fit", "few-shot", "--task", photos, "--shots", "3", *_if_trained(QUICK, more), *more)
    for more in ((), ("--partition", "random:2"), ("--method", "weights")):
        yield ("fit", "peft", "--task", cars, "--fraction", "0.5", *SHORT, *more)
    for objective in ("fixmatch", "sar", "entropy", "contrastive"):
        yield ("fit", "test-time", "--task", cars, "--objective", objective, *SHORT)
    yield ("fit", "test-time", "--task", cars, "--method", "layernorm", *SHORT)
    yield ("fit", "test-time", "--task", cars, "--online", *SHORT)
    for method in ("coefficients", "search", "weights"):
        yield (
            "fit",
            "addition",
            "--task",
            cars,
            "--task",
            dtd,
            "--method",
            method,
            *_if_trained(SHORT, (method,)),
        )
    for method in ("coefficients", "search"):
        yield (
            "fit",
            "negation",
            "--target",
            cars,
            "--control",
            dtd,
            "--method",
            method,
            *_if_trained(SHORT, (method,)),
        )
    for more in ((), ("--lora", "2"), ("--linearised",)):
        yield ("finetune", "--task", cars, *SHORT, *more)


def _if_trained(options: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """The optimiser's options, but for methods that have none."""
    return () if {"none", "vector", "search", "gradient-free"} & {*more} else options


def run(out: Path) -> None:
    """Run every cell in this process and write what came out."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import torch

    torch.set_num_threads(1)
    import runs

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["ANISO_CACHE"] = f"{temporary}/cache"
        shelf = runs.shelf(Path(temporary) / "shelf")
        for number, words in enumerate(cells(shelf.data)):
            name = " ".join(words).replace(str(shelf.data), "DATA")
            found[name] = outcome(shelf, words, Path(temporary) / f"run-{number}")
            print(f"{number + 1}: {name}: {json.dumps(found[name])[:100]}", flush=True)
        for name, one in texts(Path(temporary) / "texts").items():
            found[name] = one
            print(f"{name}: {json.dumps(one)[:100]}", flush=True)
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def texts(root: Path) -> dict[str, Any]:
    """Language models: two adapters trained on texts, then composed."""
    import language

    language.save("gpt2", root / "base", width=48)
    lines = [{"prompt": f"the {noun} is", "completion": f" {word}"} for noun, word in WORDS]
    language.write_lines(root / "one.jsonl", lines[:4])
    language.write_lines(root / "two.jsonl", lines[4:])
    given = ("fit", "lm", "--model", str(root / "base"), "--length", "32")
    one, two = (("--train", str(root / f"{name}.jsonl")) for name in ("one", "two"))
    found = {}
    for name, train in (("one", one), ("two", two)):
        found[f"lm, LoRA of {name}"] = kept(
            (*given, *SHORT, *train, "--method", "weights", "--lora", "2"), root / name
        )
    adapters = [f"{name}={root / name / 'adapter'}" for name in ("one", "two")]
    built = ("bank", "build", "--base", str(root / "base"), *adapters, "-o", str(root / "bank"), "--json")
    assert command(built)[0] == 0
    composed = (*given, *one, "--test", str(root / "two.jsonl"), "--bank", str(root / "bank"))
    for more in ((), ("--partition", "whole"), ("--factors",), ("--method", "none")):
        found[f"lm {' '.join(more)}"] = kept(
            (*composed, *_if_trained(SHORT, more), *more), root / f"composed {' '.join(more)}"
        )
    return found


def outcome(shelf: Any, words: tuple[str, ...], directory: Path) -> dict[str, Any]:
    """Run one cell about images."""
    given = [*words, "--model", str(shelf.model)]
    if words[0] == "fit" and "layernorm" not in words:
        given += ["--bank", str(shelf.bank)]
    return kept(given, directory)


def kept(words: Sequence[str], directory: Path) -> dict[str, Any]:
    """Run a cell; hashes of the tensors it wrote, and its scores."""
    code, text = command([*words, "-o", str(directory), "--json"])
    if code:
        return {"exit": code}
    return {"tensors": tensors(directory), "metrics": _plain(json.loads(text)["metrics"])}


def command(words: Sequence[str]) -> tuple[int, str]:
    """The exit code and the output of a command in this process."""
    from aniso.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(list(words))
    return code, text.getvalue()


def tensors(directory: Path) -> dict[str, str]:
    """A hash of every tensor below a directory; metadata, which may be worded otherwise, does not count."""
    from aniso.weights import open_weights

    out = {}
    for path in sorted(directory.rglob("*.safetensors")):
        source = open_weights(path)
        for name in source.tensors:
            values = source.read(name).contiguous()
            digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.numpy().tobytes())
            out[f"{path.relative_to(directory)} {name}"] = digest.hexdigest()[:16]
    return out


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    words = ("accuracy", "zero_shot", "online", "perplexity")
    return {key: value for key, value in metrics.items() if key in words}


def compare(before: Path, after: Path) -> int:
    """Print what differs; the number of cells that do."""
    one, other = json.loads(before.read_text()), json.loads(after.read_text())
    different = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    for name in different:
        print(f"different: {name}\n  {one.get(name)}\n  {other.get(name)}")
    failed = [name for name, found in one.items() if "exit" in found]
    for name in failed:
        print(f"failed before: {name}")
    print(f"{len(one)} cells, {len(different)} different, {len(failed)} failed")
    return len(different)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("out", type=Path)
    both = commands.add_parser("compare")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options.out)
    else:
        raise SystemExit(min(1, compare(options.before, options.after)))


if __name__ == "__main__":
    main()
