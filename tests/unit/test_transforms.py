"""Views: the libraries' own pictures to the last bit but one, and randomness that is only the generator's."""

from __future__ import annotations

import json
import pickle

import numpy
import pytest
import torch
from PIL import Image

from aniso.models import transforms
from aniso.models.transforms import CHANGES, CLIP_MEAN, CLIP_STD, Crop, Pixels, Strong, Transforms, Whole

SIZES = {
    "landscape": (61, 37),
    "portrait": (37, 61),
    "square": (50, 50),
    "as large": (32, 32),
    "tiny": (5, 7),
    "a pixel": (1, 1),
    "a pixel wide": (1, 40),
    "a pixel high": (40, 1),
    "large": (240, 170),
}
CLIP = Pixels(32)


def picture(width, height, seed=0):
    """Smooth areas, edges and noise."""
    rng = numpy.random.default_rng(seed)
    y, x = numpy.mgrid[:height, :width]
    waves = [128 + 100 * numpy.sin(x / (3 + c) + y / (7 - c)) for c in range(3)]
    values = numpy.stack(waves, -1) + rng.normal(0, 15, (height, width, 3))
    values[: height // 3, : width // 2] = (255, 0, 30)
    return Image.fromarray(values.clip(0, 255).astype(numpy.uint8))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def whole(pixels, image):
    return Whole(pixels)(image, generator())


def close(found, expected):
    """Within one step of eight bits."""
    assert found.dtype == expected.dtype == torch.uint8
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= 1
    return True


# the view for looking


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", SIZES)
def test_the_middle_is_torchvision_s(size, interpolation):
    from torchvision.transforms import v2

    image = picture(*SIZES[size])
    mode = v2.InterpolationMode(interpolation)
    pipeline = v2.Compose([v2.Resize(32, interpolation=mode, antialias=True), v2.CenterCrop(32)])
    found = whole(Pixels(32, interpolation=interpolation), image)
    assert found.shape == (3, 32, 32)
    assert torch.equal(found, pipeline(v2.functional.pil_to_tensor(image)))
    assert close(found, v2.functional.pil_to_tensor(pipeline(image)))


@pytest.mark.parametrize("size", SIZES)
def test_the_middle_is_open_clip_s(size):
    open_clip = pytest.importorskip("open_clip")
    image = picture(*SIZES[size])
    theirs = open_clip.image_transform(32, is_train=False, mean=CLIP_MEAN, std=CLIP_STD)(image)
    ours = Whole(CLIP).finish(whole(CLIP, image))
    assert (ours - theirs).abs().max() <= 1.01 / 255 / min(CLIP_STD)


@pytest.mark.parametrize("resize", ["squash", "shortest"])
def test_open_clip_s_ways_of_resizing(resize):
    open_clip = pytest.importorskip("open_clip")
    image = picture(*SIZES["landscape"])
    theirs = open_clip.image_transform(
        32, is_train=False, mean=(0.5,) * 3, std=(0.5,) * 3, resize_mode=resize, interpolation="bilinear"
    )(image)
    pixels = Pixels(32, (0.5,) * 3, (0.5,) * 3, "bilinear", resize)
    assert (Whole(pixels).finish(whole(pixels, image)) - theirs).abs().max() <= 1.01 / 255 / 0.5


def processed(processor, image):
    return processor(images=image, return_tensors="pt")["pixel_values"][0]


@pytest.mark.parametrize("size", SIZES)
def test_the_middle_is_transformers_s(size):
    transformers = pytest.importorskip("transformers")
    image = picture(*SIZES[size])
    settings = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    theirs = processed(transformers.CLIPImageProcessor(**settings), image)
    ours = Whole(CLIP).finish(whole(CLIP, image))
    assert (ours - theirs).abs().max() <= 1.01 / 255 / min(CLIP_STD)


class Network:
    """As much of a network as is asked how large its pictures are."""

    def __init__(self, image_size):
        self.config = type("Config", (), {"image_size": image_size})


def agree(path, processor, network=None):
    """The directory's processor and the view made of its file give the same pictures."""
    from aniso.models.hugging_face import processor_pixels

    pixels = processor_pixels(path, (network or Network(32)).config.image_size or 224)
    # of half a pixel too much transformers takes the left side, torchvision and open_clip the even one
    for size in ((90, 45), (45, 90), (50, 50), (240, 120)):
        image = picture(*size)
        theirs, ours = processed(processor, image), Whole(pixels).finish(whole(pixels, image))
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1.01 / 255 / min(pixels.std)
    return True


def test_a_clip_processor_s_file_is_followed(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    other = transformers.CLIPImageProcessor(
        **settings, image_mean=[0.1, 0.2, 0.3], image_std=[0.3, 0.2, 0.4], resample=2
    )
    other.save_pretrained(tmp_path)
    assert agree(tmp_path, other)


def test_what_no_file_says_is_clip_s(tmp_path):
    from aniso.models.hugging_face import processor_pixels

    assert processor_pixels(tmp_path, 32) == CLIP
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": "x", "image_std": [1, 2]}))
    found = processor_pixels(tmp_path, 32)
    assert (found.mean, found.std) == (CLIP_MEAN, CLIP_STD)


def test_a_processor_s_file_of_transformers_5_is_followed(tmp_path):
    """There the image processor's settings are a part of processor_config.json."""
    transformers = pytest.importorskip("transformers")
    settings = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    other = transformers.CLIPImageProcessor(**settings, image_mean=[0.1, 0.2, 0.3], resample=2)
    other.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": said}))
    assert agree(tmp_path, other)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("CLIPImageProcessor", {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 46}, "crop_size": {"height": 32, "width": 32}}),
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 32}, "crop_pct": 0.875}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, "crop_pct": 0.95}),
        ("BitImageProcessor", {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}),
    ],
)
def test_a_classifier_s_processor_is_followed(tmp_path, kind, settings):
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, kind)(**settings)
    processor.save_pretrained(tmp_path)
    assert agree(tmp_path, processor)


def test_a_processor_that_squashes_and_then_cuts_is_followed(tmp_path):
    transformers = pytest.importorskip("transformers")
    processor = transformers.DeiTImageProcessor(
        size={"height": 40, "width": 40}, crop_size={"height": 32, "width": 32}
    )
    processor.save_pretrained(tmp_path)
    assert agree(tmp_path, processor)


@pytest.mark.parametrize("margin", [0.875, 0.9, 0.95, 1.0])
def test_a_margin_is_timm_s(margin):
    timm_data = pytest.importorskip("timm.data")
    theirs = timm_data.create_transform((3, 32, 32), interpolation="bicubic", crop_pct=margin, mean=CLIP_MEAN,
                                        std=CLIP_STD, crop_mode="center")  # fmt: skip
    pixels = Pixels(32, margin=margin)
    for size in SIZES.values():
        image = picture(*size)
        ours = Whole(pixels).finish(whole(pixels, image))
        assert (ours - theirs(image)).abs().max() <= 1.01 / 255 / min(CLIP_STD)


@pytest.mark.parametrize("margin", [0.8, 0.95])
def test_a_margin_around_a_squashed_picture_is_timm_s(margin):
    timm_data = pytest.importorskip("timm.data")
    theirs = timm_data.create_transform((3, 32, 32), interpolation="bicubic", crop_pct=margin, mean=CLIP_MEAN,
                                        std=CLIP_STD, crop_mode="squash")  # fmt: skip
    pixels = Pixels(32, resize="squash", margin=margin)
    image = picture(*SIZES["landscape"])
    ours = Whole(pixels).finish(whole(pixels, image))
    assert (ours - theirs(image)).abs().max() <= 1.01 / 255 / min(CLIP_STD)


def test_looking_is_never_random():
    image = picture(*SIZES["landscape"])
    rng = generator(3)
    before = rng.get_state()
    first = Whole(CLIP)(image, rng)
    assert torch.equal(Whole(CLIP)(image, generator(99)), first)
    assert torch.equal(rng.get_state(), before)


# the last step


@pytest.mark.parametrize("view", [Whole(CLIP), Crop(CLIP, 0.9), Strong(CLIP)])
def test_finishing_is_torchvision_s_normalize(view):
    from torchvision.transforms.v2 import functional

    stack = torch.randint(0, 256, (4, 3, 8, 8), generator=generator(), dtype=torch.uint8)
    before = stack.clone()
    expected = functional.normalize(stack.float() / 255, list(CLIP_MEAN), list(CLIP_STD))
    found = view.finish(stack)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(stack, before)
    assert torch.equal(view.finish(stack[2]), found[2])


def test_every_value_of_eight_bits_is_finished_right():
    every = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    found = Whole(Pixels(8, (0.1, 0.5, 0.9), (0.2, 0.5, 1.0))).finish(every)
    exact = torch.arange(256, dtype=torch.float64) / 255
    expected = torch.stack([(exact - m) / s for m, s in ((0.1, 0.2), (0.5, 0.5), (0.9, 1.0))])[:, None]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


# a random piece


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "view", [Crop(CLIP, 0.9), Crop(CLIP, 0.5, flip=True), Strong(CLIP)], ids=lambda v: v.name
)
def test_any_picture_becomes_one_of_the_right_size(size, view):
    image = picture(*SIZES[size])
    for seed in range(5):
        made = view(image, generator(seed))
        assert (made.dtype, made.shape) == (torch.uint8, (3, 32, 32))
        assert torch.isfinite(view.finish(made)).all()


def pieces(monkeypatch, least, size, count=400):
    """Shares of the area and ratios of the sides of what is cut out."""
    width, height = size
    seen = []

    def scaled(self, pixels, tall, wide):
        seen.append(tuple(pixels.shape[-2:]))
        return torch.zeros(3, tall, wide, dtype=torch.uint8)

    monkeypatch.setattr(Pixels, "scaled", scaled)
    image, rng = picture(width, height), generator(1)
    for _ in range(count):
        Crop(CLIP, least)(image, rng)
    return [(h * w / (height * width), w / h) for h, w in seen]


@pytest.mark.parametrize("least", [0.5, 0.9])
@pytest.mark.parametrize("size", [(200, 200), (260, 200)])
def test_pieces_are_as_large_and_as_long_as_they_may_be(monkeypatch, least, size):
    found = pieces(monkeypatch, least, size)
    shares, ratios = ([part[i] for part in found] for i in range(2))
    assert min(shares) >= least - 0.01
    assert max(shares) <= 1
    assert 3 / 4 - 0.01 <= min(ratios) < max(ratios) <= 4 / 3 + 0.01
    assert max(shares) - min(shares) > 0.8 * (1 - least)
    assert len(set(found)) > 100


def test_pieces_are_spread_as_torchvision_s_are(monkeypatch):
    from torchvision.transforms import RandomResizedCrop

    ours = torch.tensor(pieces(monkeypatch, 0.5, (200, 200), 1500))
    torch.manual_seed(0)
    blank = torch.zeros(3, 200, 200)
    cuts = [RandomResizedCrop.get_params(blank, [0.5, 1], [3 / 4, 4 / 3]) for _ in range(1500)]
    theirs = torch.tensor([(h * w / 200**2, w / h) for _, _, h, w in cuts])
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), rtol=0, atol=0.015)
    torch.testing.assert_close(ours.std(0), theirs.std(0), rtol=0, atol=0.015)


def test_the_whole_picture_is_a_piece_of_it(monkeypatch):
    found = pieces(monkeypatch, 1.0, (90, 90), 50)
    assert all(share > 0.98 for share, _ in found)


@pytest.mark.parametrize(("size", "ratio"), [((300, 10), 4 / 3), ((10, 300), 3 / 4)])
def test_a_picture_too_long_for_any_piece_gives_its_middle(monkeypatch, size, ratio):
    found = pieces(monkeypatch, 0.9, size, 20)
    assert len(set(found)) == 1
    assert found[0][1] == pytest.approx(ratio, rel=0.1)


def test_pieces_are_cut_everywhere():
    """Each half of a black and white picture is at times most of the piece."""
    image = Image.fromarray(
        numpy.repeat(numpy.uint8([0] * 50 + [255] * 50)[None, :, None], 3, 2).repeat(100, 0)
    )
    rng = generator(2)
    means = [Crop(CLIP, 0.5)(image, rng).float().mean().item() / 255 for _ in range(200)]
    assert min(means) < 0.4 < 0.6 < max(means)
    assert sum(means) / 200 == pytest.approx(0.5, abs=0.03)


def test_half_of_the_pieces_are_mirrored_if_asked_for():
    ramp = numpy.linspace(0, 255, 64).astype(numpy.uint8)[None, :, None].repeat(64, 0).repeat(3, 2)
    image, rng = Image.fromarray(ramp), generator(4)

    def mirrored(view):
        made = view(image, rng).float()
        return bool(made[..., :8].mean() > made[..., -8:].mean())

    count = sum(mirrored(Crop(CLIP, 0.9, flip=True)) for _ in range(400))
    assert 150 < count < 250
    assert not any(mirrored(Crop(CLIP, 0.9)) for _ in range(50))


def test_a_piece_is_the_piece_scaled(monkeypatch):
    from torchvision.transforms.v2 import functional

    image = picture(80, 60)
    monkeypatch.setattr(transforms, "_piece", lambda *_: (10, 20, 30, 40))
    part = functional.pil_to_tensor(image)[:, 10:40, 20:60]
    expected = functional.resize(part, [32, 32], functional.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(Crop(CLIP, 0.5)(image, generator()), expected)


# what is random, and what is not

RANDOM = [Crop(CLIP, 0.5), Crop(CLIP, 0.5, flip=True), Strong(CLIP)]


@pytest.mark.parametrize("view", RANDOM)
def test_the_generator_alone_decides(view):
    import random

    image = picture(*SIZES["large"])
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        rng = generator(7)
        made.append([view(image, rng) for _ in range(25)])
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert numpy.random.get_state()[1].tolist() == states[2]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert len({tuple(v.flatten().tolist()) for v in made[0]}) > 20
    other = [view(image, generator(8)) for _ in range(1)]
    assert not torch.equal(other[0], made[0][0])


def test_strong_views_differ_from_plain_ones_and_from_each_other():
    image, plain, rng = picture(*SIZES["large"]), whole(CLIP, picture(*SIZES["large"])), generator(3)
    views = [Strong(CLIP)(image, rng) for _ in range(60)]
    assert all(v.dtype == torch.uint8 and v.shape == (3, 32, 32) for v in views)
    distances = [(v.float() - plain.float()).abs().mean().item() for v in views]
    assert sum(d > 10 for d in distances) > 40


def numbers(*names):
    """Places of changes in the list."""
    order = ["autocontrast", "equalize", "identity", "brightness", "contrast", "saturation", "sharpness",
             "posterize", "solarize", "turn", "shear x", "shear y", "shift x", "shift y"]  # fmt: skip
    return [order.index(name) for name in names or order]


@pytest.mark.parametrize("number", [n for n in numbers() if n not in numbers("solarize")])
def test_every_change_works_wherever_its_strength_falls(monkeypatch, number):
    every_strength(monkeypatch, number)


def test_solarizing_works_wherever_its_strength_falls(monkeypatch):
    """torchvision refuses a threshold beyond the largest value there is."""
    every_strength(monkeypatch, *numbers("solarize"))


def every_strength(monkeypatch, number):
    image = whole(CLIP, picture(*SIZES["large"]))
    for share in (0, 0.25, 0.5, 0.75, 1 - 2**-24):
        monkeypatch.setattr(
            transforms, "_uniform", lambda rng, low=0.0, high=1.0, s=share: low + (high - low) * s
        )
        before = image.clone()
        made = CHANGES[number](image, generator())
        assert (made.dtype, made.shape) == (torch.uint8, image.shape)
        assert torch.equal(image, before)  # views of one picture may share it


def test_changes_are_of_many_kinds():
    image = whole(CLIP, picture(*SIZES["large"]))
    made = [change(image, generator(1)) for change in CHANGES]
    assert len(CHANGES) == 14  # FixMatch's list
    assert sum(torch.equal(view, image) for view in made) <= 3
    assert len({tuple(view.flatten().tolist()) for view in made}) > 10


def test_the_grey_patch_hides_no_more_than_a_quarter(monkeypatch):
    white = torch.full((3, 32, 32), 255, dtype=torch.uint8)
    shares = []
    for seed in range(300):
        view = transforms._patched(white, generator(seed))
        grey = (view == 127).all(0)
        assert bool(((view == 255).all(0) | grey).all())
        shares.append(grey.float().mean().item())
    assert max(shares) <= 0.25
    assert max(shares) > 0.15
    assert torch.equal(white, torch.full_like(white, 255))


# the views of one model


def test_the_views_of_a_model():
    views = Transforms(Pixels(24))
    assert views.eval == Whole(Pixels(24))
    assert (views.train.least, views.train.flip) == (0.9, False)
    assert (views.few_shot.least, views.few_shot.flip) == (0.5, True)
    assert (views.strong.least, views.strong.changes) == (0.5, 2)
    names = [view.name for view in (views.eval, views.train, views.few_shot, views.strong)]
    assert names == ["eval", "train", "few-shot", "strong"]
    assert views.train is views.train


def test_views_cross_processes():
    image = picture(*SIZES["large"])
    views = pickle.loads(pickle.dumps(Transforms(CLIP)))
    for name in ("eval", "train", "few_shot", "strong"):
        view = getattr(Transforms(CLIP), name)
        assert pickle.loads(pickle.dumps(view)) == view == getattr(views, name)
        assert torch.equal(getattr(views, name)(image, generator(1)), view(image, generator(1)))
