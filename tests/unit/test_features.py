"""Features: what a model says to pictures, and a cache that finds them only if nothing has changed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import colours
import pictures
import pytest
import torch
from torch import nn

from aniso.compose import Composition, Linearised, Partition
from aniso.data import Task, load_task, sampling
from aniso.learn import Trainable
from aniso.learn.evaluate import evaluate, predict
from aniso.learn.features import FeatureCache, encoder_of, feature_identity, features, iterate_features
from aniso.learn.heads import TipAdapter
from aniso.models.transforms import Transforms

Refused = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> colours.World:
    return colours.world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache" / "features")


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """How many pictures went through a model, call by call."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda m, args: calls.append(len(args[0])))
    try:
        yield calls
    finally:
        handle.remove()


def moved(world: colours.World, value: float = 0.5, partition: Partition | None = None) -> Composition:
    made = world.composition(partition)
    with torch.no_grad():
        made.values.fill_(value)
    return made


# what they are


def test_features_are_views_by_pictures_by_width(world: colours.World) -> None:
    split = world.target.split("train")
    found = features(world.encoder, split, view="few_shot", views=3)
    assert found.shape == (3, len(split), world.encoder.class_weights(split.classes).weight.shape[1])
    assert found.dtype == torch.float32
    assert not found.requires_grad


@pytest.mark.parametrize("view", ["eval", "few_shot", "train"])
@pytest.mark.parametrize("composed", [False, True])
def test_features_are_what_the_model_says_to_a_view(world: colours.World, view: str, composed: bool) -> None:
    split = world.control.split("val")
    model: nn.Module = moved(world) if composed else world.encoder
    found = features(model, split, view=view, views=2, seed=7, batch_size=5)
    seen = getattr(world.encoder.transforms, view)
    for number in range(2):
        for place in range(len(split)):
            words = (7, number, split.keys[place], 0, seen.name, 0)
            rng = torch.Generator().manual_seed(sampling.number(*words))
            drawn = seen.finish(seen(split.open(place), rng)[None])
            with torch.no_grad():
                torch.testing.assert_close(found[number, place], model(drawn)[0], rtol=1e-4, atol=1e-5)


def test_seeds_decide_random_views_and_nothing_else(world: colours.World) -> None:
    split = world.target.split("val")
    first = features(world.encoder, split, view="few_shot", views=2, seed=1)
    torch.manual_seed(99)
    assert torch.equal(first, features(world.encoder, split, view="few_shot", views=2, seed=1))
    assert not torch.equal(first, features(world.encoder, split, view="few_shot", views=2, seed=2))
    assert not torch.equal(first[0], first[1])
    more = features(world.encoder, split, view="few_shot", views=3, seed=1)
    assert torch.equal(more[:2], first)


def test_the_view_of_evaluation_is_the_same_for_every_seed(world: colours.World) -> None:
    split = world.target.split("val")
    found = [features(world.encoder, split, views=views, seed=seed) for views, seed in ((1, 0), (2, 5))]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[1][0], found[1][1])


def test_the_size_of_batches_does_not_matter(world: colours.World) -> None:
    split = world.target.split("train")
    found = [features(world.encoder, split, view="train", batch_size=batch) for batch in (1, 7, 256)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_pictures_without_labels_have_features_too(world: colours.World) -> None:
    split = world.target.split("val")
    assert torch.equal(features(world.encoder, split.unlabelled()), features(world.encoder, split))


@pytest.mark.parametrize("mode", [True, False])
def test_a_models_mode_is_as_it_was(world: colours.World, mode: bool) -> None:
    model = moved(world).train(mode)
    features(model, world.target.split("val"))
    assert model.training is mode
    batches = iterate_features(model, world.target.split("train"), batch_size=2)
    next(batches)
    assert not model.training  # in between
    del batches
    assert model.training is mode


def test_progress_is_told_over_all_views(world: colours.World) -> None:
    seen: list[tuple[str, int, int]] = []
    features(
        world.encoder,
        world.target.split("val"),
        views=2,
        batch_size=6,
        progress=lambda *said: seen.append(said),
    )
    assert seen == [("features of target val", done, 20) for done in (6, 10, 16, 20)]


def test_what_is_no_encoder_gives_no_features(world: colours.World, refused: Refused) -> None:
    with refused("MODEL-NAME", 2, "Linear"):
        features(nn.Linear(2, 2), world.target.split("val"))


# the cache


USUAL: dict[str, Any] = {"view": "few_shot", "views": 2, "seed": 3}


def test_the_second_time_the_model_is_not_asked(world: colours.World, cache: FeatureCache) -> None:
    model = moved(world)
    first = features(model, world.target.split("val"), cache=cache, **USUAL)
    with counted(model) as calls:
        again = features(model, world.target.split("val"), cache=cache, **USUAL)
        assert calls == []
        features(
            moved(world), world.target.split("val"), cache=cache, **USUAL
        )  # nor is another that is the same
    assert torch.equal(first, again)
    assert again.shape == first.shape
    assert calls == []
    with counted(model) as calls:
        features(model, world.target.split("val"), **USUAL)  # without a cache
    assert sum(calls) == 20


def test_every_seed_finds_the_view_of_evaluation(world: colours.World, cache: FeatureCache) -> None:
    features(world.encoder, world.target.split("val"), seed=1, cache=cache)
    with counted(world.encoder) as calls:
        features(world.encoder, world.target.split("val"), seed=2, cache=cache)
    assert calls == []


@pytest.mark.parametrize(
    "other", [{"view": "train"}, {"view": "eval"}, {"views": 1}, {"views": 3}, {"seed": 4}], ids=str
)
def test_other_views_are_not_found(world: colours.World, cache: FeatureCache, other: dict[str, Any]) -> None:
    split = world.target.split("val")
    features(world.encoder, split, cache=cache, **USUAL)
    with counted(world.encoder) as calls:
        found = features(world.encoder, split, cache=cache, **{**USUAL, **other})
    assert sum(calls) == len(found) * len(split)
    assert torch.equal(found, features(world.encoder, split, **{**USUAL, **other}))


def reversed_order(world: colours.World) -> tuple[nn.Module, Any]:
    split = world.target.split("val")
    return world.encoder, split.take(reversed(range(len(split))))


def fewer(world: colours.World) -> tuple[nn.Module, Any]:
    return world.encoder, world.target.split("val").take(range(9))


def a_base_weight(world: colours.World) -> tuple[nn.Module, Any]:
    other = copy.deepcopy(world.encoder)
    key = other.layout.blocks[3].parts[0].key
    with torch.no_grad():
        dict(other.named_parameters())[key].view(-1)[0].mul_(1.001)
    return other, world.target.split("val")


def other_pixels(world: colours.World) -> tuple[nn.Module, Any]:
    other = copy.deepcopy(world.encoder)
    other.transforms = Transforms(replace(world.encoder.transforms.pixels, mean=(0.5, 0.5, 0.5)))
    return other, world.target.split("val")


def another_activation(world: colours.World) -> tuple[nn.Module, Any]:
    """No weight tells it."""
    other = copy.deepcopy(world.encoder)
    other.model_config = replace(other.model_config, activation="relu")
    return other, world.target.split("val")


def composed_with_zeros(world: colours.World) -> tuple[nn.Module, Any]:
    return world.composition(), world.target.split("val")


@pytest.mark.parametrize(
    "change",
    [reversed_order, fewer, a_base_weight, other_pixels, another_activation, composed_with_zeros],
)
def test_another_model_or_other_pictures_are_not_found(
    world: colours.World,
    cache: FeatureCache,
    change: Callable[[colours.World], tuple[nn.Module, Any]],
) -> None:
    features(world.encoder, world.target.split("val"), cache=cache)
    model, split = change(world)
    with counted(model) as calls:
        found = features(model, split, cache=cache)
    assert sum(calls) == len(split)
    assert torch.equal(found, features(model, split))


def test_another_coefficient_is_not_found(world: colours.World, cache: FeatureCache) -> None:
    model = moved(world)
    features(model, world.target.split("val"), cache=cache)
    with torch.no_grad():
        model.values[5] += 1e-6
    with counted(model) as calls:
        found = features(model, world.target.split("val"), cache=cache)
    assert sum(calls) == 10
    assert torch.equal(found, features(model, world.target.split("val")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pictures.folder(tmp_path / "folder", {"red": 5, "blue": 5})


def of_folder(folder: Path) -> Task:
    return load_task(folder)


def test_another_picture_under_the_same_name_is_not_found(
    world: colours.World, cache: FeatureCache, folder: Path
) -> None:
    split = of_folder(folder).split("train")
    before = features(world.encoder, split, cache=cache)
    path = Path(split.items.describe(1))
    status = path.stat()
    path.write_bytes(pictures.encoded(777))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its date tells nothing
    with counted(world.encoder) as calls:
        after = features(world.encoder, split, cache=cache)
    assert sum(calls) == len(split)
    changed = [i for i in range(len(split)) if not torch.allclose(before[0, i], after[0, i], atol=1e-5)]
    assert changed == [1]


def truncated(data: bytes) -> bytes:
    return data[:-5]


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def emptied(data: bytes) -> bytes:
    return b""


def garbage(data: bytes) -> bytes:
    return b"\xff" * len(data)


@pytest.mark.parametrize("damage", [truncated, flipped, emptied, garbage])
def test_a_damaged_file_is_as_good_as_none(
    world: colours.World, cache: FeatureCache, damage: Callable[[bytes], bytes]
) -> None:
    assert cache.directory is not None
    first = features(world.encoder, world.target.split("val"), cache=cache)
    (path,) = cache.directory.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with counted(world.encoder) as calls:
        assert torch.equal(features(world.encoder, world.target.split("val"), cache=cache), first)
    assert sum(calls) == 10
    assert path.read_bytes() == whole  # and whole again


def test_a_directory_in_the_place_of_a_file_is_no_error(world: colours.World, cache: FeatureCache) -> None:
    assert cache.directory is not None
    first = features(world.encoder, world.target.split("val"), cache=cache)
    (path,) = cache.directory.iterdir()
    path.unlink()
    path.mkdir()
    assert torch.equal(features(world.encoder, world.target.split("val"), cache=cache), first)


def test_a_place_that_cannot_be_written_to_is_no_error(world: colours.World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "features", Path("/proc/aniso")):
        found = features(world.encoder, world.target.split("val"), cache=FeatureCache(place))
        assert torch.equal(found, features(world.encoder, world.target.split("val")))
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    kept = {name: torch.full((1, 100), float(i)) for i, name in enumerate("abc")}
    probe = FeatureCache(tmp_path / "probe")
    probe.put("a", kept["a"])
    assert probe.directory is not None
    size = next(probe.directory.iterdir()).stat().st_size
    cache = FeatureCache(tmp_path / "cache", limit=2 * size)
    assert cache.directory is not None
    for age, name in ((200, "a"), (100, "b")):
        cache.put(name, kept[name])
        (path,) = cache.directory.glob(f"*-{name}.safetensors")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert cache.get("a") is not None  # used now, so the other one goes
    cache.put("c", kept["c"])
    found = {name: cache.get(name) for name in "abc"}
    assert found["b"] is None
    for name in "ac":
        stored = found[name]
        assert stored is not None and torch.equal(stored, kept[name])


def test_room_for_nothing_is_no_error(world: colours.World, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "cache", limit=0)
    first = features(world.encoder, world.target.split("val"), cache=cache)
    assert torch.equal(features(world.encoder, world.target.split("val"), cache=cache), first)
    assert list((tmp_path / "cache").iterdir()) == []


def test_nothing_is_kept_without_a_directory() -> None:
    cache = FeatureCache(None)
    cache.put("a", torch.zeros(2))
    assert cache.get("a") is None


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ({"ANISO_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one/features"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/aniso/features"),
        ({"HOME": "/home/me"}, "/home/me/.cache/aniso/features"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/aniso/features"),
    ],
    ids=str,
)
def test_the_usual_place_is_where_the_user_says(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], place: str
) -> None:
    for name in ("ANISO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert FeatureCache.default().directory == Path(place)


# answers from features


def test_answers_are_the_same_from_a_cache(world: colours.World, cache: FeatureCache) -> None:
    split, model = world.control.split("val"), moved(world, 1.0)
    expected = predict(model, split, batch_size=5)
    for _ in range(2):
        assert torch.equal(predict(model, split, batch_size=5, cache=cache), expected)
    with counted(model) as calls:
        predict(model, split, cache=cache)
    assert calls == []
    assert len(set(expected.tolist())) > 1


def test_a_head_answers_in_the_place_of_class_weights(world: colours.World, cache: FeatureCache) -> None:
    shots, split = world.control.split("train"), world.control.split("val")
    head = TipAdapter(world.encoder.class_weights(shots.classes), alpha=1000.0)
    seen = features(world.encoder, shots)
    head.remember(seen, torch.tensor(shots.labels))
    found = predict(world.encoder, split, head=head, cache=cache)
    asked = features(world.encoder, split)[0]
    with torch.no_grad():
        assert torch.equal(found, head.logits(asked).argmax(-1))
    assert evaluate(world.encoder, split, head=head).correct == int(
        (found == torch.tensor(split.labels)).sum()
    )
    assert not torch.equal(found, predict(world.encoder, split))


# who gives them


def test_identity_is_the_models_own(world: colours.World) -> None:
    assert feature_identity(world.encoder) == {"model": world.encoder.fingerprint}
    assert encoder_of(world.composition()).name == world.encoder.name


def test_identity_changes_with_all_that_a_composition_is_made_of(world: colours.World) -> None:
    linear = Composition(Linearised(world.encoder), world.bank)
    with torch.no_grad():
        linear.values.fill_(0.5)
    alone = Composition(world.encoder, world.bank.only("one"))
    with torch.no_grad():
        alone.values.fill_(0.5)
    found = {
        "as it is": feature_identity(moved(world)),
        "coefficients": feature_identity(moved(world, 0.25)),
        "bank": feature_identity(alone),
        "partition": feature_identity(moved(world, 0.5, Partition.whole())),
        "random": feature_identity(moved(world, 0.5, Partition.parse("random:2"))),
        "seed": feature_identity(moved(world, 0.5, replace(Partition.parse("random:2"), seed=1))),
        "linearised": feature_identity(linear),
        "base": feature_identity(world.encoder),
    }
    assert len({str(sorted(one.items())) for one in found.values()}) == len(found)
    assert feature_identity(moved(world)) == found["as it is"]
    for key, others in {"coefficients": {"coefficients"}, "linearised": {"linearised"}}.items():
        assert {k for k in found[key] if found[key][k] != found["as it is"][k]} == others
    assert found["bank"]["bank"] != found["as it is"]["bank"]
    assert found["random"]["partition"] != found["seed"]["partition"]


@pytest.mark.parametrize("linearised", [False, True])
def test_running_a_composition_does_not_change_who_it_is(world: colours.World, linearised: bool) -> None:
    model = moved(world)
    if linearised:
        model = Composition(Linearised(world.encoder), world.bank).load(model.coefficients)
    before = feature_identity(model)
    features(model, world.target.split("val"))
    assert feature_identity(model) == before
    assert before["model"] == world.encoder.fingerprint


@pytest.mark.parametrize("linearised", [False, True])
def test_identity_changes_with_weights_that_are_trained(world: colours.World, linearised: bool) -> None:
    trained = Trainable.weights(world.encoder, linearised=linearised)
    before = feature_identity(trained.model)
    with torch.no_grad():
        next(iter(trained.tensors.values())).view(-1)[0].add_(1e-3)
    after = feature_identity(trained.model)
    assert before != after and before.keys() == after.keys()
