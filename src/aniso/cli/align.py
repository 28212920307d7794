"""``aniso align``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import checks, options, show
from aniso.errors import UsageError


def align(
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE_TOWER", help="timm:NAME, or a directory of an image classifier or dual encoder."
        ),
    ],
    text: Annotated[
        Path,
        typer.Argument(metavar="TEXT_TOWER", help="A directory of a sentence encoder, or of a CLIP."),
    ],
    pairs: Annotated[
        list[Path],
        typer.Option(
            "--pairs",
            help="Images with captions: a table, or a classification data set; repeatable, and what is "
            "given twice counts twice.",
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory of the dual encoder.")],
    image_weights: Annotated[
        str | None, typer.Option("--image-weights", help="Weights of the image tower, if not its own.")
    ] = None,
    size: Annotated[int, typer.Option(help="Pixels of a side of the images.", min=16, max=4096)] = 224,
    projection: Annotated[
        bool, typer.Option("--projection/--no-projection", help="Project image features to text features.")
    ] = True,
    epochs: Annotated[int, typer.Option(help="Passes over the pairs.", min=1)] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate.", min=0)] = 5e-4,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Pairs per step.", min=2)] = 128,
    seed: Annotated[int, typer.Option(help="Seeds batches and augmentation.")] = 0,
    cut_captions: Annotated[
        bool, typer.Option("--cut-captions", help="Use the first words of captions that are too long.")
    ] = False,
    workers: options.Workers = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run: same result, bit for bit.")
    ] = False,
    overwrite: options.Overwrite = False,
    json: show.Json = False,
) -> None:
    """Train an image tower to agree with a frozen text tower: a CLIP of two models, from captions.

    Checkpoints are written to OUT.training after every epoch.
    """
    for path in (text, *pairs):
        checks.existing_file(path)
    if out.exists() and not overwrite:
        raise UsageError("OUT-EXISTS", f"'{out}' exists", fix="add --overwrite to replace it")
    from dataclasses import replace

    from aniso.learn.align import RECIPE, AlignOptions, align_towers
    from aniso.records import EpochRow

    def epoch_done(row: EpochRow) -> None:
        if row.loss is not None and not json:
            show.line(f"epoch {row.epoch}: loss {row.loss:.3f}")

    done = align_towers(
        image,
        text,
        pairs,
        out,
        image_weights=image_weights,
        size=size,
        project=projection,
        options=AlignOptions(
            replace(RECIPE, epochs=epochs, lr=lr, batch_size=batch_size),
            seed=seed,
            directory=out.with_name(f"{out.name}.training"),
            resume=resume,
            workers=workers,
            cut_captions=cut_captions,
            overwrite=overwrite,
            epoch_done=epoch_done,
        ),
    )
    if json:
        show.as_json({"out": str(out), "losses": list(done.losses), "logit_scale": done.model.logit_scale})
        return
    show.line(f"wrote {out}: logit scale {done.model.logit_scale:.1f}; checkpoints are in {out}.training")
