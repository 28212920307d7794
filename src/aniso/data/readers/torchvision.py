"""Reader of torchvision's datasets: torchvision lists files and labels, aniso decodes the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from aniso.data.images import ArrayImages, FileImages, Images
from aniso.data.part import Part, Reading
from aniso.data.reader import Reader
from aniso.data.readers import settings as given
from aniso.data.readers.labels import by_name
from aniso.data.readers.naming import first_few, some
from aniso.data.readers.safe_paths import Below
from aniso.data.readers.texts import distinct
from aniso.errors import InputError, UnsafeError, printable
from aniso.registry import READERS

_OURS = ("root", "download", "transform", "target_transform", "transforms", "loader", "is_valid_file")


@dataclass(frozen=True)
class _Listing:
    """Files or pixels of a torchvision dataset, and labels as class indices."""

    labels: Sequence[int]
    files: Sequence[str] = ()
    pixels: Any = None


@READERS.register("torchvision")
@final
class TorchvisionReader(Reader):
    """Reads datasets of torchvision.datasets; torchvision lists the files, aniso decodes them."""

    def read(self, root: Path, settings: Mapping[str, object]) -> Reading:
        """Read ``dataset``, a class of torchvision.datasets, with the arguments that ``parts`` lists."""
        name, parts = _dataset_and_parts(settings)
        check = _CHECKS.get(name)
        if check is not None:
            check(root, name)
        images: dict[str, Images] = {}
        names: dict[str, list[str]] = {}
        listed: list[tuple[str, ...]] = []
        for part, arguments in parts.items():
            dataset = _construct(root, name, arguments, download=False)
            found = _EXTRACTORS[name](dataset)
            classes = _class_names(dataset, root)
            images[part], labels = _images(root, part, found)
            names[part] = _named(name, part, labels, classes)
            listed += [classes] if classes else []
        # lists made from a part's own files may lack a class, so parts are matched by name
        union = tuple(dict.fromkeys(label for classes in listed for label in classes)) or None
        every, codes = by_name(names, union)
        return Reading({part: Part(images[part], every, codes[part]) for part in parts})

    def fetch(self, root: Path, settings: Mapping[str, object]) -> None:
        """Download the dataset to where ``read`` looks for it; existing files are kept."""
        from aniso.weights.hub import is_offline

        name, parts = _dataset_and_parts(settings)
        if is_offline():
            raise InputError(
                "HUB-OFFLINE",
                f"{name} cannot be fetched: aniso is offline",
                fix="unset ANISO_OFFLINE HF_HUB_OFFLINE",
            )
        _refuse_old_mnist(root, name)
        for arguments in parts.values():
            _construct(root, name, arguments, download=True)


def _dataset_and_parts(settings: Mapping[str, object]) -> tuple[str, dict[str, dict[str, object]]]:
    given.require_known(settings, "dataset", "parts")
    name = given.text(settings, "dataset")
    if name not in _EXTRACTORS:
        raise _card(
            f"'{printable(name)}' is not read through torchvision", name, ", ".join(sorted(_EXTRACTORS))
        )
    parts = settings.get("parts")
    if not isinstance(parts, Mapping) or not parts:
        raise _card("the reader needs 'parts'", printable(parts), 'parts = { train = { split = "train" } }')
    for arguments in parts.values():
        wrong = not isinstance(arguments, Mapping) or [key for key in arguments if key in _OURS]
        if wrong:
            raise _card(
                "'parts' is not a table of tables", printable(parts), "a table of arguments for each part"
            )
    return name, {part: dict(arguments) for part, arguments in parts.items()}


def _construct(root: Path, name: str, arguments: Mapping[str, object], *, download: bool) -> Any:
    from torchvision import datasets

    options: dict[str, object] = {**arguments, **({"download": download} if name not in _NO_DOWNLOAD else {})}
    try:
        return getattr(datasets, name)(str(root), **options)
    except Exception as e:  # its readers of .mat, zip and tar files have errors of their own
        raise (_not_fetched if download else _not_read)(name, root, e) from None


def _not_fetched(name: str, root: Path, error: Exception) -> InputError:
    return InputError(
        "DATA-MISSING",
        f"{name} could not be fetched to '{printable(root)}'",
        reason=printable(str(error) or type(error).__name__),
        fix="see the homepage in the task's card for where to get it by hand",
    )


def _not_read(name: str, root: Path, error: Exception) -> InputError:
    if "scipy" in str(error).lower():
        return InputError(
            "MODEL-LIBRARY",
            f"{name} has .mat files, which need the package scipy to be read",
            fix="pip install 'aniso[data]'",
        )
    if isinstance(error, (RuntimeError, FileNotFoundError)):
        return _missing(name, root, str(error))
    return InputError(
        "DATA-FORMAT",
        f"{name} in '{printable(root)}' is not as torchvision expects it",
        found=printable(f"{type(error).__name__}: {error}"),
        likely="files are missing or damaged, or arguments in the card are wrong",
        fix=f"look into '{printable(root)}', and complete the dataset",
    )


# what each class of torchvision calls its files and labels


def _pairs(attribute: str) -> Callable[[Any], _Listing]:
    def found(dataset: Any) -> _Listing:
        pairs = getattr(dataset, attribute)
        return _Listing([int(label) for _, label in pairs], [str(path) for path, _ in pairs])

    return found


def _lists(files: str) -> Callable[[Any], _Listing]:
    def found(dataset: Any) -> _Listing:
        return _Listing([int(label) for label in dataset._labels], [str(p) for p in getattr(dataset, files)])

    return found


def _arrays(labels: str, *, channels_first: bool = False) -> Callable[[Any], _Listing]:
    def found(dataset: Any) -> _Listing:
        import numpy as np

        pixels = np.asarray(dataset.data)
        if channels_first:
            pixels = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1))
        return _Listing([int(label) for label in getattr(dataset, labels)], pixels=pixels)

    return found


def _caltech101(dataset: Any) -> _Listing:
    base = Path(dataset.root) / "101_ObjectCategories"
    pairs = zip(dataset.y, dataset.index, strict=True)
    return _Listing(dataset.y, [str(base / dataset.categories[y] / f"image_{i:04d}.jpg") for y, i in pairs])


def _caltech256(dataset: Any) -> _Listing:
    base = Path(dataset.root) / "256_ObjectCategories"
    pairs = zip(dataset.y, dataset.index, strict=True)
    return _Listing(
        dataset.y, [str(base / dataset.categories[y] / f"{y + 1:03d}_{i:04d}.jpg") for y, i in pairs]
    )


# ImageNet is not among them: its class unpickles a file that comes with no hash
_EXTRACTORS: dict[str, Callable[[Any], _Listing]] = {
    **dict.fromkeys(("ImageFolder", "EuroSAT", "Country211"), _pairs("samples")),
    **dict.fromkeys(("StanfordCars", "GTSRB", "RenderedSST2"), _pairs("_samples")),
    **dict.fromkeys(("DTD", "SUN397", "Food101", "FGVCAircraft", "Flowers102"), _lists("_image_files")),
    "OxfordIIITPet": _lists("_images"),
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100"), _arrays("targets")),
    **dict.fromkeys(("SVHN", "STL10"), _arrays("labels", channels_first=True)),
    "Caltech101": _caltech101,
    "Caltech256": _caltech256,
}
_NO_DOWNLOAD = ("ImageFolder",)


def _class_names(dataset: Any, root: Path) -> tuple[str, ...]:
    names = getattr(dataset, "classes", None) or getattr(dataset, "categories", None) or ()
    return distinct(tuple(map(str, names)), root) if names else ()


def _images(root: Path, part: str, found: _Listing) -> tuple[Images, list[int]]:
    if found.pixels is not None:
        return ArrayImages(found.pixels, part), list(found.labels)
    below = Below(root, trust_links=True)
    # by name: some classes list folders in whatever order the file system has them
    pairs = sorted(zip((_below(root, path, below) for path in found.files), found.labels, strict=True))
    paths = [path for path, _ in pairs]
    below.require(paths)
    return FileImages(root, paths), [label for _, label in pairs]


def _below(root: Path, path: str, below: Below) -> str:
    place = Path(path)
    inside = place.is_relative_to(root)
    return below.name(place.relative_to(root).as_posix() if inside else path, "a list of the dataset")


def _named(name: str, part: str, labels: Sequence[int], classes: tuple[str, ...]) -> list[str]:
    count = len(classes)
    wrong = [f"{i}: {label}" for i, label in enumerate(labels) if label < 0 or (count and label >= count)]
    if wrong:
        raise InputError(
            "DATA-LABEL",
            f"{len(wrong):,} labels of {name} ({part}) are no class index",
            found=first_few(wrong),
            expected=f"0 to {count - 1}" if count else "0 or more",
            fix="complete the dataset, or leave this part out of the card",
        )
    if not labels:
        raise InputError(
            "DATA-EMPTY", f"{name} ({part}) has no images", fix="complete the dataset, or correct the card"
        )
    return [classes[label] for label in labels] if classes else [str(label) for label in labels]


# before anything is constructed


def _require_published_cifar(root: Path, name: str) -> None:
    """Raise unless CIFAR's batches, pickles that torchvision loads, have their published MD5."""
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    kind = getattr(datasets, name)
    wanted = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    base = root / kind.base_folder
    missing = [file for file, _ in wanted if not (base / file).is_file()]
    if missing:
        raise _missing(name, root, f"not in {kind.base_folder}: {some(missing)}")
    altered = [file for file, md5 in wanted if not check_integrity(str(base / file), md5)]
    if altered:
        raise UnsafeError(
            "DATA-HASH",
            f"files of {name} in '{printable(base)}' are not those its authors published",
            altered=first_few(altered),
            expected="the published MD5: these files are pickles, and a pickle can run anything",
            fix=f"rm -r '{printable(base)}'; aniso task fetch {name.lower()} --data '{printable(root)}'",
        )


def _refuse_old_mnist(root: Path, name: str) -> None:
    """Raise if there are pickles of tensors, as torchvision before 0.8 wrote MNIST, without hashes."""
    place = root / name / "processed"
    if name in ("MNIST", "FashionMNIST", "KMNIST") and any(place.glob("*.pt")):
        raise UnsafeError(
            "DATA-HASH",
            f"'{printable(place)}' holds pickles that torchvision would load in place of the published files",
            expected=f"{name}/raw alone",
            fix=f"rm -r '{printable(place)}'",
        )


def _require_caltech(root: Path, name: str) -> None:
    """Raise if the folder is missing, which torchvision would create."""
    place = root / name.lower() / f"{name[-3:]}_ObjectCategories"
    if not place.is_dir():
        raise _missing(name, root, f"there is no {place.relative_to(root)}")


_CHECKS: dict[str, Callable[[Path, str], None]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100"), _require_published_cifar),
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST"), _refuse_old_mnist),
    **dict.fromkeys(("Caltech101", "Caltech256"), _require_caltech),
}


# errors


def _missing(name: str, root: Path, reason: str) -> InputError:
    return InputError(
        "DATA-MISSING",
        f"{name} is not in '{printable(root)}', or not complete",
        reason=printable(reason),
        fix=f"ls '{printable(root)}', and complete the dataset",
    )


def _card(problem: str, found: str, expected: str) -> InputError:
    return InputError(
        "DATA-CARD",
        problem,
        found=printable(found),
        expected=expected,
        fix="correct [reader] in the task's card",
    )
