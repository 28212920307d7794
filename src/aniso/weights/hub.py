"""Models and datasets from the Hugging Face hub, pinned to a commit; no network access when offline."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from aniso.errors import InputError, printable

_ID = re.compile(r"^(?:hub:)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?$")
_WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_BESIDE = ("*.json", "merges.txt", "chat_template.jinja", "README.md")
_SAFE = ("*.safetensors", *_BESIDE)
_PICKLED = ("pytorch_model*.bin", "open_clip_pytorch_model.bin", "adapter_model.bin", *_BESIDE)
_TABLES = ("*.parquet", "*.json")


@dataclass(frozen=True)
class Fetched:
    """A repository's files on disk, and their commit."""

    path: Path
    commit: str


def looks_like_hub_id(ref: str) -> bool:
    """True if the text can only be a hub id, not a path."""
    a_path = ref.startswith((".", "/", "~")) or ".." in ref or ref.endswith(_WEIGHT_FILES)
    return _ID.match(ref) is not None and not a_path


def is_offline() -> bool:
    return any(os.environ.get(v, "") not in ("", "0") for v in ("ANISO_OFFLINE", "HF_HUB_OFFLINE"))


def fetch(ref: str) -> Fetched:
    """Return the files of ``owner/name[@revision]`` from cache or hub; safetensors weights if it has any."""
    match = _ID.match(ref)
    assert match is not None
    repo, revision = match["repo"], match["revision"]
    path = _snapshot(repo, revision, _SAFE)
    if not any(path.glob("*.safetensors")):
        path = _snapshot(repo, revision, _PICKLED)
    return Fetched(path, path.name)


def fetch_dataset(ref: str, into: Path) -> Path:
    """Download the tables of a dataset on the hub into a directory."""
    match = _ID.match(ref)
    assert match is not None
    return _snapshot(match["repo"], match["revision"], _TABLES, into)


def _snapshot(repo: str, revision: str | None, patterns: tuple[str, ...], into: Path | None = None) -> Path:
    """Download the files of a model repository, or with ``into`` those of a dataset into a directory."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.errors import HTTPError as HttpError  # type: ignore[attr-defined]

    pinned = f"{repo}@{revision}" if revision else repo
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=is_offline(),
                repo_type="dataset" if into is not None else None,
                local_dir=into,
            )
        )
    except LocalEntryNotFoundError:
        if not is_offline():
            raise _not_delivered(pinned, "no connection, and not in the local cache") from None
        raise InputError(
            "HUB-OFFLINE",
            f"'{pinned}' is not in the local cache and aniso is offline",
            fix=f"hf download {repo}"
            + (" --repo-type dataset" if into is not None else "")
            + (f" --revision {revision}" if revision else ""),
        ) from None
    except (HttpError, HFValidationError, OSError) as e:  # HfHubHTTPError is an OSError
        raise _not_delivered(
            pinned, printable(str(e).splitlines()[0] if str(e) else type(e).__name__)
        ) from None


def _not_delivered(pinned: str, reason: str) -> InputError:
    return InputError(
        "HUB-FETCH",
        f"'{pinned}' could not be fetched",
        reason=reason,
        fix="check the name, the revision and your login (hf auth login)",
    )
