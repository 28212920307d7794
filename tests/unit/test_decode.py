"""Decoding: what torchvision sees, for every kind of picture; our errors for everything else."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets.folder import default_loader, pil_loader
from watch import FUZZ, peak_below

from aniso.data.decode import MOST_PIXELS, decode
from aniso.data.images import ArrayImages, CroppedImages, FileImages
from aniso.data.items import ChosenItems
from aniso.errors import AnisoError

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (7, 9, 4), dtype=np.uint8)
RGB = Image.fromarray(NOISE[..., :3].copy())
RGBA = Image.fromarray(NOISE)
GREY = Image.fromarray(NOISE[..., 0].copy())


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def palette(**options):
    return encoded(RGB.quantize(16), "PNG", **options)


PICTURES = {
    "rgb png": encoded(RGB),
    "rgb jpeg": encoded(RGB, "JPEG"),
    "rgb webp": encoded(RGB, "WEBP"),
    "rgb bmp": encoded(RGB, "BMP"),
    "rgb tiff": encoded(RGB, "TIFF"),
    "rgb tiff lzw": encoded(RGB, "TIFF", compression="tiff_lzw"),
    "rgb ppm": encoded(RGB, "PPM"),
    "grey png": encoded(GREY),
    "grey jpeg": encoded(GREY, "JPEG"),
    "grey pgm": encoded(GREY, "PPM"),
    "black and white": encoded(GREY.convert("1")),
    "grey and alpha": encoded(RGBA.convert("LA")),
    "rgba png": encoded(RGBA),
    "rgba webp": encoded(RGBA, "WEBP"),
    "palette": palette(),
    "palette, one transparent": palette(transparency=3),
    "palette, transparencies": palette(transparency=bytes(range(0, 256, 16))),
    "palette gif": encoded(RGB, "GIF"),
    "animated gif": encoded(RGB, "GIF", save_all=True, append_images=[Image.new("RGB", (9, 7))]),
    "cmyk jpeg": encoded(RGB.convert("CMYK"), "JPEG"),
    "cmyk tiff": encoded(RGB.convert("CMYK"), "TIFF"),
    "progressive jpeg": encoded(RGB, "JPEG", progressive=True),
    "several pictures in a jpeg": encoded(RGB, "MPO", save_all=True, append_images=[GREY.convert("RGB")]),
    "1 x 1": encoded(Image.new("RGB", (1, 1), (1, 2, 3))),
    "1 x 5000": encoded(Image.new("RGB", (1, 5000), (1, 2, 3))),
    "5000 x 1": encoded(Image.new("L", (5000, 1), 9)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_what_torchvision_sees(name, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(PICTURES[name])
    expected = pil_loader(path)
    found = decode(PICTURES[name], name)
    assert (found.mode, found.size) == ("RGB", expected.size)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_camera_s_orientation_is_not_applied(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(RGB, "JPEG", exif=exif)
    path = tmp_path / "turned.jpg"
    path.write_bytes(data)
    found = decode(data, "turned")
    assert found.size == RGB.size
    assert found.tobytes() == default_loader(path).tobytes()


def test_an_animation_is_its_first_frame():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, "x").getpixel((0, 0)) == (255, 0, 0)


# greys of more than eight bits, which Pillow alone would cut off at 255


def test_sixteen_bits_keep_their_range():
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    found = np.asarray(decode(encoded(Image.fromarray(values)), "deep"))
    assert found[0, :, 0].tolist() == [0, 1, 128, 255]
    assert (found[..., 0] == found[..., 2]).all()


def test_sixteen_bit_tiffs_of_either_byte_order():
    values = np.array([[0, 2570, 65535]], dtype=np.uint16)
    little = encoded(Image.fromarray(values), "TIFF")
    big = Image.frombytes("I;16B", (3, 1), values.astype(">u2").tobytes())
    for data in (little, encoded(big, "TIFF")):
        assert np.asarray(decode(data, "x"))[0, :, 0].tolist() == [0, 10, 255]


def test_floats_are_stretched():
    values = np.array([[-1.0, 0.0, 1.0]], dtype=np.float32)
    assert np.asarray(decode(encoded(Image.fromarray(values), "TIFF"), "x"))[0, :, 0].tolist() == [
        0,
        128,
        255,
    ]
    negative = np.array([[-3.0, -1.0]], dtype=np.float32)
    assert np.asarray(decode(encoded(Image.fromarray(negative), "TIFF"), "x"))[0, :, 0].tolist() == [0, 255]


def test_a_constant_float_is_black():
    values = np.full((2, 2), 0.5, dtype=np.float32)
    assert not np.asarray(decode(encoded(Image.fromarray(values), "TIFF"), "x")).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_picture_of_no_number_is_refused(value, refused):
    data = encoded(Image.fromarray(np.array([[0, value]], dtype=np.float32)), "TIFF")
    with refused("IMAGE-READ", 3, "here.tif", "NaN or infinite"):
        decode(data, "here.tif")


def test_wide_integers_are_stretched():
    values = np.array([[0, 1 << 20]], dtype=np.int32)
    assert np.asarray(decode(encoded(Image.fromarray(values), "TIFF"), "x"))[0, :, 0].tolist() == [0, 255]


# what is no picture


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an empty file"),
        (b"hello, I am a text", "starting with"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "starting with"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "starting with"),
        (PICTURES["rgb jpeg"][:-40], "truncated"),
        (PICTURES["rgb png"][:60], "cannot be read"),
        (b"\0" * 4096, "starting with"),
    ],
)
def test_what_is_no_picture_is_named(data, said, refused):
    with refused("IMAGE-READ", 3, "a/b.jpg", said):
        decode(data, "a/b.jpg")


def test_names_are_shown_escaped(refused):
    with refused("IMAGE-READ", 3, r"a\x1b[2J.jpg"):
        decode(b"x", "a\x1b[2J.jpg")


def declared(width, height):
    """A PNG that says it is of that size, in a hundred bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "size", [(13_378, 13_377), (30_000, 30_000), (1 << 30, 1 << 30), (MOST_PIXELS + 1, 1)]
)
def test_bombs_are_refused_before_they_are_unpacked(size, refused):
    with peak_below(20), refused("IMAGE-BOMB", 4, "bomb.png"):
        decode(declared(*size), "bomb.png")


def test_the_largest_picture_is_merely_incomplete(refused):
    with refused("IMAGE-READ", 3):
        decode(declared(10_000, 1), "x")


def test_the_limit_does_not_depend_on_pillow_s(monkeypatch, refused):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with refused("IMAGE-BOMB", 4):
        decode(declared(20_000, 20_000), "x")


def only_our_errors(data):
    try:
        assert decode(data, "fuzz").mode == "RGB"
    except AnisoError as e:
        assert e.code in ("IMAGE-READ", "IMAGE-BOMB")


@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes_give_only_our_errors(data):
    only_our_errors(data)


@FUZZ
@given(st.sampled_from(sorted(PICTURES)), st.floats(0, 1))
def test_truncated_pictures_give_only_our_errors(name, share):
    only_our_errors(PICTURES[name][: int(share * len(PICTURES[name]))])


@FUZZ
@given(
    st.sampled_from(sorted(PICTURES)),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_altered_pictures_give_only_our_errors(name, changes):
    data = bytearray(PICTURES[name])
    for place, value in changes:
        data[place % len(data)] = value
    only_our_errors(bytes(data))


# pictures that are not in files of their own


def test_arrays_are_pictures():
    images = ArrayImages(NOISE[None, ..., :3], "train")
    assert images.ids == ("train/0",)
    assert images.open(0).tobytes() == RGB.tobytes()
    assert images.content(0) == RGB.tobytes()
    assert ArrayImages(NOISE[None, ..., 0], "x").open(0).tobytes() == GREY.convert("RGB").tobytes()


def test_crops_stay_inside(refused):
    whole = ArrayImages(NOISE[None, ..., :3].repeat(3, 0), "x")
    boxes = [(1, 2, 4, 5), (-5, 3, 1 << 30, 1 << 30), (9, 0, 12, 7)]
    images = CroppedImages(whole, boxes, ["a", "b", "c"])
    assert images.open(0).tobytes() == RGB.crop((1, 2, 4, 5)).tobytes()
    assert images.open(1).size == (9, 4)
    assert images.content(0) != images.content(1)
    with refused("IMAGE-READ", 3, "x/2 (9, 0, 12, 7)", "outside"):
        images.open(2)


def test_chosen_images_are_the_same_pictures(tmp_path):
    (tmp_path / "a.png").write_bytes(PICTURES["rgb png"])
    files = FileImages(tmp_path, ["a.png"])
    chosen = ChosenItems([ArrayImages(NOISE[None, ..., 0], "x"), files], [(1, 0), (0, 0)])
    assert chosen.ids == ("a.png", "x/0")
    assert chosen.content(0) == PICTURES["rgb png"]
    assert chosen.describe(0) == str(tmp_path / "a.png")
    assert chosen.open(1).size == (9, 7)
