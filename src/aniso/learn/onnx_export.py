"""An image encoder with its classifier as one ONNX file: pixels in, logits out.

Heads normalise the features of a CLIP, so none of them is one linear layer behind the encoder of another
library; in ONNX the whole computation is in the file.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from aniso.errors import InputError, NumericalError, UsageError
from aniso.learn.heads import Classifier
from aniso.models import Encoder
from aniso.models.exported_files import processor_file
from aniso.models.transforms import Transforms
from aniso.weights.atomic import atomic_directory

MODEL, LABELS = "model.onnx", "labels.json"
INPUT, OUTPUT = "pixel_values", "logits"
_TOLERANCE = 1e-4  # of the largest logit; both libraries compute in float32
_BATCHES = (1, 3)


@final
class _Network(nn.Module):
    """Images, prepared as the encoder needs them, to logits."""

    def __init__(self, encoder: Encoder, classifier: Classifier) -> None:
        super().__init__()
        self.encoder = encoder
        self._classifier = classifier

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self._classifier.logits(self.encoder(pixel_values))


def save_onnx(
    encoder: Encoder,
    classifier: Classifier,
    directory: str | Path,
    *,
    also: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> float:
    """Write ``model.onnx``, ``labels.json`` and ``preprocessor_config.json``; return the largest error.

    The classifier is a head or class weights. Batches may have any size. The file is run with onnxruntime
    before anything is written, and compared with the encoder: ``also`` are more files for the directory.
    """
    if not isinstance(encoder.transforms, Transforms):
        raise InputError(
            "MODEL-NAME", f"'{encoder.name}' is no encoder of images", fix="--to sentence-transformers"
        )
    network = _Network(encoder, classifier).eval()
    size = encoder.transforms.pixels.size
    content = _exported(network, torch.zeros(2, 3, size, size))
    error = _checked(network, content, size)
    files = {
        MODEL: content,
        LABELS: (json.dumps(list(classifier.names), indent=1) + "\n").encode(),
        "preprocessor_config.json": processor_file(encoder.transforms.pixels),
        **(also or {}),
    }
    with atomic_directory(Path(directory), overwrite=overwrite) as place:
        for name, data in files.items():
            (place / name).write_bytes(data)
    return error


def require_onnx() -> Any:
    """Return onnxruntime; raises unless it and torch's exporter are installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as e:
        raise UsageError(
            "MODEL-LIBRARY",
            f"ONNX files need {e.name or 'onnx'}, which is not installed",
            fix="pip install 'aniso[onnx]'",
        ) from None
    return onnxruntime


@torch.no_grad()
def _exported(network: _Network, images: Tensor) -> bytes:
    require_onnx()
    batch = torch.export.Dim("batch")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the exporter reports its own deprecations
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network,
                (images,),
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes={INPUT: {0: batch}},
                dynamo=True,
                verbose=False,
            )
    finally:
        logging.disable(before)
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


@torch.no_grad()
def _checked(network: _Network, content: bytes, size: int) -> float:
    """Return the largest difference of logits on random images, relative to the largest logit."""
    session = require_onnx().InferenceSession(content, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    error = 0.0
    for count in _BATCHES:
        images = torch.randn(count, 3, size, size, generator=generator)
        expected = network(images)
        (found,) = session.run([OUTPUT], {INPUT: images.numpy()})
        difference = (torch.from_numpy(found) - expected).abs().max() / expected.abs().max().clamp(min=1)
        error = max(error, float(difference))
    if not error <= _TOLERANCE:
        raise NumericalError(
            "LEARN-NONFINITE",
            "onnxruntime computes other logits than the model",
            found=f"a relative difference of {error:.3g}",
            expected=f"at most {_TOLERANCE:g}",
            fix="pip install -U onnxruntime onnxscript, or --to huggingface",
        )
    return error
