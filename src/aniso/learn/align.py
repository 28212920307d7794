"""Align an image tower with a frozen text tower, from images with captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from aniso.data import Labelled
from aniso.data.captions import caption_split, read_captions
from aniso.errors import InputError, printable
from aniso.learn._training.trainable import Trainable
from aniso.learn.features import iterate_features
from aniso.learn.finetune import tuned_weights
from aniso.learn.fit import fit
from aniso.learn.objectives.image_text import ImageText, caption_features
from aniso.models import Encoder, load_model
from aniso.models.dual_encoder import (
    OURS,
    SCALE,
    dual_encoder_files,
    join_towers,
    save_directory,
    without_projection,
)
from aniso.models.image_tower import load_tower
from aniso.models.transforms import Transforms
from aniso.progress import ProgressCallback, progress_or_default
from aniso.records import EpochRow
from aniso.schedule import Schedule
from aniso.weights import Ref, TensorMap
from aniso.weights.atomic import require_free

RECIPE = Schedule(epochs=4, lr=5e-4, batch_size=128, weight_decay=0.05, warmup_steps=200)
RIDGE = 1e-2
"""The penalty of the first projection, relative to the mean variance of image features."""
MOST_FOR_RIDGE = 20_000
_SCALE = "logit_scale"
_WEIGHT, _BIAS = "visual_projection.weight", "visual_projection.bias"


@final
@dataclass(frozen=True)
class AlignOptions:
    """How to align: schedule, seed, checkpoints and progress."""

    schedule: Schedule = RECIPE
    seed: int = 0
    directory: Path | None = None
    """Where checkpoints are written, after every epoch and when the run is interrupted."""
    resume: bool = False
    """Continue from the newest checkpoint, bit for bit."""
    workers: int = 0
    cut_captions: bool = False
    """Allow captions that are longer than the text tower reads; their first words are used."""
    overwrite: bool = False
    progress: ProgressCallback | None = None
    epoch_done: Callable[[EpochRow], None] | None = None


@final
@dataclass(frozen=True)
class Aligned:
    """Result of ``align``: weights under the model's names, and the mean loss of every epoch."""

    weights: TensorMap
    losses: tuple[float, ...]
    model: Encoder


def align(encoder: Encoder, split: Labelled, options: AlignOptions | None = None) -> Aligned:
    """Train the image tower of a dual encoder, its projection and logit scale; the text tower is frozen.

    The projection begins as the ridge regression from the tower's features to those of the captions; then
    all weights are trained with CLIP's loss. Batch norms stay in evaluation mode.

    Args:
        split: images whose classes are captions, of ``aniso.data.captions.caption_split``.
    """
    options = options or AlignOptions()
    progress = progress_or_default(options.progress)
    weights = encoder.class_weights(split.classes, progress=progress)
    if weights.notes and not options.cut_captions:
        raise InputError(
            "DATA-CAPTION",
            "captions are longer than the text tower reads",
            found=printable(weights.notes[0]),
            fix="--cut-captions, to use their first words",
        )
    captions = caption_features(weights.weight)
    if _WEIGHT in encoder.state_dict():
        start_projection(encoder, split, captions, workers=options.workers, progress=progress)
    trainable = _trainable(encoder, options.schedule.lr)
    done = fit(
        trainable,
        ImageText(split, captions),
        options.schedule,
        seed=options.seed,
        directory=options.directory,
        resume=options.resume,
        workers=options.workers,
        progress=progress,
        epoch_done=options.epoch_done,
    )
    losses = tuple(row.loss for row in done.history if row.loss is not None)
    model = trainable.model
    assert isinstance(model, Encoder)
    with torch.no_grad():
        trainable.tensors[_SCALE].clamp_(max=math.log(SCALE))
    return Aligned(tuned_weights(encoder, trainable), losses, model)


def align_towers(
    image: str | Path,
    text: str | Path,
    pairs: Sequence[str | Path],
    out: str | Path,
    *,
    image_weights: Ref | None = None,
    size: int = 96,
    project: bool = True,
    options: AlignOptions | None = None,
) -> Aligned:
    """Make a dual encoder of an image tower and a text tower, and write its directory ``out``.

    Args:
        image: ``timm:NAME`` with ``image_weights``, or a directory of an image classifier.
        text: the directory of a sentence encoder or of a CLIP.
        pairs: what ``aniso.data.captions.read_captions`` reads.
        size: pixels of a side of the images.
    """
    options, out = options or AlignOptions(), Path(out)
    require_free(out, overwrite=options.overwrite, ours=OURS)
    split = caption_split([read_captions(path) for path in pairs])
    tower = load_tower(image, image_weights)
    encoder = join_towers(out.name, tower, load_model(text), size=size, project=project)
    assert isinstance(encoder.transforms, Transforms)
    files = dual_encoder_files(tower.config, encoder.transforms.pixels, Path(text).expanduser())
    done = align(encoder, split, options)
    state = {name: done.weights.read(name) for name in done.weights.tensors}
    save_directory(out, state, files, overwrite=options.overwrite)
    return done


def _trainable(encoder: Encoder, lr: float) -> Trainable:
    """Train the blocks of the image side and the logit scale, which has no weight decay."""
    made = Trainable.weights(encoder)
    scale = dict(made.model.named_parameters())[_SCALE].requires_grad_()
    identity = {**made.identity, "trained": "image tower and logit scale", "batch_norms": "evaluation mode"}
    return replace(made, tensors={**made.tensors, _SCALE: scale}, identity=identity, rates={_SCALE: lr})


@torch.no_grad()
def start_projection(
    encoder: Encoder,
    split: Labelled,
    captions: Tensor,
    *,
    workers: int = 0,
    progress: ProgressCallback | None = None,
) -> None:
    """Set the projection to the ridge regression from image features to the features of their captions."""
    state = encoder.state_dict()
    chosen = sorted(range(len(split)), key=lambda i: split.keys[i])[:MOST_FOR_RIDGE]
    images = split.take(chosen, "for the first projection")
    wanted = captions[torch.tensor(images.labels)].double()
    pieces: list[Tensor] = []
    for piece in iterate_features(without_projection(encoder), images, batch_size=128, workers=workers):
        pieces.append(piece.double())
        if progress:
            progress("features for the first projection", sum(map(len, pieces)), len(images))
    weight, bias = ridge(torch.cat(pieces), wanted)
    state[_WEIGHT].copy_(weight)
    if _BIAS in state:
        state[_BIAS].copy_(bias)


def ridge(features: Tensor, targets: Tensor, penalty: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Return weight and bias that minimise |X W^T + b - Y|^2 / N + penalty * v * |W|^2, with v = tr(cov) / d.

    The mean is not penalised: it goes into the bias.
    """
    mean, target = features.mean(0), targets.mean(0)
    centred = features - mean
    covariance = centred.T @ centred / len(features)
    size = covariance.shape[0]
    strength = penalty * covariance.diagonal().mean()
    both = centred.T @ (targets - target) / len(features)
    weight = torch.linalg.solve(covariance + strength * torch.eye(size, dtype=covariance.dtype), both).T
    return weight, target - weight @ mean
