"""The commands of the tour, in order."""

from __future__ import annotations

from dataclasses import dataclass

# A small model learns fast, and everything has to be done in three minutes.
_FEW = (
    "--view",
    "train",
    "--epochs",
    "5",
    "--lr",
    "0.03",
    "--batch-size",
    "32",
    "--min-steps-per-epoch",
    "12",
)
_TUNE = ("--lr", "0.0005", "--batch-size", "32", "--no-compare")
_STEPS = ("--epochs", "4", "--lr", "0.1", "--warmup-steps", "0")
_JOINT = (*_STEPS, "--batch-size", "96", "--min-steps-per-epoch", "10")
# a look every two steps: 16 to choose from, where the search has 21 scales
_AWAY = (*_STEPS, "--batch-size", "64", "--min-steps-per-epoch", "8", "--validate-every", "2")
_EPOCHS = {"digits": "4", "patterns": "3", "colours": "1"}
_ALL = tuple(word for name in _EPOCHS for word in ("--task", f"./{name}"))


@dataclass(frozen=True)
class Step:
    """One command of the tour, and its title."""

    title: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return "aniso " + " ".join(f"'{word}'" if " " in word else word for word in self.command)


def steps() -> list[Step]:
    """Return the commands in order; they run in the directory of the tour, with tasks in ``data``."""
    on = ("--model", "mini", "--data", "data")
    away = ("--target", "./digits", "--control", "./colours")
    return [
        Step(
            "Few-shot: scikit-learn's digits from four images of each class; no vector was trained on them",
            ("fit", "few-shot", *on, "--bank", "mini", "--task", "./digits", "--shots", "4", *_FEW,
             "-o", "few-shot"),
        ),
        *(
            Step(
                f"Fine-tune a task vector: {name}",
                ("finetune", *on, "--task", f"./{name}", "--epochs", epochs, *_TUNE, "-o", f"tuned-{name}"),
            )
            for name, epochs in _EPOCHS.items()
        ),
        Step(
            "Build a bank of the three vectors",
            ("bank", "build", "--base", "mini", *(f"{n}=tuned-{n}/weights.safetensors" for n in _EPOCHS),
             "-o", "bank"),
        ),
        Step(
            "Addition: one scale for all vectors, searched",
            ("search", "addition", *on, "--bank", "bank", *_ALL, "-o", "addition-search"),
        ),
        Step(
            "Addition: a coefficient for every vector and block, learned",
            ("fit", "addition", *on, "--bank", "bank", *_ALL, *_JOINT, "-o", "addition"),
        ),
        Step(
            "Negation: forget digits, keep colours; one scale, searched",
            ("search", "negation", *on, "--bank", "bank", *away, "-o", "negation-search"),
        ),
        Step(
            "Negation: forget digits, keep colours; learned",
            ("fit", "negation", *on, "--bank", "bank", *away, *_AWAY, "-o", "negation"),
        ),
        Step(
            "Bake the model of three tasks as an ordinary checkpoint",
            ("bake", "addition/coefficients.safetensors", "--bank", "bank", "--base", "mini",
             "--to", "huggingface", "-o", "all-in-one"),
        ),
        Step(
            "Evaluate that checkpoint",
            ("eval", "all-in-one", *(word for name in _EPOCHS for word in ("--task", f"data/{name}"))),
        ),
    ]  # fmt: skip
