"""Building a network from a configuration, and loading weights from any file into it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aniso.errors import AnisoError, InputError, UsageError, printable
from aniso.json_value import JsonObject
from aniso.models.architectures import CAUSAL, SEQUENCE_TO_SEQUENCE, Loader, Row, require_small_grid
from aniso.models.settings import Limits, Settings
from aniso.vectors.block_source import ACTIVATIONS, require_model
from aniso.vectors.naming import recognise
from aniso.weights import WeightSource


def fill(network: nn.Module, source: WeightSource, *, optional: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Copy every tensor by name; raises if one is missing or left over. Returns notes.

    Names that begin with one of ``optional`` may be missing: a fine-tuned image encoder often comes without
    the text tower, which then stays unchanged.
    """
    require_model(source)
    wanted = dict(network.state_dict())
    names = _matched(source, wanted)
    missing = [name for name in wanted if name not in names and not name.startswith(optional or ("\0",))]
    used, shared = set(names.values()), source.aliases
    extra = [key for key, info in source.tensors.items() if key not in used and info.is_float]
    extra = [key for key in extra if key not in shared]
    if missing or extra:
        raise keys_misfit(source, network, missing, extra)
    with torch.no_grad():
        for name, key in names.items():
            if source.tensors[key].shape != tuple(wanted[name].shape):
                raise shape_misfit(source, network, key, tuple(wanted[name].shape), source.tensors[key].shape)
            wanted[name].copy_(source.read(key))  # state dicts share memory with the network
    left = [key for key, info in source.tensors.items() if key not in used and not info.is_float]
    return (f"buffers not used: {', '.join(left[:3])}",) if left else ()


def filled(network: Any, source: WeightSource) -> Any:
    """Return the network with its weights; transformers translates older names of weights in files."""
    if not set(network.state_dict()) - set(source.tensors):
        fill(network, source)
        return network
    _require_readable(network, source)
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    bars, loudness = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        network_with_weights, report = type(network).from_pretrained(
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
    return network_with_weights


def _require_readable(network: Any, source: WeightSource) -> None:
    """Refuse a file whose tensors, all read at once, take far more memory than the network.

    In a pickle, a thousand names can share one storage, and each takes memory of its own once it is read.
    """
    wanted = {name: value.numel() for name, value in network.state_dict().items()}
    if sum(info.numel for info in source.tensors.values()) > 4 * sum(wanted.values()) + (1 << 22):
        missing = [name for name in wanted if name not in source.tensors]
        raise keys_misfit(source, network, missing, [key for key in source.tensors if key not in wanted])


def _matched(source: WeightSource, wanted: Mapping[str, object]) -> dict[str, str]:
    """Return the network's names and the file's names for them: equal, or without a prefix."""
    plain = {name: name for name in wanted if name in source.tensors}
    standard = recognise(source.tensors).keys
    return max(plain, {name: key for name, key in standard.items() if name in wanted}, key=len)


def keys_misfit(source: WeightSource, network: nn.Module, missing: list[str], extra: list[str]) -> InputError:
    """Return the error for names that only the file or only the network has."""
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
    """Return the error for a tensor of a different shape."""
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


@contextlib.contextmanager
def building(where: object) -> Iterator[None]:
    """Turn any error of a library that builds a model from a configuration into ours."""
    try:
        yield
    except (AnisoError, ImportError):
        raise
    except Exception as e:
        if _lacks_memory(e):
            raise
        raise InputError(
            "DIR-CONFIG",
            f"the configuration of '{printable(where)}' does not describe a model that can be built",
            reason=printable((str(e) or type(e).__name__).partition("\n")[0]),
            fix="download it again, or name the architecture and give the directory as its weights",
        ) from None


def _lacks_memory(error: Exception) -> bool:
    """True if memory ran out, which is not an error of the file."""
    words = ("allocate memory", "out of memory")  # torch's, for the host and for a GPU
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in words)
    )


def network_of(path: Path, config_fields: JsonObject, loader: Loader, source: WeightSource) -> Any:
    """Build as ``transformers_network`` does; an error of the library becomes "no such model"."""
    try:
        return transformers_network(path, config_fields, loader, source)
    except AnisoError:
        raise
    except Exception as e:  # transformers' own for wrong settings have no base in common
        if _lacks_memory(e):
            raise
        raise InputError(
            "MODEL-NAME",
            f"'{printable(path)}' holds no {loader.what}",
            found=printable(config_fields.get("model_type")),
            reason=printable(str(e).splitlines()[0] if str(e) else type(e).__name__),
            expected=loader.expected,
            fix="aniso inspect DIR",
        ) from None


def transformers_network(path: Path, config_fields: JsonObject, loader: Loader, source: WeightSource) -> Any:
    """Build a network of transformers from ``config.json``, with random weights.

    Only architectures of ``loader`` and only plain settings are accepted, so that nothing but the library's
    own layers is built and nothing is fetched.
    """
    try:
        import transformers
    except ImportError:
        raise needs("hf", "transformers") from None
    kind = loader.require(config_fields.get("model_type"), path)
    configuration: Any = transformers.CONFIG_MAPPING[kind]
    settings = Settings(printable(path / "config.json"), Limits.of(source)).of(config_fields, configuration)
    config = configuration(**settings)
    require_small_grid(kind, config, path)
    builder = getattr(transformers, _row(loader, kind, config).builder)
    make = getattr(builder, "from_config", builder)
    return built(source, lambda: make(copy.deepcopy(config)))


def _row(loader: Loader, kind: str, config: Any) -> Row:
    """Return the row of the table that builds a configuration."""
    rows = [row for row in loader.rows if kind in row.model_types]
    if len(rows) > 1:
        return SEQUENCE_TO_SEQUENCE if config.is_encoder_decoder else CAUSAL
    return rows[0]


def built(source: WeightSource, make: Callable[[], Any]) -> Any:
    """Build a network twice: on the meta device, to compare its size with the weights, and then in memory."""
    with torch.random.fork_rng([]), torch.device("meta"), _budget(source):
        require_size(make(), source)
    return make()


def require_size(network: nn.Module, source: WeightSource) -> None:
    """Raise if the configuration describes a model more than twice as large as the weights."""
    wanted = sum(parameter.numel() for parameter in network.parameters())
    found = Limits.of(source).numbers
    if wanted > 2 * found + (1 << 20):
        raise _too_large(source, type(network).__name__, f"{wanted:,} numbers, by its configuration", found)


_TIED = 8  # a matrix is built up to four times before its copies are tied, in an encoder and a decoder
_BUFFERS = 1 << 26  # masks and tables of positions that no file holds, in numbers


@contextlib.contextmanager
def _budget(source: WeightSource) -> Iterator[None]:
    """Stop a build as soon as it far exceeds the weights, whatever the configuration's number of layers."""
    limits, thread = Limits.of(source), threading.get_ident()
    spent = Counter[str]()
    most = {
        "parameters": _TIED * limits.tensors + 1_000,
        "modules": 50 * limits.tensors + 10_000,
        "numbers": _TIED * limits.numbers + (1 << 22),
        "numbers in buffers": _TIED * limits.numbers + _BUFFERS,
    }

    def spend(what: str, amount: int) -> None:
        if threading.get_ident() != thread:  # hooks see the modules of all threads
            return
        spent[what] += amount
        if spent[what] > most[what]:
            raise _too_large(
                source, "", f"more than {most[what]:,} {what}, by its configuration", limits.numbers
            )

    def count_parameter(_module: nn.Module, _name: str, parameter: Any) -> None:
        spend("parameters", 1)
        spend("numbers", parameter.numel() if parameter is not None else 0)

    def count_buffer(_module: nn.Module, _name: str, buffer: Any) -> None:
        spend("numbers in buffers", buffer.numel() if buffer is not None else 0)

    def count_module(_module: nn.Module, _name: str, _part: Any) -> None:
        spend("modules", 1)

    hooks = [
        nn.modules.module.register_module_parameter_registration_hook(count_parameter),
        nn.modules.module.register_module_buffer_registration_hook(count_buffer),
        nn.modules.module.register_module_module_registration_hook(count_module),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _too_large(source: WeightSource, network: str, expected: str, found: int) -> InputError:
    return InputError(
        "CKPT-SHAPE",
        f"'{source.label}' does not fit the model {network}".rstrip(),
        expected=expected,
        found=f"{found:,} numbers in the file",
        fix="name the architecture that these weights are of, or use the configuration that belongs to them",
    )


def require_activation(activation: str | None) -> None:
    """Raise unless this is None or one of the two activations of CLIP."""
    if activation not in (None, *ACTIVATIONS):
        raise UsageError(
            "CKPT-ACTIVATION",
            f"there is no activation '{printable(activation)}'",
            expected=" or ".join(ACTIVATIONS),
            fix="choose one of the two, or leave it out",
        )


def needs(extra: str, package: str) -> UsageError:
    """Return the error for a library that is not installed."""
    return UsageError(
        "MODEL-LIBRARY",
        f"this model needs {package}, which is not installed",
        fix=f"pip install 'aniso[{extra}]'",
    )
