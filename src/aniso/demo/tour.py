"""The commands of the tour, in order."""

from __future__ import annotations

from dataclasses import dataclass

# A small model learns fast, and everything has to be done in three minutes.
_FEW = ("--view", "train", "--epochs", "5", "--lr", "0.03", "--batch-size", "32", "--min-steps-per-epoch", "12")
_TUNE = ("--lr", "0.0005", "--batch-size", "32", "--no-compare")
_JOINT = ("--epochs", "4", "--lr", "0.1", "--batch-size", "96", "--min-steps-per-epoch", "10", "--warmup-steps", "0")
_AWAY = ("--epochs", "4", "--lr", "0.1", "--batch-size", "64", "--min-steps-per-epoch", "8", "--warmup-steps", "0")
_EPOCHS = {"digits": "4", "patterns": "3", "colours": "1"}
_ALL = tuple(word for name in _EPOCHS for word in ("--task", f"./{name}"))


@dataclass(frozen=True)
class Step:
    """What it shows, and the command."""

    title: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return "aniso " + " ".join(f"'{word}'" if " " in word else word for word in self.command)


def steps() -> list[Step]:
    """Directories are those of the tour; ``--data data`` is where its tasks lie."""
    on = ("--model", "mini", "--data", "data")
    away = ("--target", "./digits", "--control", "./colours")
    return [
        Step(
            "A new task from four pictures of each class: scikit-learn's digits, which no vector was made of",
            ("fit", "few-shot", *on, "--bank", "mini", "--task", "./digits", "--shots", "4", *_FEW,
             "-o", "few-shot"),
        ),
        *(
            Step(
                f"A task vector by fine-tuning: {name}",
                ("finetune", *on, "--task", f"./{name}", "--epochs", epochs, *_TUNE, "-o", f"tuned-{name}"),
            )
            for name, epochs in _EPOCHS.items()
        ),
        Step(
            "The three vectors as a bank",
            ("bank", "build", "--base", "mini", *(f"{n}=tuned-{n}/weights.safetensors" for n in _EPOCHS),
             "-o", "bank"),
        ),
        Step(
            "One model for three tasks: one scale for all vectors",
            ("search", "addition", *on, "--bank", "bank", *_ALL, "-o", "addition-search"),
        ),
        Step(
            "One model for three tasks: a coefficient for every vector and block",
            ("fit", "addition", *on, "--bank", "bank", *_ALL, *_JOINT, "-o", "addition"),
        ),
        Step(
            "Digits taken out while colours stay: one scale",
            ("search", "negation", *on, "--bank", "bank", *away, "-o", "negation-search"),
        ),
        Step(
            "Digits taken out while colours stay: learned",
            ("fit", "negation", *on, "--bank", "bank", *away, *_AWAY, "-o", "negation"),
        ),
        Step(
            "The model of three tasks as an ordinary checkpoint",
            ("bake", "addition/coefficients.safetensors", "--bank", "bank", "--base", "mini",
             "--to", "huggingface", "-o", "all-in-one"),
        ),
        Step(
            "That checkpoint, loaded like any other",
            ("eval", "all-in-one", *(word for name in _EPOCHS for word in ("--task", f"data/{name}"))),
        ),
    ]  # fmt: skip
