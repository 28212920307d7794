"""Images and labels as neighbours in tar archives; the archives stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from aniso.data.images import Images
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import Column, by_text
from aniso.data.readers.naming import first_few, some, visible_folders
from aniso.data.readers.shards import require_filled, shards
from aniso.data.readers.tar_index import Member, members
from aniso.data.readers.texts import ClassCard, read_class_card
from aniso.errors import InputError, UnsafeError, printable
from aniso.item_files import IMAGE_SUFFIXES, is_hidden
from aniso.registry import READERS
from aniso.weights.caches import HashCache
from aniso.weights.files import RawFile
from aniso.weights.jsontext import JsonError, parse_object

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_MOST_MEMBERS = 5_000_000
_LARGEST_IMAGE = 1 << 30
_LARGEST_LABEL = 1 << 20
_PROGRAMS = frozenset({"pkl", "pickle", "pyd", "pth", "pt", "npy", "npz", "pyc"})
"""Formats that can run code; such members are never read."""
_LABELS = ("cls", "json", "txt")
_NO_FILE = re.compile(r"pipe:|file:|\{[^}]*(\.\.|,)[^}]*\}|^[a-z0-9]+:/")


@dataclass
class _Sample:
    """The members of an archive that share a name."""

    images: list[Member] = field(default_factory=list)
    labels: dict[str, Member] = field(default_factory=dict)


@dataclass
class _Ignored:
    hidden: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        ignored = {
            "ignored hidden members": self.hidden,
            "ignored unread, because they could run code": self.programs,
            "ignored members that are neither image nor label": self.other,
        }
        return [f"{what}: {some(names)}" for what, names in ignored.items() if names]


@dataclass(frozen=True)
class _Shard:
    name: str
    """Its path from the root."""
    images: tuple[Member, ...]
    labels: tuple[str, ...]


def is_no_file(name: str) -> bool:
    """True if other readers would run, fetch or expand this name."""
    return _NO_FILE.search(name) is not None


@READERS.register("webdataset")
@final
class WebDatasetReader(Reader):
    """Reads tar archives of images and labels, as WebDataset writes them."""

    priority = 1

    def recognises(self, path: Path) -> bool:
        if not path.exists():
            return is_no_file(str(path))  # so that ``read`` explains what is wrong with the name
        if not path.is_dir():
            return path.is_file() and path.name.lower().endswith(SUFFIXES)
        archives = {file.parent for files in shards(path, *SUFFIXES).values() for file in files}
        # an archive beside folders is what they were unpacked from
        return bool(archives) and visible_folders(path) <= archives

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read labels from the ``.cls`` member of the same name, or else from its ``.json`` or ``.txt``."""
        given.require_known(settings, "parts")
        _require_files(root)
        files, left_out = given.select_parts(shards(root, *SUFFIXES), settings)
        base = root if root.is_dir() else root.parent
        ignored = _Ignored()
        budget = [_MOST_MEMBERS]
        found = {
            part: [_shard(base, path, ignored, budget) for path in paths] for part, paths in files.items()
        }
        require_filled(root, {part: sum(len(shard.images) for shard in of) for part, of in found.items()})
        card = _class_card(base, files)
        classes, codes = by_text({part: _column(of) for part, of in found.items()}, card.classes)
        parts = {part: Part(_images(base, of), classes, codes[part]) for part, of in found.items()}
        return Reading(parts, (*ignored.notes(), *left_out), prompts=card.prompts)


@final
class TarImages(Images):
    """Images by their position in tar archives. No file stays open, so it can be sent to other processes."""

    def __init__(self, root: Path, places: Sequence[tuple[str, Member]]) -> None:
        """``places`` are pairs of an archive's path from the root and a member of it."""
        self._root = root
        self._places = tuple((shard, member.offset, member.size) for shard, member in places)
        self._ids = tuple(f"{shard}/{member.name}" for shard, member in places)

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        return str(self._root / self._ids[index])

    def content(self, index: int) -> bytes:
        shard, offset, size = self._places[index]
        return RawFile(self._root / shard).read(offset, size)

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        shard, offset, size = self._places[index]
        return cache.digest(self._root / shard, f"{offset} {size}", lambda: self.content(index))


def _images(base: Path, found: Sequence[_Shard]) -> TarImages:
    return TarImages(base, [(shard.name, member) for shard in found for member in shard.images])


def _column(found: Sequence[_Shard]) -> Column:
    names = [f"{shard.name}/{member.name}" for shard in found for member in shard.images]
    return Column([label for shard in found for label in shard.labels], lambda i: names[i])


def _class_card(base: Path, files: Mapping[str, Sequence[Path]]) -> ClassCard:
    folders = dict.fromkeys([base, *(p.parent for of in files.values() for p in of)])
    cards = [read_class_card(folder) for folder in folders]
    return next((card for card in cards if card.classes is not None), cards[0])


def _require_files(root: Path) -> None:
    if not root.exists() and is_no_file(str(root)):
        raise UnsafeError(
            "DATA-TAR",
            f"'{printable(root)}' is not a file",
            expected="a directory of .tar files, or one of them",
            fix="name the directory; nothing is run, fetched or expanded from a name",
        )


# one archive


def _shard(base: Path, path: Path, ignored: _Ignored, budget: list[int]) -> _Shard:
    name = path.relative_to(base).as_posix()
    if is_no_file(path.name):
        raise UnsafeError(
            "DATA-TAR",
            f"the archive's name '{printable(path.name)}' would be run or expanded by other readers",
            fix="rename it",
        )
    file = RawFile(path)
    samples = _samples(file, name, ignored, budget)
    chosen = {key: sample for key, sample in samples.items() if sample.images}
    _require_pairs(name, samples)
    ignored.other += [f"{name}/{m.name}" for s in samples.values() if not s.images for m in s.labels.values()]
    labels = [_label(file, name, key, sample.labels) for key, sample in chosen.items()]
    return _Shard(name, tuple(sample.images[0] for sample in chosen.values()), tuple(labels))


def _samples(file: RawFile, shard: str, ignored: _Ignored, budget: list[int]) -> dict[str, _Sample]:
    found: dict[str, _Sample] = {}
    for member in members(file):
        budget[0] -= 1
        if budget[0] < 0:
            raise UnsafeError(
                "DATA-TAR",
                f"'{file.label}' and the archives before it have too many members",
                found=f"more than {_MOST_MEMBERS:,} members",
                fix="read the archives a part at a time",
            )
        _sort(file, shard, member, found, ignored)
    return found


def _sort(file: RawFile, shard: str, member: Member, found: dict[str, _Sample], ignored: _Ignored) -> None:
    """Assign a member to its sample; a sample's name ends at the first dot, as in webdataset."""
    folder, slash, name = member.name.rpartition("/")
    stem, _, ending = name.partition(".")
    ending, key = ending.lower(), f"{folder}{slash}{stem}"
    if is_hidden(name) or any(is_hidden(step) for step in folder.split("/") if step not in ("", ".")):
        ignored.hidden.append(f"{shard}/{member.name}")
    elif ending.rpartition(".")[2] in _PROGRAMS:
        ignored.programs.append(f"{shard}/{member.name}")
    elif ending in IMAGE_SUFFIXES:
        _require_size(file, member, _LARGEST_IMAGE)
        found.setdefault(key, _Sample()).images.append(member)
    elif ending in _LABELS and ending not in found.setdefault(key, _Sample()).labels:
        found[key].labels[ending] = member
    elif ending in _LABELS:
        raise _ambiguous(shard, [member.name])
    else:
        ignored.other.append(f"{shard}/{member.name}")


def _require_size(file: RawFile, member: Member, largest: int) -> None:
    if member.size > largest:
        raise UnsafeError(
            "DATA-TAR",
            f"'{file.label}' holds a member that is too large",
            member=printable(member.name),
            found=f"{member.size:,} bytes",
            expected=f"at most {largest:,}",
            fix="write the archive again without it",
        )


def _require_pairs(shard: str, samples: Mapping[str, _Sample]) -> None:
    several = [key for key, sample in samples.items() if len(sample.images) > 1]
    if several:
        raise _ambiguous(shard, several)
    alone = [sample.images[0].name for sample in samples.values() if sample.images and not sample.labels]
    orphans = [
        f"{key}.cls" for key, sample in samples.items() if "cls" in sample.labels and not sample.images
    ]
    if alone or orphans:
        raise InputError(
            "DATA-MISSING",
            f"'{printable(shard)}' has images without a label, or labels without an image",
            images=first_few(alone) if alone else None,
            labels=first_few(orphans) if orphans else None,
            expected="for every NAME.jpg a NAME.cls",
            fix="write the archive again with both",
        )


def _label(file: RawFile, shard: str, key: str, labels: Mapping[str, Member]) -> str:
    """Return the label of an image: the text of .cls, "label" in .json, or the text of .txt."""
    for ending in _LABELS:
        if ending in labels:
            member = labels[ending]
            _require_size(file, member, _LARGEST_LABEL)
            value = _value(file.read(member.offset, member.size), ending)
            if value is not None:
                return value
    raise InputError(
        "DATA-LABEL",
        f"the label of '{printable(key)}' in '{printable(shard)}' cannot be read",
        found=some(f"{key}.{ending}" for ending in labels),
        expected='a class as UTF-8 text, or a JSON object with the key "label"',
        fix="write the archive again with .cls members",
    )


def _value(data: bytes, ending: str) -> str | None:
    try:
        if ending != "json":
            return data.decode("utf-8").strip()
        label = parse_object(data).get("label")
    except (UnicodeDecodeError, JsonError):
        return None
    return str(label).strip() if isinstance(label, (str, int)) and not isinstance(label, bool) else None


def _ambiguous(shard: str, names: list[str]) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(shard)}' has more than one image or label under a name",
        found=first_few(names),
        expected="names that differ before the first dot",
        fix="write the archive again with a name for each image",
    )
