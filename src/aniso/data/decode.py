"""Decoding of untrusted bytes to an RGB image, or an error that names the file."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

from PIL import Image, UnidentifiedImageError

from aniso.errors import InputError, UnsafeError, printable

# Raster formats only: EPS, PDF and the like hand the file to another program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_PIXELS = 178_956_970
"""Pillow's own line between an image and a decompression bomb; cameras reach 100 megapixels."""
MOST_MEMORY = 1 << 30
"""Bytes that decoding one image may take: 178 megapixels in RGB, 134 in RGBA, 107 as a progressive JPEG."""
_LARGE = 1 << 25  # pixels; below it, decoding takes less than 800 MB whatever the file is
_MOST_PIXELS_PER_BYTE = 500  # a photograph has 2 to 50, a flat PNG of one bit 8000
_MANY_SCANS = 64  # of a JPEG; encoders write about ten
_MOST_SCANNED = 1 << 31  # pixels times scans; with 64 scans of 96 megapixels decoding takes four seconds
_STRIP = 1 << 20  # pixels converted at a time

_DAMAGE = (OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, EOFError, struct.error)
"""Errors that Pillow's plug-ins raise on damaged files."""


def decode(data: bytes, label: str) -> Image.Image:
    """Decode the first frame as RGB, as torchvision does.

    Transparency is dropped, palettes and CMYK are converted, 16-bit and floating greys are scaled to 8 bits,
    and the EXIF orientation is not applied. The format is recognised by content, not by suffix.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, about sizes and damaged metadata: ours are errors
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _require_small(image, label, len(data))
            _require_few_scans(data, image, label)
            return _rgb(image)
    except Image.DecompressionBombError:
        most = f"at most {MOST_PIXELS:,} pixels"
        raise _bomb(label, f"more than {2 * MOST_PIXELS:,} pixels", most) from None
    except UnidentifiedImageError:
        found = "an empty file" if not data else f"{len(data):,} bytes starting with {data[:8]!r}"
        raise _unreadable(label, found, f"an image ({', '.join(FORMATS)})") from None
    except _DAMAGE as e:
        raise _unreadable(label, printable(str(e) or type(e).__name__), "a complete image") from None


def _require_small(image: Image.Image, label: str, nbytes: int) -> None:
    """Refuse an image before it is decoded, by what decoding it would cost."""
    width, height = image.size
    pixels = width * height
    found = f"{width} x {height} pixels"
    if pixels > MOST_PIXELS:
        raise _bomb(label, found, f"at most {MOST_PIXELS:,} pixels")
    memory = pixels * _bytes_per_pixel(image)
    if memory > MOST_MEMORY:
        raise _bomb(label, f"{found}, {memory >> 20:,} MB to decode", f"at most {MOST_MEMORY >> 20:,} MB")
    if pixels > _LARGE and pixels > _MOST_PIXELS_PER_BYTE * nbytes:
        least = f"at least {pixels // _MOST_PIXELS_PER_BYTE:,} bytes for so many pixels"
        raise _bomb(label, f"{found} in {nbytes:,} bytes", least)
    tile = _tile(image)
    if tile > max(4 * pixels, _LARGE):
        raise _bomb(label, f"{found} in tiles of {tile:,} pixels", "tiles no larger than the image")


def _bytes_per_pixel(image: Image.Image) -> int:
    """Return the peak memory of decoding and converting, as measured on images of 30 megapixels."""
    kept = {"1": 1, "L": 1, "P": 1, "LA": 4, "RGB": 0}.get(image.mode, 4)  # the raster before conversion
    decoder = 0
    if image.format == "WEBP":
        decoder = 12  # two frames of the animation decoder, and a copy of one
    elif image.info.get("progressive"):
        decoder = 6  # two bytes per coefficient, three colours
    elif image.format == "TIFF":
        decoder = 6  # a strip may be the whole image, in up to 16 bits a colour
    return kept + decoder + 4


def _tile(image: Image.Image) -> int:
    """Return the pixels in a tile of a TIFF, which the decoder allocates whatever the image's size is."""
    tags = getattr(image, "tag_v2", {})
    sizes = [tags.get(tag, 0) for tag in (322, 323)]  # TileWidth, TileLength
    return int(sizes[0]) * int(sizes[1]) if all(isinstance(size, int) for size in sizes) else 0


def _require_few_scans(data: bytes, image: Image.Image, label: str) -> None:
    """Refuse a JPEG of very many scans: each takes a few bytes, and a pass over all pixels to decode."""
    if image.format not in ("JPEG", "MPO"):
        return
    scans, pixels = data.count(b"\xff\xda"), image.size[0] * image.size[1]
    if scans > _MANY_SCANS and scans * pixels > _MOST_SCANNED:
        raise _bomb(label, f"{scans:,} scans of {pixels:,} pixels", f"at most {_MANY_SCANS} scans")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image).convert("RGB")
    if image.mode == "RGB" and image.size[0] * image.size[1] > _LARGE:
        image.load()
        return image  # convert would copy it
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert to 8 bits: 16-bit greys keep their range, others are stretched from minimum to maximum.

    The image is converted in strips, because in floats of 64 bits it is four times as large.
    """
    import numpy as np

    image.load()
    width, height = image.size
    rows = max(1, _STRIP // max(width, 1))
    boxes = [(0, top, width, min(top + rows, height)) for top in range(0, height, rows)]
    low, high, kind = _range(image, boxes)
    whole = kind in "iu" and low >= 0
    out = Image.new("L", image.size)
    for box in boxes:
        values: Any = np.asarray(image.crop(box)).astype(np.float64)
        if image.mode == "I" and whole and high <= 255:
            pass  # eight bits in a wider format
        elif whole and high <= 65535:
            values = values / 257.0
        else:
            values = (values - low) * (255.0 / max(high - low, 1e-12))
        out.paste(Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8), "L"), box)
    return out


def _range(image: Image.Image, boxes: list[tuple[int, int, int, int]]) -> tuple[float, float, str]:
    """Return the minimum and maximum of an image, and NumPy's kind of its dtype."""
    import numpy as np

    low, high, kind = np.inf, -np.inf, ""
    for box in boxes:
        values: Any = np.asarray(image.crop(box))
        kind = values.dtype.kind
        if not np.isfinite(values).all():
            raise ValueError("a pixel is NaN or infinite")
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    return low, high, kind


def _bomb(label: str, found: str, expected: str) -> UnsafeError:
    return UnsafeError(
        "IMAGE-BOMB",
        f"'{printable(label)}' would take more memory or time to decode than an image should",
        found=found,
        expected=expected,
        fix="scale it down, or leave it out with --on-bad-image skip",
    )


def _unreadable(label: str, found: str, expected: str) -> InputError:
    return InputError(
        "IMAGE-READ",
        f"'{printable(label)}' cannot be read as an image",
        found=found,
        expected=expected,
        fix="replace the file, or leave it out with --on-bad-image skip",
    )
