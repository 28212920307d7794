"""``manifest.json``: the files of a bank, with their hashes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aniso.errors import InputError, UnsafeError, UsageError, printable
from aniso.weights.directory import read_json

MANIFEST = "manifest.json"
SCHEMA = 2
READABLE = (1, SCHEMA)
VECTOR_FILE = re.compile(r"vectors-([0-9]{3,9})\.safetensors")
FEATURE_FILE = re.compile(r"features-([0-9]{3,9})\.safetensors")
_VECTOR_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
BANK_FILES = re.compile(rf"{MANIFEST}|{VECTOR_FILE.pattern}|{FEATURE_FILE.pattern}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Strict):
    """A file of the bank: its name, sha256 and size."""

    file: str
    sha256: str
    nbytes: int
    index: str | None = None
    """The sha256 of a vector file's index, which has the checksums of all blocks; schema 1 had none."""


Fact = str | int | float


class Manifest(_Strict):
    """The content of ``manifest.json``."""

    schema_version: int
    base: str
    """The hash of the base's content."""
    layout: str
    """The signature of the layout."""
    files: tuple[FileRecord, ...]
    vectors: tuple[str, ...]
    """Vector names in the bank's order; each vector is in one of the files."""
    facts: dict[str, dict[str, Fact]] = Field(default_factory=dict)
    """Facts about vectors, such as accuracies of their tasks; see ``Bank.annotate``."""
    features: FileRecord | None = None
    """The file of mean features, if there is one."""
    checksum: str | None = None
    """The sha256 of the rest of the manifest; schema 1 had none."""

    def dump(self) -> str:
        """Return the text of the file, with its checksum unless it is of schema 1."""
        content = self.model_dump(mode="json", exclude_none=True, exclude={"checksum"})
        if self.schema_version > 1:
            content["checksum"] = manifest_checksum(content)
        return json.dumps(content, indent=1, sort_keys=True) + "\n"


def manifest_checksum(content: Mapping[str, object]) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a bank directory."""
    if not (path / MANIFEST).exists():
        raise InputError(
            "BANK-MANIFEST",
            f"'{printable(path)}' is not a bank: it has no {MANIFEST}",
            fix="make one with: aniso bank build --base BASE NAME=FILE … -o DIR",
        )
    content = read_json(path / MANIFEST)
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as e:
        first = e.errors()[0]
        raise manifest_error(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    named = [(record, VECTOR_FILE) for record in manifest.files]
    if manifest.features is not None:
        named.append((manifest.features, FEATURE_FILE))
    for record, expected in named:
        if not expected.fullmatch(record.file):
            raise UnsafeError(
                "DIR-PATH",
                f"'{printable(path / MANIFEST)}' names a file that is not a bank's",
                entry=printable(record.file),
                expected="vectors-000.safetensors and the like, in the same directory",
                fix="build the bank again",
            )
    if manifest.schema_version not in READABLE:
        raise manifest_error(path, f"schema {manifest.schema_version}, this version of aniso reads {SCHEMA}")
    if manifest.schema_version > 1 and manifest.checksum != manifest_checksum(content):
        raise InputError(
            "FILE-HASH",
            f"'{printable(path / MANIFEST)}' is damaged, or was edited by hand: its checksum does not match",
            fix="restore it from a copy, or build the bank again",
        )
    return manifest


def manifest_error(path: Path, reason: str) -> InputError:
    return InputError(
        "BANK-MANIFEST",
        f"'{printable(path / MANIFEST)}' is not usable",
        reason=printable(reason),
        fix="build the bank again, or update aniso if it was written by a newer version",
    )


def check_vector_name(name: str) -> None:
    """Raise unless a vector can have this name in a manifest and on the command line."""
    if not _VECTOR_NAME.fullmatch(name):
        raise UsageError(
            "BANK-NAME",
            f"invalid vector name '{printable(name)}'",
            expected="letters, digits and . _ + - (at most 100)",
            fix="write NAME=FILE with another name",
        )


def require_facts(facts: Mapping[str, Mapping[str, object]]) -> None:
    """Raise unless all facts are texts or finite numbers, which JSON can hold."""
    for name, found in facts.items():
        for key, value in found.items():
            fine = isinstance(key, str) and isinstance(value, str | int | float)
            if not fine or (isinstance(value, float) and not math.isfinite(value)):
                raise UsageError(
                    "BANK-MANIFEST",
                    f"'{printable(key)}' of '{name}' cannot be stored",
                    found=f"{type(value).__name__} {printable(value)}",
                    expected="a text or a finite number",
                    fix="float(value), or leave it out",
                )
