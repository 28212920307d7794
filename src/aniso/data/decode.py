"""Bytes from a stranger become an RGB picture, or an error that names the file."""

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
"""Pillow's own line between a picture and a decompression bomb; a quarter of a gigabyte of greys."""

_DAMAGE = (OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError, EOFError, struct.error)
"""What Pillow's plug-ins raise on damaged files."""


def decode(data: bytes, label: str) -> Image.Image:
    """The first frame as RGB, as torchvision would have it.

    Transparency is dropped, palettes and CMYK are converted, 16-bit and floating greys are scaled to 8 bits,
    and the orientation that cameras note in EXIF is not applied. The suffix plays no part.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        _require_small(image, label)
        return _rgb(image)
    except Image.DecompressionBombError:
        raise _bomb(label, f"more than {2 * MOST_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        found = "an empty file" if not data else f"{len(data):,} bytes starting with {data[:8]!r}"
        raise _unreadable(label, found, f"a picture ({', '.join(FORMATS)})") from None
    except _DAMAGE as e:
        raise _unreadable(label, printable(str(e) or type(e).__name__), "a complete picture") from None


def _require_small(image: Image.Image, label: str) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise _bomb(label, f"{width} x {height} pixels")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _eight_bits(image).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit greys keep their range; other greys are stretched from their least to their greatest value."""
    import numpy as np

    grey: Any = np.asarray(image)
    values = grey.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("a pixel is NaN or infinite")
    low, high = float(values.min()), float(values.max())
    whole = grey.dtype.kind in "iu" and low >= 0
    if image.mode == "I" and whole and high <= 255:
        pass  # eight bits in a wider format
    elif whole and high <= 65535:
        values = values / 257.0
    else:
        values = (values - low) * (255.0 / max(high - low, 1e-12))
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8), "L")


def _bomb(label: str, found: str) -> UnsafeError:
    return UnsafeError(
        "IMAGE-BOMB",
        f"'{printable(label)}' would unpack to more than a picture should",
        found=found,
        expected=f"at most {MOST_PIXELS:,} pixels",
        fix="scale it down, or leave it out with --on-bad-image skip",
    )


def _unreadable(label: str, found: str, expected: str) -> InputError:
    return InputError(
        "IMAGE-READ",
        f"'{printable(label)}' cannot be read as a picture",
        found=found,
        expected=expected,
        fix="replace the file, or leave it out with --on-bad-image skip",
    )
