"""Images on disk, in memory, in tables and archives, read one at a time and without labels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from PIL import Image

from aniso.data.decode import decode
from aniso.data.items import Items
from aniso.errors import InputError, printable
from aniso.weights.caches import HashCache

Box = tuple[int, int, int, int]


class Images(Items):
    """A sequence of images, decoded when they are used."""

    def open(self, index: int) -> Image.Image:
        """Decode an image as RGB."""
        return decode(self.content(index), self.describe(index))


@final
class FileImages(Images):
    """One file per image, by paths below a root."""

    def __init__(self, root: Path, paths: Sequence[str]) -> None:
        self._root = root
        self._paths = tuple(paths)

    @property
    def ids(self) -> Sequence[str]:
        return self._paths

    def describe(self, index: int) -> str:
        return str(self._root / self._paths[index])

    def content(self, index: int) -> bytes:
        path = self._root / self._paths[index]
        try:
            if not path.is_file():  # a pipe or a device could block for ever
                raise OSError("not a regular file" if path.exists() else "no such file")
            return path.read_bytes()
        except OSError as e:
            raise InputError(
                "IMAGE-READ",
                f"'{printable(path)}' cannot be read",
                reason=e.strerror or str(e),
                fix=f"ls -l '{printable(path)}'",
            ) from None

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        return cache.digest(self._root / self._paths[index], "", lambda: self.content(index))


@final
class ArrayImages(Images):
    """Images in one uint8 array: N x height x width (x 3)."""

    def __init__(self, pixels: Any, prefix: str) -> None:
        self._pixels = pixels
        self._ids = tuple(f"{prefix}/{i}" for i in range(len(pixels)))

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def content(self, index: int) -> bytes:
        return bytes(self._pixels[index].tobytes())

    def open(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index]).convert("RGB")


@final
class CroppedImages(Images):
    """Rectangles of other images, such as objects in a photograph."""

    def __init__(self, images: Images, boxes: Sequence[Box], ids: Sequence[str]) -> None:
        """``boxes`` are left, top, right, bottom, one for each of ``images``."""
        self._images = images
        self._boxes = tuple(boxes)
        self._ids = tuple(ids)

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def describe(self, index: int) -> str:
        return f"{self._images.describe(index)} {self._boxes[index]}"

    def content(self, index: int) -> bytes:
        return repr(self._boxes[index]).encode() + self._images.content(index)

    def content_hash(self, index: int, cache: HashCache) -> bytes:
        whole = self._images.content_hash(index, cache)
        return hashlib.sha256(repr(self._boxes[index]).encode() + whole).digest()

    def open(self, index: int) -> Image.Image:
        whole = self._images.open(index)
        left, top, right, bottom = self._boxes[index]
        # beyond the edge Pillow would make up black pixels, as many as the box says
        left, top = max(left, 0), max(top, 0)
        right, bottom = min(right, whole.width), min(bottom, whole.height)
        if left >= right or top >= bottom:
            raise InputError(
                "IMAGE-READ",
                f"'{printable(self.describe(index))}' is outside of its image",
                found=f"{whole.width} x {whole.height} pixels",
                fix="replace the file, or leave it out with --on-bad-image skip",
            )
        return whole.crop((left, top, right, bottom))


@final
class EncodedImages(Images):
    """Encoded images in memory, such as uploaded files."""

    def __init__(self, contents: Sequence[bytes], ids: Sequence[str]) -> None:
        self._contents = tuple(contents)
        self._ids = tuple(ids)

    @property
    def ids(self) -> Sequence[str]:
        return self._ids

    def content(self, index: int) -> bytes:
        return self._contents[index]
