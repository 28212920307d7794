"""Options of ``aniso fit`` and ``aniso search``: each is a key of a spec, or says how work is carried out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import show
from aniso.cli.options import DataRoot, Workers

# keys of a spec; None means that the setting's own value holds

Model = Annotated[str, typer.Option(help="The base: an open_clip name, a directory, a hub id, or mini.")]
Weights = Annotated[str | None, typer.Option(help="A tag, a file or a directory; openai, say.")]
BankName = Annotated[str | None, typer.Option("--bank", help="The bank: a directory, or mini.")]
Linearised = Annotated[
    bool | None, typer.Option("--linearised", help="Vectors and model are linearised ones.")
]
Method = Annotated[
    str | None,
    typer.Option(
        help="coefficients (learned, the default), gradient-free, search (one scale), weights (fine-tune "
        "all), vector (add the tasks' own), none (zero-shot)."
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(help="whole, blocks (the default), rows, columns, random:K; @weight for matrices only."),
]
Seed = Annotated[int | None, typer.Option(help="Draws shots, orders, views and random parts.", min=0)]
SplitSeed = Annotated[int | None, typer.Option(help="Draws the splits that a data set does not have.", min=0)]
Compare = Annotated[
    bool | None, typer.Option("--compare/--no-compare", help="Measure the base as it is, too.")
]
OnBadImage = Annotated[str | None, typer.Option(help="error, skip, or the number that may be skipped.")]
Keep = Annotated[str | None, typer.Option(help="last epoch, or best on the validation split: last or best.")]
View = Annotated[
    str | None,
    typer.Option(help="few_shot (crop and mirror), train (crop a little: for digits, say) or eval."),
]
LeaveOut = Annotated[
    list[str] | None,
    typer.Option("--leave-out", help="Vectors to leave out beside the task's own; may be repeated."),
]
TaskName = Annotated[str, typer.Option("--task", help="A known task, or a directory: a folder per class.")]
TaskNames = Annotated[
    list[str], typer.Option("--task", help="A task, named like its vector; may be repeated.")
]
Shots = Annotated[int | None, typer.Option(help="Pictures of each class; 16 if not said.", min=1)]
AllowFewer = Annotated[
    bool | None, typer.Option("--allow-fewer-shots", help="Take all pictures of a class that has fewer.")
]
HeadKind = Annotated[
    str | None,
    typer.Option("--head", help="Learn a classifier on the features, too: tip (Tip-Adapter), lpp, linear."),
]
Joint = Annotated[
    bool | None, typer.Option("--joint", help="Learn coefficients and head together; for --head tip.")
]
OutOfDomain = Annotated[
    list[str] | None,
    typer.Option("--out-of-domain", help="Measure on this task with (some of) the classes, too; repeat."),
]
ObjectiveName = Annotated[
    str | None, typer.Option("--objective", help="fixmatch (the default), sar, entropy or contrastive.")
]
Train = Annotated[str | None, typer.Option(help="What is learned: coefficients, or layernorm.")]
Online = Annotated[
    bool | None,
    typer.Option("--online", help="One pass over the pictures as they come, each answered before."),
]
OwnTask = Annotated[
    str | None, typer.Option("--task", help="Its test pictures are learned from, without their labels.")
]
PictureFolder = Annotated[
    str | None, typer.Option("--images", help="Or a folder of pictures that nobody has sorted.")
]
ClassNames = Annotated[
    list[str] | None,
    typer.Option("--classes", help="What they may show: a text file, a name a line, or names; repeat."),
]
Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", help="With {} for the class; may be repeated.")
]
Power = Annotated[float | None, typer.Option(help="FixMatch: flattens answers before they are compared.")]
Threshold = Annotated[float | None, typer.Option(help="FixMatch: how sure an answer has to be, at first.")]
TrustedPictures = Annotated[
    int | None, typer.Option("--trusted", help="FixMatch: trusted pictures of a class, at most; 100.")
]
SelectBy = Annotated[
    str | None,
    typer.Option(
        "--select", help="Choose vectors first: random, features, gradient, blockwise-gradient, pursuit."
    ),
]
BudgetSize = Annotated[
    str | None, typer.Option("--budget", help="Vectors, or cells per block, to choose; or bytes: 200MB.")
]
Evaluations = Annotated[
    int | None, typer.Option("--evaluations", help="Gradient-free: how many passes are tried; 500.")
]
Parallel = Annotated[
    int | None, typer.Option("--parallel", help="Gradient-free: tries that are made at once.")
]
TrainTexts = Annotated[
    str, typer.Option("--train", help="JSON lines of prompt and completion, or of text; or a plain text.")
]
ValTexts = Annotated[
    str | None, typer.Option("--val", help="Texts that the epoch is chosen by; the last if there are none.")
]
TestTexts = Annotated[str | None, typer.Option("--test", help="Texts that the result is measured on.")]
Length = Annotated[
    int | None, typer.Option(help="Tokens at once, at most; 512, or what the model can.", min=2)
]
TextMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="coefficients (learned, the default), gradient-free, weights (fine-tune all), none (the base).",
    ),
]
TextSelectBy = Annotated[
    str | None,
    typer.Option("--select", help="Choose vectors first: random, gradient, blockwise-gradient, pursuit."),
]
LeaveVectorsOut = Annotated[
    list[str] | None, typer.Option("--leave-out", help="Vectors to leave out; may be repeated.")
]
LanguageModel = Annotated[
    str, typer.Option("--model", help="The base: a directory of transformers, or a hub id.")
]
FractionOf = Annotated[float | None, typer.Option("--fraction", help="Share of the pictures; 1 is all.")]
Norm = Annotated[float | None, typer.Option(help="Weight of the coefficients' 1-norm in the objective.")]
Target = Annotated[str, typer.Option(help="The task to take out, named like its vector.")]
Control = Annotated[str, typer.Option(help="The task to keep.")]
Floor = Annotated[float | None, typer.Option(help="Share of its accuracy that the control keeps; 0.95.")]

Lora = Annotated[int | None, typer.Option("--lora", help="Train a LoRA of this rank.", min=1)]
LoraTargets = Annotated[
    str | None, typer.Option("--targets", help="The LoRA's layers: attention, mlp, both.")
]
LoraInPlace = Annotated[
    int | None, typer.Option("--lora", help="With --method weights: train a LoRA of this rank.", min=1)
]

FactorsApart = Annotated[
    bool | None,
    typer.Option("--factors", help="Of adapters: coefficients for A and for B; gives one adapter."),
]

# keys of its schedule

Epochs = Annotated[int | None, typer.Option(help="Passes over the data.")]
Lr = Annotated[float | None, typer.Option("--lr", help="Learning rate.")]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Pictures, or rows of text, in a step.")]
WeightDecay = Annotated[float | None, typer.Option(help="AdamW's.")]
Warmup = Annotated[int | None, typer.Option(help="Steps until the full learning rate.")]
Clip = Annotated[float | None, typer.Option(help="Largest norm of a gradient.")]
Shape = Annotated[str | None, typer.Option(help="Of the learning rate: cosine or constant.")]
LeastBatches = Annotated[int | None, typer.Option(help="Steps that an epoch has at least.")]
Precision = Annotated[str | None, typer.Option(help="Of the forward pass: fp32, bf16 or fp16.")]
MicroBatch = Annotated[int | None, typer.Option(help="So many at once, if a batch does not fit.")]
OptimiserName = Annotated[str | None, typer.Option("--optimiser", help="adamw or sgd.")]

SCHEDULE = {
    "epochs": "epochs",
    "lr": "lr",
    "batch": "batch_size",
    "weight_decay": "weight_decay",
    "warmup": "warmup_steps",
    "clip": "max_grad_norm",
    "shape": "lr_schedule",
    "least_batches": "min_steps_per_epoch",
    "precision": "precision",
    "micro_batch": "micro_batch",
    "optimiser": "optimiser",
}
"""Option -> field of ``Schedule``."""

# how it is carried out

Out = Annotated[
    Path | None, typer.Option("-o", "--out", help="Directory of the run: coefficients, record, states.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …; the graphics card if there is one.")]
Memory = Annotated[
    str | None, typer.Option(help="For task vectors, such as 8GiB; what does not fit is read as needed.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory.")]
AllowEnvChange = Annotated[
    bool, typer.Option("--allow-env-change", help="Go on although software, device or threads differ.")
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Write epochs for TensorBoard, into the run's directory.")
]
Plan = Annotated[bool, typer.Option("--plan", help="Say what would be read, trained and written, and stop.")]
PrintSpec = Annotated[bool, typer.Option("--print-spec", help="Print the spec that says the same, and stop.")]
Json = show.Json

HOW = (
    "out",
    "data",
    "workers",
    "device",
    "memory",
    "resume",
    "allow_env_change",
    "tensorboard",
    "plan",
    "print_spec",
    "json",
)

__all__ = ["DataRoot", "Workers"]
