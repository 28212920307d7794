"""Upload of exported models to a model hub: only directories that aniso wrote, and only files it knows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from aniso.compose.card_metadata import hub_id
from aniso.errors import InputError, UsageError, printable
from aniso.vectors.convert import DIRECTORY_FILES
from aniso.weights.directory import read_json
from aniso.weights.hub import is_offline

_CARD, _ADAPTER, _OPEN_CLIP = "README.md", "adapter_config.json", "open_clip_config.json"
_WEIGHTS = ("model.safetensors", "open_clip_model.safetensors", "adapter_model.safetensors", "model.onnx")
_MORE = re.compile(r"adapter_config\.json|adapter_model\.safetensors|model\.onnx(\.data)?|labels\.json")
_OURS = re.compile(r"\A---\n(?:.*\n)*?tags:\n(?:- .*\n)*?- aniso\n", re.MULTILINE)
_LARGEST_CARD = 4 << 20


class HubApi(Protocol):
    """The two calls of ``huggingface_hub.HfApi`` that a push makes."""

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> Any: ...

    def create_commit(self, repo_id: str, operations: Sequence[Any], *, commit_message: str) -> Any: ...


@final
@dataclass(frozen=True)
class Push:
    """An upload: the repository, and its files with their sizes in bytes."""

    repo: str
    files: dict[str, int]
    private: bool = False


def plan_push(directory: Path, repo: str, *, private: bool = False) -> Push:
    """Return what would be uploaded; raises unless the directory is a model that aniso exported."""
    if not directory.is_dir():
        raise InputError("FILE-MISSING", f"there is no directory '{printable(directory)}'", fix="aniso bake")
    _require_ours(directory)
    found = sorted(path for path in directory.rglob("*") if not path.is_dir())
    names = {str(path.relative_to(directory)): path for path in found}
    odd = [name for name, path in names.items() if path.is_symlink() or not _is_known(name)]
    if odd:
        raise InputError(
            "HUB-PUSH",
            f"'{printable(directory)}' holds files that aniso did not write",
            found=[printable(name) for name in odd[:8]],
            fix="move them elsewhere, or bake the model again",
        )
    _require_public_base(directory)
    return Push(repo, {name: path.stat().st_size for name, path in names.items()}, private)


def push(directory: Path, plan: Push, api: HubApi | None = None) -> str:
    """Create the repository if there is none, upload all files in one commit, and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    if is_offline() and api is None:
        raise InputError("HUB-OFFLINE", "aniso is offline", fix="unset HF_HUB_OFFLINE ANISO_OFFLINE")
    hub: HubApi = HfApi() if api is None else api
    try:
        made = hub.create_repo(plan.repo, private=plan.private, exist_ok=True)
        operations = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=_content(directory, name, plan.repo))
            for name in plan.files
        ]
        hub.create_commit(plan.repo, operations, commit_message="Upload a composition made with aniso")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as e:
        raise InputError(
            "HUB-PUSH",
            f"'{printable(plan.repo)}' could not be written",
            reason=printable(str(e).splitlines()[0] if str(e) else type(e).__name__),
            fix="check the name and your login: hf auth login",
        ) from None
    return str(made)


def _is_known(name: str) -> bool:
    parts = name.split("/")
    known = DIRECTORY_FILES.fullmatch(parts[0]) or _MORE.fullmatch(parts[0])
    return known is not None and parts[1:] in ([], ["config.json"])


def _content(directory: Path, name: str, repo: str) -> bytes | str:
    """Return a file for the hub, where open_clip looks for the tokenizer in the repository of that name."""
    if name != _OPEN_CLIP:
        return str(directory / name)
    config: Any = read_json(directory / name)
    text = config.get("model_cfg", {}).get("text_cfg", {})
    if "hf_tokenizer_name" in text:
        text["hf_tokenizer_name"] = repo
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _require_ours(directory: Path) -> None:
    card = directory / _CARD
    text = ""
    if card.is_file() and card.stat().st_size <= _LARGEST_CARD:
        text = card.read_text("utf-8", errors="replace")
    if not any((directory / name).is_file() for name in _WEIGHTS) or not _OURS.match(text):
        raise UsageError(
            "HUB-PUSH",
            f"'{printable(directory)}' is not a model that aniso exported",
            expected="weights, and a README.md with the tag aniso",
            fix="aniso bake RUN --bank BANK --base BASE -o DIR --to huggingface",
        )


def _require_public_base(directory: Path) -> None:
    """Raise if an adapter names a base that nobody else can load."""
    if not (directory / _ADAPTER).is_file():
        return
    base = read_json(directory / _ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or hub_id(base) is None or Path(base).exists():
        raise InputError(
            "HUB-PUSH",
            "the adapter names a base that is not on the hub",
            found=printable(base),
            expected="OWNER/NAME",
            fix="bake it again with --base-model OWNER/NAME",
        )
