"""Class weights: the closed form, the cache that may keep them, and the words they are made of."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from aniso.classes import DEFAULT_PROMPTS, ClassList
from aniso.models import ClassWeights, WeightsCache, load_model
from aniso.models.head import of_prompts
from aniso.weights import SafetensorsFile, save_safetensors
from aniso.weights.files import RawFile

pytest.importorskip("transformers")

ANIMALS = ClassList(("cat", "dog", "ox"), ("a {}.", "{}", "my {}"))


def save_tokenizer(path, letters="abcdefghijklmnopqrstuvwxyz.,"):
    """Every letter a token, and another at the end of a word: 64 in all, as the tiny text tower has."""
    from transformers import CLIPTokenizer

    words = [letter + end for letter in letters for end in ("", "</w>")]
    words += [f"unused{i}" for i in range(62 - len(words))]
    vocabulary = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A whole tiny CLIP with a tokenizer; tests that change files take a copy."""
    path = tmp_path_factory.mktemp("clip") / "clip"
    tiny.hf_clip().save_pretrained(path)
    save_tokenizer(path)
    return path


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """No test sees another's cache, let alone the user's."""
    monkeypatch.setenv("ANISO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "class-weights"


def counted(encoder):
    """The encoder, and the batches that its text tower was given."""
    asked, run = [], encoder.family.text
    encoder.family = replace(
        encoder.family, text=lambda network, ids: asked.append(len(ids)) or run(network, ids)
    )
    return encoder, asked


def runs(encoder, classes=ANIMALS):
    """How often the text tower runs for these class weights."""
    encoder, asked = counted(encoder)
    encoder.class_weights(classes)
    return len(asked)


def copy_of(home, path, change=None):
    shutil.copytree(home, path)
    if change:
        config = json.loads((path / "config.json").read_text())
        change(config)
        (path / "config.json").write_text(json.dumps(config))
    return path


# the closed form


def by_hand(encoder, classes):
    """In 64 bits and without a batch: normalise, mean over prompts, normalise, times exp(logit_scale)."""
    rows = []
    for name in classes.names:
        total = torch.zeros(tiny.EMBED, dtype=torch.float64)
        for prompt in classes.prompts:
            (feature,) = encoder.text_features([prompt.replace("{}", name)]).double()
            total += feature / feature.square().sum().sqrt()
        mean = total / len(classes.prompts)
        rows.append(mean / mean.square().sum().sqrt() * encoder.state_dict()["logit_scale"].double().exp())
    return torch.stack(rows).float()


def test_the_closed_form(home):
    encoder = load_model(home)
    found = encoder.class_weights(ANIMALS)
    assert found.names == ANIMALS.names
    assert found.by_angle
    assert found.bias is None
    assert found.notes == ()
    torch.testing.assert_close(found.weight, by_hand(encoder, ANIMALS), rtol=1e-5, atol=1e-5)
    norms = found.weight.norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, encoder.logit_scale))


def test_it_is_what_transformers_computes(home):
    from transformers import CLIPModel, CLIPTokenizer

    library, tokenizer = CLIPModel.from_pretrained(home).eval(), CLIPTokenizer.from_pretrained(home)
    one = ClassList(("cat", "dog"), ("a {}.",))
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    encoder = load_model(home)
    with torch.no_grad():
        words = tokenizer(["a cat.", "a dog."], padding=True, return_tensors="pt")
        expected = library(pixel_values=pixels, **words).logits_per_image
        found = encoder.class_weights(one).logits(encoder(pixels))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_is_what_open_clip_computes(tmp_path):
    """With CLIP's own tokenizer and its whole vocabulary."""
    open_clip = pytest.importorskip("open_clip")
    from open_clip.model import CLIP

    config = {
        "embed_dim": tiny.EMBED,
        "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
        "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    torch.manual_seed(0)
    library = CLIP(**config).eval()
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    save_safetensors(tmp_path / "open_clip_model.safetensors", dict(library.state_dict()))
    encoder = load_model(tmp_path)
    classes = ClassList(("tabby cat", "Größe", "模型"), ("a photo of a {}.", "{}"))
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
    with torch.no_grad():
        rows = []
        for name in classes.names:
            words = tokenizer([f"a photo of a {name}.", name])
            mean = library.encode_text(words, normalize=True).mean(0)
            rows.append(mean / mean.norm() * library.logit_scale.exp())
    found = encoder.class_weights(classes)
    torch.testing.assert_close(found.weight, torch.stack(rows), rtol=1e-5, atol=1e-5)
    assert found.notes == ()
    long = encoder.class_weights(ClassList(("cat", "dog"), ("a very long photo of " * 5 + "a {}.", "{}")))
    assert len(long.notes) == 1
    assert "2 prompts were too long" in long.notes[0]
    assert "a very long photo of a cat." in long.notes[0]


def test_the_order_of_classes_is_the_order_of_rows(home):
    encoder = load_model(home)
    turned = ClassList(("ox", "cat", "dog"), ANIMALS.prompts)
    a, b = encoder.class_weights(ANIMALS), encoder.class_weights(turned)
    assert b.names == turned.names
    torch.testing.assert_close(b.weight, a.weight[[2, 0, 1]])


def test_the_order_of_prompts_does_not_matter_and_their_words_do(home):
    encoder = load_model(home)
    before = encoder.class_weights(ANIMALS).weight
    turned = encoder.class_weights(ClassList(ANIMALS.names, ANIMALS.prompts[::-1])).weight
    other = encoder.class_weights(ClassList(ANIMALS.names, (*ANIMALS.prompts[:2], "no {}"))).weight
    torch.testing.assert_close(turned, before)
    assert not torch.allclose(other, before, atol=1e-4)


def test_prompts_count_alike_however_long_their_features_are():
    short, long = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 100.0])
    made = of_prompts(torch.stack([short, long])[None], ("x",), 10.0)
    torch.testing.assert_close(made.weight, torch.tensor([[10.0, 10.0]]) / 2**0.5)


def test_logits_are_cosines_times_the_scale():
    weights = ClassWeights(("a", "b"), torch.tensor([[100.0, 0.0], [0.0, 100.0]]))
    found = weights.logits(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    torch.testing.assert_close(found, torch.tensor([[60.0, 80.0], [60.0, 80.0]]))
    assert weights.logits(torch.ones(1, 2, dtype=torch.float64)).dtype == torch.float64
    head = ClassWeights(("a", "b"), weights.weight, torch.tensor([1.0, 2.0]), by_angle=False)
    torch.testing.assert_close(head.logits(torch.tensor([[3.0, 4.0]])), torch.tensor([[301.0, 402.0]]))


def test_many_texts_are_told_of_and_come_out_in_order(home):
    names = tuple(f"{a}{b}" for a in "abcdefghijklmnopqrst" for b in "abcdefghijklmno")
    many, progress = ClassList(names, ("{}",)), []
    encoder = load_model(home)
    found = encoder.class_weights(many, progress=lambda *said: progress.append(said))
    assert progress == [("class weights", 256, 300), ("class weights", 300, 300)]
    torch.testing.assert_close(found.weight[255:258], by_hand(encoder, ClassList(names[255:258], ("{}",))))
    load_model(home).class_weights(many, progress=lambda *said: progress.append(said))
    assert len(progress) == 2  # found in the cache


def test_a_prompt_that_is_cut_off_is_named(home):
    encoder = load_model(home)
    long = ClassList(("ox", "crocodile"), ("a {}.",))
    found = encoder.class_weights(long)
    assert len(found.notes) == 1
    assert "1 prompts were too long and cut" in found.notes[0]
    assert "a crocodile." in found.notes[0]
    assert load_model(home).class_weights(long).notes == found.notes  # the cache remembers
    assert encoder.class_weights(ANIMALS).notes == ()


def test_a_prompt_that_just_fits_is_not_cut(home):
    # start, a, five letters, end: eight, which is all the room there is
    assert load_model(home).class_weights(ClassList(("tiger", "x"), ("a {}",))).notes == ()
    assert load_model(home).class_weights(ClassList(("tigers", "x"), ("a {}",))).notes != ()


# the cache


def files(kept):
    return sorted(kept.iterdir()) if kept.exists() else []


def test_a_hit_is_bit_equal_and_leaves_the_text_tower_alone(home, kept):
    encoder, asked = counted(load_model(home))
    first = encoder.class_weights(ANIMALS)
    assert (len(asked), len(files(kept))) == (1, 1)
    other, asked = counted(load_model(home))
    second = other.class_weights(ANIMALS)
    assert asked == []
    assert torch.equal(first.weight, second.weight)
    assert (first.names, first.notes, first.by_angle) == (second.names, second.notes, second.by_angle)


def test_the_same_encoder_asked_again_hits_too(home, kept):
    """A tokenizer remembers how it padded last; that must not make it another one."""
    encoder, asked = counted(load_model(home))
    first = encoder.class_weights(ANIMALS)
    for _ in range(2):
        assert torch.equal(encoder.class_weights(ANIMALS).weight, first.weight)
    encoder.class_weights(ClassList(("crocodile",), ("a {}.",)))  # cut, so tokenized in another way
    encoder.class_weights(ANIMALS)
    assert len(asked) == 2
    assert len(files(kept)) == 2


@pytest.mark.parametrize(
    "other",
    [
        ClassList(("cat", "dog", "ox"), ("a {}.", "{}", "my  {}")),
        ClassList(("cat", "dog", "ox"), ("{}", "a {}.", "my {}")),
        ClassList(("dog", "cat", "ox"), ANIMALS.prompts),
        ClassList(("cat", "dog"), ANIMALS.prompts),
        ClassList(("cat", "dog", "Ox"), ANIMALS.prompts),
    ],
)
def test_other_words_are_another_key(home, other):
    assert other.key != ANIMALS.key
    assert runs(load_model(home)) == 1
    assert runs(load_model(home), other) == 1
    assert runs(load_model(home)) == runs(load_model(home), other) == 0


TEXT_WEIGHTS = [
    "text_model.embeddings.token_embedding.weight",
    "text_model.encoder.layers.1.self_attn.q_proj.bias",
    "text_projection.weight",
    "logit_scale",
]


@pytest.mark.parametrize("name", TEXT_WEIGHTS)
def test_a_text_weight_written_to_is_another_key(home, name):
    encoder = load_model(home)
    before = encoder.class_weights(ANIMALS).weight
    with torch.no_grad():
        dict(encoder.named_parameters())[name].view(-1)[0].add_(0.5)
    encoder, asked = counted(encoder)
    after = encoder.class_weights(ANIMALS).weight
    assert len(asked) == 1
    if name != TEXT_WEIGHTS[0]:  # the first token appears in no prompt
        assert not torch.equal(before, after)
    assert runs(load_model(home)) == 0  # what was there before is found as before


def test_loading_other_weights_is_another_key_and_back_is_the_old_one(home):
    encoder = load_model(home)
    whole = {key: value.clone() for key, value in encoder.state_dict().items()}
    before = encoder.class_weights(ANIMALS).weight
    encoder.load_state_dict(tiny.tuned(whole, scale=0.2))
    assert not torch.allclose(encoder.class_weights(ANIMALS).weight, before)
    encoder.load_state_dict(whole)
    assert torch.equal(encoder.class_weights(ANIMALS).weight, before)


def test_an_image_weight_is_no_part_of_the_key(home, kept):
    encoder = load_model(home)
    tuned = tiny.tuned_vision(encoder.state_dict(), tiny.is_hf_vision)
    before = encoder.class_weights(ANIMALS).weight
    other, asked = counted(load_model(home, weights=tuned))
    assert torch.equal(other.class_weights(ANIMALS).weight, before)
    assert asked == []
    assert len(files(kept)) == 1


@pytest.mark.parametrize("both", [True, False])
def test_the_activation_is_part_of_the_key(tmp_path, home, both):
    def change(config):
        config["text_config"]["hidden_act"] = "quick_gelu"
        if both:
            config["vision_config"]["hidden_act"] = "quick_gelu"

    before = load_model(home).class_weights(ANIMALS).weight
    other, asked = counted(load_model(copy_of(home, tmp_path / "quick", change)))
    assert not torch.allclose(other.class_weights(ANIMALS).weight, before, atol=1e-6)
    assert len(asked) == 1


@pytest.mark.parametrize(("part", "value"), [("eos_token_id", 1), ("layer_norm_eps", 0.1), ("heads", 4)])
def test_other_settings_of_the_text_tower_are_another_key(tmp_path, home, part, value):
    def change(config):
        config["text_config"]["num_attention_heads" if part == "heads" else part] = value

    runs(load_model(home))
    assert runs(load_model(copy_of(home, tmp_path / "other", change))) == 1


def test_other_settings_of_open_clip_s_text_tower_are_another_key(tmp_path, home):
    pytest.importorskip("open_clip")
    save_safetensors(tmp_path / "w.safetensors", dict(tiny.open_clip_vit().state_dict()))
    found = []
    for pool in ("argmax", "first"):
        text = {"context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "width": tiny.WIDTH,
                "heads": 2, "layers": tiny.LAYERS, "pool_type": pool,
                "hf_tokenizer_name": "owner/name"}  # fmt: skip
        vision = {"image_size": 16, "patch_size": 8, "width": 32, "layers": tiny.LAYERS, "head_width": 16}
        config = {"embed_dim": tiny.EMBED, "vision_cfg": vision, "text_cfg": text}
        path = tmp_path / pool
        path.mkdir()
        (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
        save_tokenizer(path)
        found.append(load_model(path, weights=tmp_path / "w.safetensors").class_weights(ANIMALS).weight)
    assert not torch.allclose(*found, atol=1e-4)


def test_the_tokenizer_is_part_of_the_key(tmp_path, home):
    before = load_model(home).class_weights(ANIMALS).weight
    path = copy_of(home, tmp_path / "other")
    (path / "tokenizer.json").unlink()
    save_tokenizer(path, "zyxwvutsrqponmlkjihgfedcba.,")
    other, asked = counted(load_model(path))
    assert not torch.allclose(other.class_weights(ANIMALS).weight, before, atol=1e-4)
    assert len(asked) == 1


@pytest.mark.parametrize("said", [{"clean": "canonicalize"}, {}])
def test_a_tokenizer_s_settings_are_followed_and_part_of_the_key(tmp_path, home, said):
    """SigLIP's models have punctuation taken out before."""
    open_clip = pytest.importorskip("open_clip")
    text = {"context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "width": tiny.WIDTH, "heads": 2,
            "layers": tiny.LAYERS, "hf_tokenizer_name": "owner/name"}  # fmt: skip
    vision = {"image_size": 16, "patch_size": 8, "width": 32, "layers": tiny.LAYERS, "head_width": 16}
    prints = []
    for kwargs in (said, {**said, "clean": "lower"}):
        config = {
            "embed_dim": tiny.EMBED,
            "vision_cfg": vision,
            "text_cfg": {**text, "tokenizer_kwargs": kwargs},
        }
        (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
        save_tokenizer(tmp_path)
        encoder = load_model(tmp_path, weights=dict(tiny.open_clip_vit().state_dict()))
        theirs = open_clip.get_tokenizer(f"local-dir:{tmp_path}")
        ids, _ = encoder.family.tokens(["a Cat,."])
        assert torch.equal(ids, theirs(["a Cat,."]))
        prints.append(encoder.family.tokens.fingerprint)
    assert prints[0] != prints[1]


def rewritten(path, tensors=None, **changes):
    """A cache file whose record or tensors say something else."""
    file = SafetensorsFile(RawFile(path))
    said = {**json.loads(file.metadata["aniso"]), **changes}
    tensors = {"weight": file.read("weight")} if tensors is None else tensors
    save_safetensors(path, tensors, {"aniso": json.dumps(said)}, overwrite=True)


def record(path, text):
    file = SafetensorsFile(RawFile(path))
    save_safetensors(path, {"weight": file.read("weight")}, {"aniso": text}, overwrite=True)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "a byte": lambda path: path.write_bytes(b"\0"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "last byte lost": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "noise": lambda path: path.write_bytes(os.urandom(500)),
    "text": lambda path: path.write_text("<html>"),
    "other key": lambda path: rewritten(path, key="0" * 64),
    "other names": lambda path: rewritten(path, names=["cat", "ox", "dog"]),
    "fewer names": lambda path: rewritten(path, names=["cat", "dog"]),
    "no weight": lambda path: rewritten(path, {"wait": torch.zeros(3, 4)}),
    "a vector": lambda path: rewritten(path, {"weight": torch.zeros(3)}),
    "no record": lambda path: save_safetensors(path, {"weight": torch.zeros(3, 4)}, overwrite=True),
    "a broken record": lambda path: record(path, "{"),
}


def rebuilt(home, kept, damage):
    expected = load_model(home).class_weights(ANIMALS).weight
    (path,) = files(kept)
    damage(path)
    encoder, asked = counted(load_model(home))
    assert torch.equal(encoder.class_weights(ANIMALS).weight, expected)
    assert len(asked) == 1
    assert runs(load_model(home)) == 0  # and the file is good again
    return True


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(home, kept, damage):
    assert rebuilt(home, kept, DAMAGE[damage])


@pytest.mark.parametrize("text", ["[]", "7", "null", '"key"', "[" * 100_000])
def test_a_record_that_is_no_object_is_made_again(home, kept, text):
    assert rebuilt(home, kept, lambda path: record(path, text))


@pytest.mark.parametrize("notes", [7, None, "text", {"a": 1}])
def test_notes_that_are_no_list_are_made_again(home, kept, notes):
    assert rebuilt(home, kept, lambda path: rewritten(path, notes=notes))


def test_a_flipped_bit_is_noticed(home, kept):
    def flip(path):
        data = bytearray(path.read_bytes())
        data[-2] ^= 0x10
        path.write_bytes(data)

    assert rebuilt(home, kept, flip)


def test_fewer_rows_than_names_are_noticed(home, kept):
    assert rebuilt(home, kept, lambda path: rewritten(path, {"weight": torch.ones(2, tiny.EMBED)}))


def test_another_class_list_s_file_under_this_name_is_not_taken(home, kept):
    load_model(home).class_weights(ClassList(("a", "b", "c"), ANIMALS.prompts))
    (other,) = files(kept)
    foreign = other.read_bytes()
    other.unlink()
    assert rebuilt(home, kept, lambda path: path.write_bytes(foreign))


def test_a_directory_in_the_place_of_a_file_does_no_harm(home, kept):
    expected = load_model(home).class_weights(ANIMALS).weight
    (path,) = files(kept)
    path.unlink()
    path.mkdir()
    assert torch.equal(load_model(home).class_weights(ANIMALS).weight, expected)


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, home):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", "/proc/nowhere", "/dev/null"):
        monkeypatch.setenv("ANISO_CACHE", str(place))
        assert runs(load_model(home)) == runs(load_model(home)) == 1


def test_a_cache_that_cannot_even_be_looked_for_is_no_error(tmp_path, monkeypatch, home):
    monkeypatch.setenv("ANISO_CACHE", str(tmp_path / ("x" * 300)))
    assert runs(load_model(home)) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission_is_no_error(tmp_path, monkeypatch, home):
    (tmp_path / "mine").mkdir(mode=0o500)
    monkeypatch.setenv("ANISO_CACHE", str(tmp_path / "mine"))
    assert runs(load_model(home)) == runs(load_model(home)) == 1


def test_where_the_cache_is(tmp_path, monkeypatch):
    assert WeightsCache.default().directory == tmp_path / "cache" / "class-weights"
    monkeypatch.setenv("ANISO_CACHE", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert WeightsCache.default().directory == tmp_path / "home" / "mine" / "class-weights"
    monkeypatch.delenv("ANISO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert WeightsCache.default().directory == tmp_path / "xdg" / "aniso" / "class-weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert WeightsCache.default().directory == tmp_path / "home" / ".cache" / "aniso" / "class-weights"


def test_without_a_directory_nothing_is_kept(home, kept):
    encoder, asked = counted(load_model(home))
    for _ in range(2):
        encoder.class_weights(ANIMALS, cache=WeightsCache(None))
    assert len(asked) == 2
    assert files(kept) == []


def test_a_cache_may_be_given(tmp_path, home, kept):
    load_model(home).class_weights(ANIMALS, cache=WeightsCache(tmp_path / "mine"))
    assert len(files(tmp_path / "mine")) == 1
    assert files(kept) == []


def _both(directory: Path, home: Path, said) -> None:
    """In a process of its own: write and read the same entries all the time."""
    cache = WeightsCache(directory)
    wrong = 0
    for i in range(40):
        key, names = f"{i % 3:064}", ("a", "b")
        cache.put(key, ClassWeights(names, torch.full((2, 500), float(i % 3))))
        found = cache.get(key, ClassList(names))
        wrong += found is None or bool((found.weight != i % 3).any())
    made = load_model(home).class_weights(ANIMALS, cache=cache)
    said.put((wrong, made.weight.tolist()))


def test_two_processes_at_once(tmp_path, home):
    fork = multiprocessing.get_context("fork")
    said = fork.Queue()
    both = [fork.Process(target=_both, args=(tmp_path / "shared", home, said)) for _ in range(2)]
    for process in both:
        process.start()
    heard = [said.get(timeout=120) for _ in both]
    for process in both:
        process.join()
    assert [wrong for wrong, _ in heard] == [0, 0]
    assert heard[0][1] == heard[1][1]
    assert len(files(tmp_path / "shared")) == 4


# words


@pytest.mark.parametrize(
    "prompt",
    ["a photo", "", "{} and {}", "{name}", "{0}", "{!r}", "{:>3}", "{", "}", "{}}", "{{}}", "{0}{1}", "{.x}",
     "{[0]}", "{:{}}", "{!}"],
)  # fmt: skip
def test_a_prompt_has_one_place_for_the_name(refused, prompt):
    with refused("DATA-PROMPT", 2, "exactly one {}", "fix"):
        ClassList(("cat", "dog"), ("a {}.", prompt))


@pytest.mark.parametrize("prompts", [(), "a {}."])
def test_there_are_prompts(refused, prompts):
    with refused("DATA-PROMPT", 2, "fix"):
        ClassList(("cat", "dog"), prompts)


@pytest.mark.parametrize("names", [(), ("",), ("cat", " "), ("cat", "\t\n"), ("cat", None), ("cat", 3)])
def test_every_class_has_a_name(refused, names):
    with refused("DATA-CLASS", 2, "fix"):
        ClassList(names)


def test_every_class_has_another_name(refused):
    with refused("DATA-CLASS", 2, "classes 1 and 3", "ox"):
        ClassList(("cat", "ox", "dog", "ox"))


@pytest.mark.parametrize(
    "name",
    ["{}", "{0}", "{name}", "a {} b", "{{", "}", "Größe", "模型", "🙂", "snow_leopard", "o'clock", "%s"],
)
def test_a_name_is_spoken_as_it_is(home, name):
    classes = ClassList((name, "dog"), ("a {}.", "{}", "{{{}}}"))
    assert classes.texts() == [[f"a {name}.", name, "{" + name + "}"], ["a dog.", "dog", "{dog}"]]
    found = load_model(home).class_weights(classes)
    assert found.names == (name, "dog")
    assert torch.isfinite(found.weight).all()


def test_names_and_prompts_may_come_as_lists():
    classes = ClassList(["cat", "dog"], ["a {}."])
    assert classes == ClassList(("cat", "dog"), ("a {}.",))
    assert len(classes) == 2
    assert ClassList(["cat"]).prompts == DEFAULT_PROMPTS
    assert hash(classes) == hash(ClassList(("cat", "dog"), ("a {}.",)))


def test_the_key_tells_names_from_prompts_and_one_from_two():
    keys = {
        ClassList(("a", "b"), ("{}",)).key,
        ClassList(("a", "b"), ("{}", "{} ")).key,
        ClassList(("b", "a"), ("{}",)).key,
        ClassList(('a", "b',), ("{}",)).key,
        ClassList(("a", "b", "{}"), ("{}",)).key,
    }
    assert len(keys) == 5
    assert ClassList(("a", "b"), ("{}",)).key in keys


# tokenizers that are not there


def no_tokenizer(path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()


def half_a_tokenizer(path):
    no_tokenizer(path)
    (path / "vocab.json").write_text('{"a": 0}')


def two_tokens(path):
    half_a_tokenizer(path)
    (path / "merges.txt").write_text("#version: 0.2\n")


def other_tokens(path):
    said = json.loads((path / "tokenizer.json").read_text())
    said["model"]["vocab"]["one more"] = 64
    (path / "tokenizer.json").write_text(json.dumps(said))


@pytest.mark.parametrize("change", [no_tokenizer, half_a_tokenizer, two_tokens, other_tokens])
def test_a_tokenizer_that_does_not_fit_is_refused_when_it_is_needed(tmp_path, home, refused, change):
    path = copy_of(home, tmp_path / "clip")
    change(path)
    encoder = load_model(path)  # for images alone it is not
    assert encoder(torch.zeros(1, 3, 16, 16)).shape == (1, tiny.EMBED)
    for ask in (lambda: encoder.class_weights(ANIMALS), lambda: encoder.text_features(["a cat."])):
        with refused("MODEL-TOKENIZER", 3, "64 tokens", "fix"):
            ask()


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"model": {}}', "[]"])
def test_a_damaged_tokenizer_is_refused(tmp_path, home, refused, text):
    path = copy_of(home, tmp_path / "clip")
    (path / "tokenizer.json").write_text(text)
    with refused("MODEL-TOKENIZER", 3, "64 tokens", "fix"):
        load_model(path).class_weights(ANIMALS)


def test_clip_s_own_tokenizer_is_not_used_for_another_vocabulary(tmp_path, refused):
    pytest.importorskip("open_clip")
    from aniso.vectors.convert import convert
    from aniso.weights import open_weights

    tiny.hf_clip().save_pretrained(tmp_path / "hf")
    convert(open_weights(tmp_path / "hf"), tmp_path / "oc", to="open_clip")
    with refused("MODEL-TOKENIZER", 3, "49408", "64", "fix"):
        load_model(tmp_path / "oc").class_weights(ANIMALS)


def test_networks_with_adapters_do_not_share_the_class_weights_of_another_text_tower(home, tmp_path, kept):
    pytest.importorskip("peft")
    from aniso.learn import adapter
    from aniso.learn.unwrap import encoder_of

    other = shutil.copytree(home, tmp_path / "other")
    source = SafetensorsFile(RawFile(home / "model.safetensors"))
    tensors = {name: source.read(name) for name in source.tensors}
    moved = {name: tensor + 0.1 if "text_model" in name else tensor for name, tensor in tensors.items()}
    save_safetensors(other / "model.safetensors", moved, {"format": "pt"}, overwrite=True)
    own = [load_model(path).class_weights(ANIMALS, cache=WeightsCache(None)).weight for path in (home, other)]
    assert not torch.allclose(*own, atol=1e-3)
    for path, expected in zip((home, other), own, strict=True):
        trained = adapter(load_model(path), 2).trained.model
        assert torch.allclose(encoder_of(trained).class_weights(ANIMALS).weight, expected, atol=1e-5)
