"""Weights from any file into a network that was built from a configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aniso.errors import AnisoError, InputError, UsageError, printable
from aniso.vectors.block_source import ACTIVATIONS, require_model
from aniso.vectors.naming import recognise
from aniso.weights import WeightSource


def fill(network: nn.Module, source: WeightSource, *, optional: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Copy every tensor by name; nothing may be missing or left over. Returns notes.

    Names that begin with one of ``optional`` may be missing: a fine-tuned image encoder often comes without
    the text tower, which then stays as it is.
    """
    require_model(source)
    wanted = dict(network.state_dict())
    names = _matched(source, wanted)
    missing = [name for name in wanted if name not in names and not name.startswith(optional or ("\0",))]
    extra = [key for key in source.tensors if key not in set(names.values()) and source.tensors[key].is_float]
    extra = [key for key in extra if key not in source.aliases]
    if missing or extra:
        raise keys_misfit(source, network, missing, extra)
    with torch.no_grad():
        for name, key in names.items():
            if source.tensors[key].shape != tuple(wanted[name].shape):
                raise shape_misfit(source, network, key, tuple(wanted[name].shape), source.tensors[key].shape)
            wanted[name].copy_(source.read(key))  # state dicts share memory with the network
    left = [
        key for key in source.tensors if key not in set(names.values()) and not source.tensors[key].is_float
    ]
    return (f"buffers not used: {', '.join(left[:3])}",) if left else ()


def filled(network: Any, source: WeightSource) -> Any:
    """A network with its weights. In files, transformers has older names for some, and translates them."""
    if not set(network.state_dict()) - set(source.tensors):
        fill(network, source)
        return network
    from transformers.utils import logging as said

    logging: Any = said
    bars, loudness = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        made, report = type(network).from_pretrained(
            None,
            config=network.config,
            state_dict={key: source.read(key) for key in source.tensors},
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    finally:
        logging.set_verbosity(loudness)
        if bars:
            logging.enable_progress_bar()
    for key, found, expected in sorted(report["mismatched_keys"]):
        raise shape_misfit(source, network, key, tuple(expected), tuple(found))
    if report["missing_keys"] or report["unexpected_keys"]:
        raise keys_misfit(source, network, sorted(report["missing_keys"]), sorted(report["unexpected_keys"]))
    return made


def _matched(source: WeightSource, wanted: Mapping[str, object]) -> dict[str, str]:
    """The network's names to the file's: as they are, or without what stands before them."""
    plain = {name: name for name in wanted if name in source.tensors}
    standard = recognise(source.tensors).keys
    return max(plain, {name: key for name, key in standard.items() if name in wanted}, key=len)


def keys_misfit(source: WeightSource, network: nn.Module, missing: list[str], extra: list[str]) -> InputError:
    """The error for names that only one of a file and a network has."""
    return InputError(
        "CKPT-KEYS",
        f"'{source.label}' does not fit the model {type(network).__name__}",
        missing=_some(missing),
        extra=_some(extra),
        fix="name the architecture that these weights are of, or rename with aniso convert",
    )


def shape_misfit(
    source: WeightSource, network: nn.Module, key: str, expected: tuple[int, ...], found: tuple[int, ...]
) -> InputError:
    """The error for a tensor of another shape."""
    return InputError(
        "CKPT-SHAPE",
        f"'{source.label}' does not fit the model {type(network).__name__}",
        key=printable(key),
        expected=expected,
        found=found,
        fix="name the architecture that these weights are of",
    )


def _some(names: list[str]) -> str:
    shown = printable(", ".join(names[:4]))
    return f"{shown} … {len(names) - 4} more" if len(names) > 4 else shown


_ASKS_FOR_CODE = ("auto_map", "trust_remote_code", "_target_", "custom_pipelines")
_ASKS_FOR_FORMAT = ("dtype", "torch_dtype", "quantization_config")


def data_only(said: Any) -> Any:
    """A configuration without what would fetch or choose code, or another number format, at any depth."""
    if isinstance(said, list):
        return [data_only(value) for value in said]
    if not isinstance(said, dict):
        return said
    return {
        key: data_only(value)
        for key, value in said.items()
        if key not in (*_ASKS_FOR_CODE, *_ASKS_FOR_FORMAT) and "implementation" not in key
    }


@contextlib.contextmanager
def building(where: object) -> Iterator[None]:
    """Around a library that builds what a configuration says: it may raise anything if that is no model."""
    try:
        yield
    except (AnisoError, ImportError):
        raise
    except Exception as e:
        raise InputError(
            "DIR-CONFIG",
            f"the configuration of '{printable(where)}' describes no model that can be built",
            reason=printable((str(e) or type(e).__name__).partition("\n")[0]),
            fix="download it again, or name the architecture and give the directory as its weights",
        ) from None


def network_of(
    path: Path, said: dict[str, Any], auto: Callable[[Any, Any], Any], *, what: str, expected: str
) -> Any:
    """A network of transformers as a configuration says, with weights yet to come; no code but the library's.

    ``auto`` picks one of the library's classes for models of a kind.
    """
    try:
        import transformers
    except ImportError:
        raise needs("hf", "transformers") from None
    kind = said.get("model_type")
    try:
        settings = {k: v for k, v in data_only(said).items() if k != "model_type"}
        config = transformers.AutoConfig.for_model(str(kind), **settings)
        return auto(transformers, config).from_config(config)
    except Exception as e:  # transformers' own for wrong settings have no base in common
        raise InputError(
            "MODEL-NAME",
            f"'{printable(path)}' holds no {what}",
            found=printable(kind),
            reason=printable(str(e).splitlines()[0] if str(e) else type(e).__name__),
            expected=expected,
            fix="aniso inspect DIR",
        ) from None


def require_activation(said: str | None) -> None:
    """Of the two that a CLIP can have; a misspelt one must not become the other."""
    if said not in (None, *ACTIVATIONS):
        raise UsageError(
            "CKPT-ACTIVATION",
            f"there is no activation '{printable(said)}'",
            expected=" or ".join(ACTIVATIONS),
            fix="choose one of the two, or leave it out",
        )


def needs(extra: str, package: str) -> UsageError:
    """The error for a library that is not installed."""
    return UsageError(
        "MODEL-LIBRARY",
        f"this model needs {package}, which is not installed",
        fix=f"pip install 'aniso[{extra}]'",
    )
