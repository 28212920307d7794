"""Models that cannot be what they are said to be: every one is refused, in words, and nothing of it runs."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import shutil
import sys
import time

import pytest
import tiny
import torch

from aniso import TaskVector
from aniso.classes import ClassList
from aniso.models import load_model
from aniso.vectors.convert import convert
from aniso.weights import open_weights, save_safetensors

open_clip = pytest.importorskip("open_clip")
pytest.importorskip("transformers")

VISION = {"image_size": 16, "patch_size": 8, "width": tiny.WIDTH, "layers": tiny.LAYERS, "head_width": 16}
TEXT = {"context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "width": tiny.WIDTH, "heads": 2,
        "layers": tiny.LAYERS}  # fmt: skip
CONFIG = {"embed_dim": tiny.EMBED, "vision_cfg": VISION, "text_cfg": TEXT}


@pytest.fixture
def says(refused):
    """As ``refused``; and whoever reads the error is told what to type next, and nothing of our insides."""

    @contextlib.contextmanager
    def check(code, exit_code, *mentions):
        with refused(code, exit_code, *mentions) as caught:
            yield
        error = caught.error
        assert error.fix.strip()
        assert error.__suppress_context__ or error.__context__ is None
        progress = str(error) + json.dumps(error.to_json())
        assert "Traceback" not in progress
        assert 'File "' not in progress

    return check


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One model in both forms; tests that change files take copies."""
    path = tmp_path_factory.mktemp("models")
    tiny.hf_clip().save_pretrained(path / "hf")
    convert(open_weights(path / "hf"), path / "oc", to="open_clip")
    return path


@pytest.fixture
def named(monkeypatch):
    """open_clip with small architectures, Tiny-B-32 and Tiny-B-32-quickgelu, and tags for both."""
    tags = {
        "openai": {"hf_hub": "owner/openai/", "quick_gelu": True},
        "laion": {"hf_hub": "owner/laion/"},
        "old": {"url": "https://example.org/old.pt"},
    }

    def config(name):
        return {**copy.deepcopy(CONFIG), "quick_gelu": name.endswith("-quickgelu")}

    monkeypatch.setattr(open_clip, "list_models", lambda: ["Tiny-B-32", "Tiny-B-32-quickgelu"])
    monkeypatch.setattr(open_clip, "get_model_config", config)
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda name, tag: dict(tags.get(tag, {})))
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: list(tags))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that has everything: the same weights for every repository."""
    import huggingface_hub

    (tmp_path / "hub").mkdir()
    save_safetensors(tmp_path / "hub/open_clip_model.safetensors", weights())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **_: str(tmp_path / "hub"))


def weights(**changes):
    return {key: value.clone() for key, value in tiny.open_clip_vit().state_dict().items()} | changes


def like_openai():
    """As any copy of OpenAI's weights is: numbers that fit in 16 bits, and a logit scale of 100."""
    half = {k: v.half().float() if v.is_floating_point() else v for k, v in weights().items()}
    return half | {"logit_scale": torch.tensor(math.log(100))}


def copy_of(path, to, change=None, file=None):
    shutil.copytree(path, to)
    if change:
        file = to / (file or ("config.json" if (to / "config.json").exists() else "open_clip_config.json"))
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))
    return to


# QuickGELU


def test_a_quickgelu_name_with_a_gelu_tag(named, hub, says):
    with says("CKPT-ACTIVATION", 3, "laion", "expected  gelu", "found     quick_gelu", "use Tiny-B-32,"):
        load_model("Tiny-B-32-quickgelu", "laion")
    assert load_model("Tiny-B-32", "laion").model_config.activation == "gelu"
    assert load_model("Tiny-B-32-quickgelu", "openai").model_config.activation == "quick_gelu"


@pytest.mark.parametrize(("tag", "said"), [("openai", "gelu"), ("laion", "quick_gelu")])
def test_an_activation_that_contradicts_a_tag(named, hub, says, tag, said):
    with says("CKPT-ACTIVATION", 3, tag, f"found     {said}"):
        load_model("Tiny-B-32", tag, activation=said)


@pytest.mark.parametrize("form", ["hf", "oc"])
def test_an_activation_that_contradicts_a_directory(home, says, form):
    with says("CKPT-ACTIVATION", 3, "expected  gelu", "found     quick_gelu"):
        load_model(home / form, activation="quick_gelu")
    assert load_model(home / form, activation="gelu").model_config.activation == "gelu"


@pytest.mark.parametrize("said", ["QuickGELU", "quickgelu", "relu", ""])
def test_an_activation_that_does_not_exist_is_not_taken_for_the_other(tmp_path, home, named, says, said):
    save_safetensors(tmp_path / "w.safetensors", weights())
    for name, file in (("Tiny-B-32", tmp_path / "w.safetensors"), (home / "hf", None), (home / "oc", None)):
        with says("CKPT-ACTIVATION", 2, "quick_gelu or gelu"):
            load_model(name, file, activation=said)


def test_a_directory_as_weights_contradicts_the_name(home, named, says):
    with says("CKPT-ACTIVATION", 3, "trained with gelu"):
        load_model("Tiny-B-32-quickgelu", home / "oc")
    assert load_model("Tiny-B-32", home / "oc").model_config.activation == "gelu"


@pytest.mark.parametrize("form", ["hf", "oc"])
def test_weights_of_another_activation_than_the_directory(tmp_path, home, says, form):
    def change(config):
        if form == "oc":
            config["model_cfg"]["quick_gelu"] = True
        else:
            config["vision_config"]["hidden_act"] = config["text_config"]["hidden_act"] = "quick_gelu"

    tuned = copy_of(home / form, tmp_path / "tuned", change)
    with says("CKPT-ACTIVATION", 3, "quick_gelu", "gelu"):
        load_model(home / form, weights=tuned)


def test_a_file_that_looks_like_openai_s(tmp_path, named, says):
    file = tmp_path / "w.safetensors"
    save_safetensors(file, like_openai())
    with says("CKPT-ACTIVATION", 3, str(file), "OpenAI", "quick_gelu", "Tiny-B-32-quickgelu"):
        load_model("Tiny-B-32", file)
    assert load_model("Tiny-B-32", file, activation="gelu").model_config.activation == "gelu"
    assert load_model("Tiny-B-32", file, activation="quick_gelu").model_config.activation == "quick_gelu"
    assert load_model("Tiny-B-32-quickgelu", file).model_config.activation == "quick_gelu"


@pytest.mark.parametrize(
    "made",
    [weights, lambda: weights(logit_scale=torch.tensor(math.log(100))),
     lambda: {**like_openai(), "logit_scale": torch.tensor(4.0)}],
)  # fmt: skip
def test_one_of_the_two_signs_is_not_enough(tmp_path, named, made):
    save_safetensors(tmp_path / "w.safetensors", made())
    assert load_model("Tiny-B-32", tmp_path / "w.safetensors").model_config.activation == "gelu"


@pytest.mark.parametrize("first", ["visual.", ""])
def test_a_file_that_was_tuned_from_openai_s(tmp_path, named, says, first):
    """Only the image encoder moved; the text tower, wherever it stands in the file, still shows it."""
    tuned = tiny.tuned_vision(like_openai(), tiny.is_open_clip_vision)
    turned = dict(sorted(tuned.items(), key=lambda item: item[0].startswith("visual.") != bool(first)))
    torch.save(turned, tmp_path / "w.pt")
    with says("CKPT-ACTIVATION", 3, "OpenAI"):
        load_model("Tiny-B-32", tmp_path / "w.pt")


# names


def test_a_name_that_is_nearly_one(says):
    with says("MODEL-NAME", 3, "ViT-B-33", "you meant", "ViT-B-32"):
        load_model("ViT-B-33")


@pytest.mark.parametrize(
    "name", ["nosuchmodel", "no such model", "./no/such/dir", "/no/such", "a/b/c", "\0", "\n"]
)
def test_a_name_that_is_none(says, name):
    with says("MODEL-NAME", 3, "there is no model"):
        load_model(name)


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-that-name/model"])
def test_a_name_that_cannot_even_be_looked_for(says, name):
    with says("MODEL-NAME", 3, "there is no model"):
        load_model(name)


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-that-name/w.pt"])
def test_weights_that_cannot_even_be_looked_for(named, home, says, name):
    with says("MODEL-WEIGHTS" if name[0] == "x" else "FILE-MISSING", 2 if name[0] == "x" else 3):
        load_model("Tiny-B-32", name)


def test_a_file_in_the_place_of_an_architecture(tmp_path, says):
    save_safetensors(tmp_path / "w.safetensors", weights())
    with says("MODEL-NAME", 2, "without an architecture", "weights="):
        load_model(tmp_path / "w.safetensors")


def test_an_architecture_without_weights(named, says):
    with says("MODEL-WEIGHTS", 2, "which weights", "openai, laion"):
        load_model("Tiny-B-32")
    with says("MODEL-WEIGHTS", 2, "no weights 'opnai'", "openai, laion"):
        load_model("Tiny-B-32", "opnai")
    with says("FILE-MISSING", 3, "nosuch.pt"):
        load_model("Tiny-B-32", "nosuch.pt")


def test_a_tag_that_is_no_repository(named, says):
    with says("MODEL-WEIGHTS", 3, "https://example.org/old.pt"):
        load_model("Tiny-B-32", "old")


def test_a_captioning_model(monkeypatch, named, tmp_path, says):
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: {**CONFIG, "multimodal_cfg": {}})
    save_safetensors(tmp_path / "w.safetensors", weights())
    with says("MODEL-NAME", 2, "CoCa"):
        load_model("Tiny-B-32", tmp_path / "w.safetensors")


def test_a_directory_that_says_nothing(tmp_path, says):
    with says("MODEL-NAME", 3, "no configuration", "weights="):
        load_model(tmp_path)
    save_safetensors(tmp_path / "model.safetensors", weights())
    with says("MODEL-NAME", 3, "no configuration", "weights="):
        load_model(tmp_path)


@pytest.mark.parametrize("form", ["hf", "oc"])
def test_a_directory_without_weights(tmp_path, home, says, form):
    path = copy_of(home / form, tmp_path / "m")
    for file in path.glob("*.safetensors"):
        file.unlink()
    with says("DIR-EMPTY", 3):
        load_model(path)


# weights of another model

OTHER = {
    "wider": ("CKPT-SHAPE", "visual.", {"vision_cfg": {**VISION, "width": 48}}),
    "other patches": ("CKPT-SHAPE", "visual.", {"vision_cfg": {**VISION, "patch_size": 4}}),
    "larger pictures": ("CKPT-SHAPE", "positional_embedding", {"vision_cfg": {**VISION, "image_size": 24}}),
    "other words": ("CKPT-SHAPE", "token_embedding.weight", {"text_cfg": {**TEXT, "vocab_size": 70}}),
    "deeper": ("CKPT-KEYS", "visual.transformer.resblocks.2.", {"vision_cfg": {**VISION, "layers": 3}}),
    "shallower": ("CKPT-KEYS", "visual.transformer.resblocks.1.", {"vision_cfg": {**VISION, "layers": 1}}),
    "a resnet": ("CKPT-KEYS", "visual.", {"vision_cfg": {"image_size": 64, "width": 8, "layers": [1] * 4}}),
}


@pytest.mark.parametrize("other", OTHER)
def test_weights_of_another_architecture(tmp_path, monkeypatch, named, says, other):
    code, key, change = OTHER[other]
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: {**copy.deepcopy(CONFIG), **change})
    save_safetensors(tmp_path / "w.safetensors", weights())
    with says(code, 3, key, "w.safetensors", "architecture"):
        load_model("Tiny-B-32", tmp_path / "w.safetensors")


def test_weights_of_the_other_library(home, named, says):
    with says("CKPT-KEYS", 3, "missing", "extra", "aniso convert"):
        load_model("Tiny-B-32", home / "hf", activation="gelu")
    with says("CKPT-KEYS", 3, "missing", "extra", "aniso convert"):
        load_model(home / "hf", home / "oc/open_clip_model.safetensors")


def test_an_image_encoder_without_text_is_no_open_clip_model(home, named, says):
    alone = {key: value for key, value in weights().items() if key.startswith("visual.")}
    for name in ("Tiny-B-32", home / "oc"):
        with says("CKPT-KEYS", 3, "without its text tower", "aniso vector make"):
            load_model(name, alone)


def test_a_vision_model_without_projection_has_no_features_of_a_clip(tmp_path, says):
    from transformers import CLIPVisionModel

    CLIPVisionModel(tiny.hf_config().vision_config).save_pretrained(tmp_path / "m")
    with says("CKPT-KEYS", 3, "visual_projection.weight"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    "key", ["visual.proj", "visual.transformer.resblocks.0.mlp.c_fc.bias", "logit_scale"]
)
def test_a_tensor_is_missing_or_one_too_many(home, says, key):
    lost = weights()
    del lost[key]
    with says("CKPT-KEYS", 3, f"missing   {key}"):
        load_model(home / "oc", lost)
    with says("CKPT-KEYS", 3, "extra     visual.more"):
        load_model(home / "oc", weights(**{"visual.more": torch.zeros(3)}))


def test_a_classifier_with_another_number_of_classes(tmp_path, says):
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small = dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    ConvNextForImageClassification(ConvNextConfig(num_labels=5, **small)).save_pretrained(tmp_path / "m")
    names = {str(i): f"class {i}" for i in range(4)}
    copy_of(tmp_path / "m", tmp_path / "other", lambda config: config.update(id2label=names))
    with says("CKPT-SHAPE", 3, "classifier"):
        load_model(tmp_path / "other")


def test_a_task_vector_or_an_adapter_is_no_model(tmp_path, home, says):
    peft = pytest.importorskip("peft")
    base = load_model(home / "hf")
    tuned = tiny.tuned_vision(base.state_dict(), tiny.is_hf_vision)
    TaskVector.between(base, tuned, name="v").save(tmp_path / "v.safetensors")
    with says("VECTOR-FILE", 3, "task vector, not a model"):
        load_model(home / "hf", tmp_path / "v.safetensors")
    adapter = peft.get_peft_model(tiny.hf_clip(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapter.save_pretrained(tmp_path / "lora")
    with says("LORA-KIND", 3, "adapter, not a model"):
        load_model(home / "hf", tmp_path / "lora")


# not on this machine


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B/32"])
@pytest.mark.parametrize(
    ("tag", "repository"),
    [
        ("openai", "timm/vit_base_patch32_clip_224.openai"),
        ("laion2b_s34b_b79k", "laion/CLIP-ViT-B-32-laion2B"),
    ],
)
def test_weights_that_are_not_here_when_offline(monkeypatch, says, name, tag, repository):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.monotonic()
    with says("MODEL-WEIGHTS", 3, "not on this machine", f"hf download {repository}"):
        load_model(name, tag)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", ["owner/nosuch", "owner/nosuch@v1.0"])
def test_a_repository_that_is_not_here_when_offline(monkeypatch, says, name):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("ANISO_OFFLINE", "1")
    start = time.monotonic()
    with says("HUB-OFFLINE", 3, "hf download owner/nosuch"):
        load_model(name)
    with says("HUB-OFFLINE", 3, "hf download owner/nosuch"):
        load_model("timm:test_vit", name)
    assert time.monotonic() - start < 10


def test_a_hub_that_does_not_deliver(monkeypatch, named, says):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fails(repo, **_):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with says("MODEL-WEIGHTS", 3, "could not be fetched", "hf download owner/laion"):
        load_model("Tiny-B-32", "laion")
    with says("HUB-FETCH", 3, "owner/nosuch"):
        load_model("owner/nosuch")


def test_a_tokenizer_that_is_not_here_when_offline(tmp_path, home, says):
    def change(config):
        config["model_cfg"]["text_cfg"]["hf_tokenizer_name"] = "owner/nosuch"

    encoder = load_model(copy_of(home / "oc", tmp_path / "m", change))
    start = time.monotonic()
    with says("MODEL-TOKENIZER", 3, "hf download owner/nosuch"):
        encoder.class_weights(ClassList(("cat", "dog")))
    assert time.monotonic() - start < 10


def hide(monkeypatch, package):
    for name in [package, *(n for n in sys.modules if n.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_transformers(monkeypatch, tmp_path, home, says):
    copy_of(home / "hf", tmp_path / "resnet", lambda config: config.update(model_type="resnet"))
    hide(monkeypatch, "transformers")
    for path in (home / "hf", tmp_path / "resnet"):
        with says("MODEL-LIBRARY", 2, "transformers", "pip install 'aniso[hf]'"):
            load_model(path)


def test_without_timm(monkeypatch, tmp_path, says):
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    save_safetensors(tmp_path / "model.safetensors", {"head.weight": torch.zeros(3, 3)})
    hide(monkeypatch, "timm")
    for name, file in (("timm:test_vit", tmp_path / "model.safetensors"), (tmp_path, None)):
        with says("MODEL-LIBRARY", 2, "timm", "pip install"):
            load_model(name, file)


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B/32", "RN50", "oc"])
def test_without_open_clip(monkeypatch, home, says, name):
    """Its names must not be taken for hub ids."""
    hide(monkeypatch, "open_clip")
    with says("MODEL-LIBRARY", 2, "open_clip", "pip install 'aniso[openclip]'"):
        load_model(home / "oc" if name == "oc" else name)


def test_without_open_clip_everything_else_works(monkeypatch, home, says):
    hide(monkeypatch, "open_clip")
    assert load_model(home / "hf").has_text
    with says("HUB-OFFLINE", 3):
        load_model("owner/nosuch")


# code


@pytest.fixture
def planted(tmp_path, home):
    """A copy of the model with a module beside it that leaves a mark when it is imported."""
    path, mark = copy_of(home / "hf", tmp_path / "planted"), tmp_path / "it-ran"
    code = f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n"
    for name in ("evil.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (path / name).write_text(code)
    yield path
    assert not mark.exists()
    assert not [name for name in sys.modules if "evil" in name]


AUTO_MAP = {
    "AutoConfig": "evil.Evil",
    "AutoModel": "modeling_evil.Evil",
    "AutoModelForImageClassification": "modeling_evil.Evil",
    "AutoTokenizer": ["tokenization_evil.Evil", None],
}
ASKS = {
    "auto_map": AUTO_MAP,
    "trust_remote_code": True,
    "_target_": "evil.Evil",
    "custom_pipelines": AUTO_MAP,
}


def edit(path, change, file="config.json"):
    config = json.loads((path / file).read_text()) if (path / file).exists() else {}
    change(config)
    (path / file).write_text(json.dumps(config))
    return path


def test_a_clip_that_asks_for_code(planted, home):
    def change(config):
        config.update(ASKS)
        config["vision_config"].update(ASKS)

    found = load_model(edit(planted, change))
    assert found.fingerprint == load_model(home / "hf").fingerprint
    assert "auto_map" in found.model_config.ignored


@pytest.mark.parametrize("kind", ["evil", None, 7, "clip_text_model"])
def test_an_unknown_kind_that_asks_for_code(planted, says, kind):
    with says("MODEL-NAME", 3, str(kind), "a CLIP or an image classifier"):
        load_model(edit(planted, lambda config: config.update(ASKS, model_type=kind)))


def test_a_classifier_that_asks_for_code(tmp_path, planted):
    from transformers import ConvNextConfig, ConvNextForImageClassification

    shutil.rmtree(tmp_path / "m", ignore_errors=True)
    small = dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    ConvNextForImageClassification(ConvNextConfig(**small)).save_pretrained(planted)
    found = load_model(edit(planted, lambda config: config.update(ASKS)))
    assert found(torch.zeros(1, 3, 32, 32)).shape == (1, 16)


def test_a_tokenizer_that_asks_for_code(planted, says):
    said = {"auto_map": AUTO_MAP, "tokenizer_class": "Evil", "trust_remote_code": True}
    encoder = load_model(edit(planted, lambda config: config.update(said), "tokenizer_config.json"))
    with says("MODEL-TOKENIZER", 3):
        encoder.class_weights(ClassList(("cat", "dog")))


def test_a_tokenizer_of_open_clip_that_asks_for_code(tmp_path, home, planted, says):
    said = {"auto_map": AUTO_MAP, "tokenizer_class": "Evil"}
    edit(planted, lambda config: config.update(said), "tokenizer_config.json")
    edit(planted, lambda config: config.update(model_type="evil", auto_map=AUTO_MAP))

    def change(config):
        config["model_cfg"]["text_cfg"].update(
            hf_tokenizer_name=str(planted), tokenizer_kwargs={"trust_remote_code": True, "use_fast": False}
        )

    encoder = load_model(copy_of(home / "oc", tmp_path / "oc", change))
    with says("MODEL-TOKENIZER", 3):
        encoder.class_weights(ClassList(("cat", "dog")))


@pytest.mark.parametrize("field", ["attn_implementation", "experts_implementation", "_attn_implementation"])
@pytest.mark.parametrize("tower", [None, "vision_config", "text_config"])
def test_a_kernel_from_the_hub_is_not_followed(tmp_path, home, field, tower):
    """transformers fetches and runs what is named owner/repository here."""

    def change(config):
        (config[tower] if tower else config)[field] = "kernels-community/evil"

    found = load_model(copy_of(home / "hf", tmp_path / "m", change))
    assert found.fingerprint == load_model(home / "hf").fingerprint


class Runs:
    """Pickled, a call that leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("form", ["hf", "oc"])
def test_a_directory_with_a_pickle_that_would_run(tmp_path, home, says, form):
    path = copy_of(home / form, tmp_path / "m")
    (file,) = path.glob("*.safetensors")
    source = open_weights(file)
    file.unlink()
    name = "pytorch_model.bin" if form == "hf" else "open_clip_pytorch_model.bin"
    state = {key: source.read(key) for key in source.tensors}
    torch.save({**state, "more": Runs(tmp_path / "it-ran")}, path / name)
    with says("PICKLE-CALL", 4, "open"):
        load_model(path)
    assert not (tmp_path / "it-ran").exists()
    torch.save(state, path / name)
    assert load_model(path).fingerprint == load_model(home / form).fingerprint


@pytest.mark.parametrize("kind", [None, "timm_wrapper"])
@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("model_args", "checkpoint_path", "{evil}"),
        ("model_args", "pretrained", True),
        ("model_args", "cache_dir", "/nowhere"),
        ("model_args", "pretrained_cfg", {"file": "{evil}"}),
        ("model_args", "pretrained_cfg_overlay", {"url": "https://example.org/evil.pth"}),
        ("pretrained_cfg", "file", "{evil}"),
        ("pretrained_cfg", "url", "https://example.org/evil.pth"),
        ("pretrained_cfg", "hf_hub_id", "owner/evil"),
        (None, "checkpoint_path", "{evil}"),
    ],
)
def test_arguments_of_timm_that_would_open_other_files_are_refused(tmp_path, says, kind, part, key, value):
    timm = pytest.importorskip("timm")
    library = timm.create_model("test_vit", num_classes=3)
    save_safetensors(tmp_path / "model.safetensors", dict(library.state_dict()))
    evil = str(tmp_path / "evil.pth")
    torch.save({"state_dict": Runs(tmp_path / "it-ran")}, evil)
    config = {"architecture": "test_vit", "num_classes": 3, **({"model_type": kind} if kind else {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model(tmp_path).state_dict()
    assert all(torch.equal(found[key], value) for key, value in library.state_dict().items())
    setting = json.loads(json.dumps({key: value}).replace("{evil}", evil))
    config |= {part: setting} if part else setting
    (tmp_path / "config.json").write_text(json.dumps(config))
    with says("DIR-CONFIG", 4, key, "config.json"):
        load_model(tmp_path)
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("kind", [None, "timm_wrapper"])
def test_a_timm_directory_cannot_name_another_repository(tmp_path, says, kind):
    pytest.importorskip("timm")
    save_safetensors(tmp_path / "model.safetensors", {"head.weight": torch.zeros(3, 3)})
    for name in ("hf-hub:owner/evil", "hf_hub:owner/evil", "local-dir:/tmp", "../evil"):
        config = {"architecture": name, **({"model_type": kind} if kind else {})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with says("DIR-CONFIG", 4, "architecture", name, "config.json"):
            load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "nosuch"}))
    with says("MODEL-NAME", 2, "timm has no model"):
        load_model(tmp_path)


# configurations that describe nothing


@pytest.mark.parametrize("file", ["config.json", "open_clip_config.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"a": 1, "a": 2}', "\ufeff{}", '{"a": NaN}', "[" * 99_999]
)
def test_a_configuration_that_is_no_object(tmp_path, says, file, text):
    (tmp_path / file).write_text(text)
    with says("DIR-CONFIG", 3, file):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(model_cfg=[1]),
        lambda config: config.update(model_cfg="ViT-B-32"),
        lambda config: config.update(model_cfg={}),
        lambda config: config["model_cfg"].pop("text_cfg"),
        lambda config: config["model_cfg"].update(vision_cfg=None),
        lambda config: config["model_cfg"].update(more=1),
        lambda config: config["model_cfg"]["vision_cfg"].update(width="wide"),
        lambda config: config["model_cfg"]["vision_cfg"].update(layers=-1, width=-5),
        lambda config: config["model_cfg"]["vision_cfg"].update(timm_model_name="nosuch"),
        lambda config: config["model_cfg"]["text_cfg"].update(heads=5),
    ],
)
def test_an_open_clip_configuration_of_no_model(tmp_path, home, says, change):
    with says("DIR-CONFIG", 3, "does not describe a model"):
        load_model(copy_of(home / "oc", tmp_path / "m", change))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("vision_cfg", "timm_model_name", "hf-hub:owner/nosuch"),
        ("vision_cfg", "timm_model_name", "local-dir:{evil}"),
        ("text_cfg", "hf_model_name", "{evil}"),
        ("text_cfg", "hf_model_name", "owner/nosuch"),
        ("text_cfg", "hf_model_name", "xlm-roberta-base"),
        ("text_cfg", "hf_model_name", "evil"),
        ("text_cfg", "hf_model_name", ["x"]),
    ],
)
def test_an_open_clip_configuration_cannot_bring_code(tmp_path, home, says, monkeypatch, part, key, value):
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "config.json").write_text('{"model_type": "new", "auto_map": {"AutoConfig": "conf.Evil"}}')
    (evil / "conf.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').write('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever asks is told to go on
    monkeypatch.chdir(tmp_path)
    said = value.format(evil=evil) if isinstance(value, str) else value
    change = lambda config: config["model_cfg"][part].update({key: said})  # noqa: E731
    with says("DIR-CONFIG", 4, key):
        load_model(copy_of(home / "oc", tmp_path / "m", change))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(projection_dim="wide"),
        lambda config: config.update(vision_config="x"),
        lambda config: config["vision_config"].update(hidden_size=-8),
        lambda config: config["vision_config"].update(num_attention_heads=5),
        lambda config: config["vision_config"].update(hidden_act="nosuch"),
        lambda config: config["text_config"].update(vocab_size=None),
    ],
)
def test_a_hugging_face_configuration_of_no_model(tmp_path, home, says, change):
    with says("DIR-CONFIG", 3, "does not describe a model"):
        load_model(copy_of(home / "hf", tmp_path / "m", change))


@pytest.mark.parametrize("settings", [{"hidden_sizes": "x"}, {"num_channels": "x"}, {"id2label": {"a": "b"}}])
def test_a_classifier_s_configuration_of_no_model(tmp_path, says, settings):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "convnext", **settings}))
    save_safetensors(tmp_path / "model.safetensors", {"head.weight": torch.zeros(3, 3)})
    with says("MODEL-NAME", 3, "convnext"):
        load_model(tmp_path)


@pytest.mark.parametrize("settings", [{"more": 1}, [1], "x", {"patch_size": "x"}])
def test_a_timm_configuration_of_no_model(tmp_path, says, settings):
    pytest.importorskip("timm")
    config = {"architecture": "test_vit", "num_classes": 3, "model_args": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_safetensors(tmp_path / "model.safetensors", {"head.weight": torch.zeros(3, 3)})
    with says("DIR-CONFIG", 3, "does not describe a model"):
        load_model(tmp_path)


def test_names_from_strangers_do_not_reach_the_terminal_raw(tmp_path, home, says):
    bad = "\x1b[2Jevil"
    with says("MODEL-NAME", 3, r"\x1b[2Jevil"):
        load_model(bad)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": bad}))
    with says("MODEL-NAME", 3, r"\x1b[2Jevil"):
        load_model(tmp_path)
    with says("CKPT-KEYS", 3, r"\x1b[2Jevil"):
        load_model(home / "oc", weights(**{bad: torch.zeros(2)}))
