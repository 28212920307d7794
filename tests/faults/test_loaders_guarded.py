"""Every way in, on hostile directories, in a process that may not connect, unpickle, run code or programs."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import language
import pytest
import sentences
import tiny
import torch
from guard import HOSTILE, Report, run_guarded

import aniso
from aniso.weights import save_safetensors

pytest.importorskip("open_clip")
pytest.importorskip("transformers")
pytest.importorskip("timm")

# what the guarded process does: every way in, on every directory or on every file in it
BODY = """
import traceback
from pathlib import Path
import aniso
from aniso.classes import ClassList
from aniso.errors import AnisoError
from aniso.experiments.banks import load_coefficients, open_bank
from aniso.experiments.prediction.classifier import load_classifier
from aniso.experiments.prediction.model_files import ModelOptions, find_model
from aniso.experiments.prediction.tables import open_table
from aniso.experiments.removal import RemovalRun
from aniso.explore import DeskOptions, open_desk
from aniso.experiments.result import RunOptions
from aniso.models.image_tower import load_tower
from aniso.models.load import load_composed, mini_directory
from aniso.prediction_files import PredictionFile
from aniso.vectors import Catalogue, load_adapter_directory
from aniso.weights.peft_lora import PeftAdapter

def describe(encoder):
    if encoder.has_text:
        encoder.class_weights(ClassList(("cat", "dog")))
    encoder.identity()

def each(load):
    return lambda path: [tried(load, file) for file in sorted(path.iterdir()) if file.is_file()][-1]

entries = {
    "load_model": lambda path: describe(aniso.load_model(path)),
    "load_model weights": lambda path: aniso.load_model("mini", path),
    "load_composed": lambda path: load_composed(str(path), path),
    "load_tower": lambda path: load_tower(path),
    "load_classifier": lambda path: load_classifier(
        find_model(ModelOptions(str(path), classes=("cat", "dog")), "images")
    ),
    "open_desk": lambda path: open_desk(DeskOptions(str(path))),
    "RemovalRun.open": lambda path: RemovalRun.open(path, RunOptions()),
    "load_language_model": lambda path: aniso.load_language_model(path).tokens.whole("a cat"),
    "open_weights": lambda path: [(s := aniso.open_weights(path)), [s.read(name) for name in s.tensors]],
    "Bank.load": lambda path: aniso.Bank.load(path),
    "Bank.build base": lambda path: aniso.Bank.build(path, {"a": path}),
    "open_bank": lambda path: open_bank(path),
    "load_coefficients": each(lambda file: load_coefficients(aniso.Bank.load("mini"), file)),
    "load_coefficients of runs": lambda path: load_coefficients(aniso.Bank.load("mini"), path),
    "load_task": lambda path: aniso.load_task(str(path)),
    "PeftAdapter.open": lambda path: PeftAdapter.open(path),
    "load_adapter_directory": lambda path: load_adapter_directory(mini_directory(), path, skip_unfit=True),
    "open_weights of files": each(aniso.open_weights),
    "TaskVector.load": each(aniso.TaskVector.load),
    "Coefficients.load": each(aniso.Coefficients.load),
    "load_head": each(aniso.heads.load_head),
    "Catalogue.load": each(Catalogue.load),
    "BlockGradient.load": each(aniso.selection.BlockGradient.load),
    "PredictionFile.open": each(PredictionFile.open),
    "open_table": each(open_table),
    "read_examples": each(lambda file: list(aniso.read_examples(file))),
}

crashes = []

def tried(load, path):
    try:
        load(path)
    except AnisoError as e:
        return [e.code, e.exit_code, str(e)]
    except BaseException as e:
        crashes.append(f"{path}: {traceback.format_exc()[-1500:]}")
        return ["CRASH", 1, str(e)]
    return ["", 0, ""]

result = {"entries": list(entries), "crashes": crashes, "said": {}}
for name, place in given.items():
    for entry, load in entries.items():
        result["said"][f"{name}: {entry}"] = tried(load, Path(place))
"""
# public functions and constructors that load or open, and the entry above that reaches them
COVERED = {
    "aniso.cli.options.open_bank": "open_bank",
    "aniso.compose.coefficients.Coefficients.load": "Coefficients.load",
    "aniso.data.task.load_task": "load_task",
    "aniso.experiments.banks.load_coefficients": "load_coefficients",
    "aniso.experiments.banks.open_bank": "open_bank",
    "aniso.experiments.prediction.classifier.load_classifier": "load_classifier",
    "aniso.experiments.prediction.classifier.load_task_of": "load_task",
    "aniso.explore.opening.open_desk": "open_desk",
    "aniso.experiments.prediction.tables.open_table": "open_table",
    "aniso.experiments.removal.RemovalRun.open": "RemovalRun.open",
    "aniso.learn.selection.block_gradient.BlockGradient.load": "BlockGradient.load",
    "aniso.learn.heads.files.load_head": "load_head",
    "aniso.models.classifier.load_directory": "load_model",
    "aniso.models.classifier.load_timm": "load_model",
    "aniso.models.dual_encoder.load_directory": "load_model",
    "aniso.models.hugging_face.load": "load_model",
    "aniso.models.image_tower.load_tower": "load_tower",
    "aniso.models.language_model.load_language_model": "load_language_model",
    "aniso.models.load.load_composed": "load_composed",
    "aniso.models.load.load_model": "load_model",
    "aniso.models.open_clip.load": "load_model",
    "aniso.models.open_clip.load_directory": "load_model",
    "aniso.models.sentence_encoder.load_directory": "load_model",
    "aniso.prediction_files.PredictionFile.open": "PredictionFile.open",
    "aniso.vectors.adapter_directory.load_adapter_directory": "load_adapter_directory",
    "aniso.vectors.catalogue.Catalogue.load": "Catalogue.load",
    "aniso.vectors.bank.Bank.load": "Bank.load",
    "aniso.vectors._files.segment.Segment.open": "Bank.load",
    "aniso.vectors.task_vector.TaskVector.load": "TaskVector.load",
    "aniso.weights.directory.open_clip_config": "open_weights",
    "aniso.weights.directory.open_directory": "open_weights",
    "aniso.weights.open.open_weights": "open_weights",
    "aniso.weights.peft_lora.PeftAdapter.open": "PeftAdapter.open",
    "aniso.weights.single.open_file": "open_weights",
}


def ways_in() -> set[str]:
    """Every public function and class method of aniso whose name says that it loads or opens."""
    found = set()
    for part in pkgutil.walk_packages(aniso.__path__, "aniso."):
        if part.name.endswith("__main__"):
            continue
        module = importlib.import_module(part.name)
        own = {k: v for k, v in vars(module).items() if getattr(v, "__module__", None) == part.name}
        for name, value in own.items():
            if inspect.isfunction(value) and inspect.signature(value).parameters:  # else it reads no file
                found.add(f"{part.name}.{name}")
            elif inspect.isclass(value) and not name.startswith("_"):
                kinds = (classmethod, staticmethod)
                found |= {f"{part.name}.{name}.{k}" for k, v in vars(value).items() if isinstance(v, kinds)}
    return {name for name in found if re.match(r"(load|open)(_|$)", name.rpartition(".")[2])}


def test_every_way_in_is_guarded() -> None:
    assert ways_in() == set(COVERED)
    assert all(f'"{entry}": ' in BODY for entry in COVERED.values())


# hostile directories


class Program:
    """Pickled, a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def plant(path: Path, mark: Path) -> Path:
    """Programs that a configuration may name, and a pickle that runs one."""
    code = f"# {HOSTILE}\nopen({str(mark)!r}, 'w').close()\nclass Evil: pass\n"
    for name in ("evil", "modeling_evil", "configuration_evil", "tokenization_evil", "dataset"):
        (path / f"{name}.py").write_text(code)
    torch.save({"state_dict": Program(mark)}, path / "evil.pth")
    (path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    (path / "generation_config.json").write_text('{"custom_generate": "attacker/evil"}')
    asks = {"auto_map": AUTO_MAP, "image_processor_type": "Evil", "trust_remote_code": True}
    (path / "preprocessor_config.json").write_text(json.dumps(asks))
    return path


AUTO_MAP = {
    "AutoConfig": "evil.Evil",
    "AutoModel": "attacker/evil--modeling_evil.Evil",
    "AutoModelForImageClassification": "modeling_evil.Evil",
    "AutoModelForCausalLM": "modeling_evil.Evil",
    "AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"],
    "AutoImageProcessor": "evil.Evil",
}
NAMES_CODE = {
    "auto_map": AUTO_MAP,
    "trust_remote_code": True,
    "_target_": "evil.Evil",
    "_name_or_path": "attacker/evil",
}
REMOTE = "attacker/beacon"


def edit(path: Path, file: str = "config.json", **settings: Any) -> Path:
    said = json.loads((path / file).read_text()) if (path / file).exists() else {}
    (path / file).write_text(json.dumps(said | settings))
    return path


class Directories:
    """Directories by name, each a copy of a small model with something hostile in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.mark, self.canary = root, root / "it-ran", root / "canary.json"
        self.canary.write_text('{"secret": 1}')
        self.made: dict[str, Path] = {}
        self.legit = root / "legit"
        self.legit.mkdir()
        tiny.hf_clip_directory(self.legit / "clip")
        for kind in ("gpt2", "t5"):
            language.save(kind, self.legit / kind)
        for kind in ("bert", "roberta"):
            sentences.save(self.legit / kind, kind)
        self._vit()
        self._timm()
        self._open_clip()

    def _vit(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(
            self.legit / "vit"
        )

    def _timm(self) -> None:
        import timm

        path = self.legit / "timm"
        path.mkdir()
        state = timm.create_model("test_vit", num_classes=3).state_dict()
        save_safetensors(path / "model.safetensors", dict(state))
        (path / "config.json").write_text(json.dumps({"architecture": "test_vit", "num_classes": 3}))

    def _open_clip(self) -> None:
        path = self.legit / "open_clip"
        path.mkdir()
        sizes = {"width": tiny.WIDTH, "layers": tiny.LAYERS}
        vision = {**sizes, "image_size": 16, "patch_size": 8, "head_width": 16}
        text = {**sizes, "context_length": tiny.CONTEXT, "vocab_size": tiny.VOCABULARY, "heads": 2}
        config = {"embed_dim": tiny.EMBED, "vision_cfg": vision, "text_cfg": text}
        (path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
        save_safetensors(path / "open_clip_model.safetensors", dict(tiny.open_clip_vit().state_dict()))

    def copy(self, kind: str, name: str) -> Path:
        path = self.root / name
        shutil.copytree(self.legit / kind, path)
        self.made[name] = plant(path, self.mark)
        return path

    def open_clip(self, name: str, part: str, **settings: Any) -> Path:
        path = self.copy("open_clip", name)
        said = json.loads((path / "open_clip_config.json").read_text())
        said["model_cfg"][part] |= settings
        (path / "open_clip_config.json").write_text(json.dumps(said))
        return path


def hostile(root: Path) -> Directories:
    directories = Directories(root)
    evil = {"checkpoint_path": str(root / "wrapped-checkpoint" / "evil.pth")}
    wrapped = dict(model_type="timm_wrapper", architecture="test_vit")
    edit(directories.copy("timm", "wrapped-checkpoint"), **wrapped, model_args=evil)
    edit(directories.copy("timm", "wrapped-hub"), **wrapped | {"architecture": f"hf-hub:{REMOTE}"})
    edit(
        directories.copy("timm", "wrapped-local"),
        **wrapped | {"architecture": f"local-dir:{root}/legit/timm"},
    )
    edit(directories.copy("timm", "timm-checkpoint"), model_args=evil)
    edit(directories.copy("timm", "timm-hub"), architecture=f"hf-hub:{REMOTE}")
    sources = {"file": evil["checkpoint_path"], "url": "https://example.org/x.pth", "hf_hub_id": REMOTE}
    for key, value in sources.items():
        edit(directories.copy("timm", f"timm-{key}"), pretrained_cfg={key: value})
    backbone = dict(backbone=REMOTE, use_pretrained_backbone=True, use_timm_backbone=False)
    for kind in ("timm_backbone", "detr", "dpt", "upernet", "mask2former", "vitmatte"):
        edit(directories.copy("vit", f"backbone-{kind}"), model_type=kind, **backbone)
    edit(directories.copy("vit", "vit-backbone"), **backbone)
    edit(
        directories.copy("vit", "vit-deep"),
        attention={"inner": [{"checkpoint_path": str(directories.canary)}]},
    )
    edit(directories.copy("vit", "vit-code"), **NAMES_CODE, _attn_implementation="attacker/kernels")
    edit(directories.copy("vit", "vit-word"), hidden_act=f"{root}/vit-word/evil.py")
    towers = dict(encoder={"model_type": "vit"}, decoder={"model_type": "gpt2", "_name_or_path": REMOTE})
    for kind in ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder", "rag", "musicgen"):
        edit(directories.copy("gpt2", f"wrapper-{kind}"), model_type=kind, is_encoder_decoder=True, **towers)
    inner = {"model_type": "timm_wrapper", "architecture": f"hf-hub:{REMOTE}", "model_args": evil}
    for kind in ("llava", "gemma3", "gemma3n", "got_ocr2", "fuyu"):
        edit(
            directories.copy("gpt2", f"parts-{kind}"), model_type=kind, text_config=inner, vision_config=inner
        )
    edit(directories.copy("gpt2", "gpt2-code"), **NAMES_CODE, attn_implementation="attacker/kernels")
    edit(
        directories.copy("gpt2", "gpt2-layers"),
        per_layer_config={"0": {"checkpoint_path": str(directories.canary)}},
    )
    named = dict(tokenizer_class="Evil", name_or_path=REMOTE, auto_map=AUTO_MAP, trust_remote_code=True)
    files = {
        key: str(directories.canary) for key in ("tokenizer_file", "vocab_file", "merges_file", "gguf_file")
    }
    for kind in ("gpt2", "t5", "clip"):
        edit(directories.copy(kind, f"{kind}-tokenizer"), "tokenizer_config.json", **named, **files)
        other = {"fast_tokenizer_files": ["../canary.json"]}
        edit(directories.copy(kind, f"{kind}-fast"), "tokenizer_config.json", **other)
        path = edit(directories.copy(kind, f"{kind}-no-tokenizer"), "tokenizer_config.json", **named, **files)
        (path / "tokenizer.json").unlink()
    edit(directories.copy("gpt2", "gpt2-hub-tokenizer"), tokenizer_class=REMOTE, model_name=REMOTE)
    edit(directories.copy("gpt2", "gpt2-mistral"), transformers_version="4.0.0", _name_or_path="mistralai/x")
    tower = {"model_type": "timm_wrapper", **backbone}
    edit(directories.copy("clip", "clip-code"), **NAMES_CODE, vision_config=tower)
    directories.open_clip("oc-text-hub", "text_cfg", hf_model_name=REMOTE)
    directories.open_clip(
        "oc-text-known", "text_cfg", hf_model_name="xlm-roberta-base", hf_model_pretrained=True
    )
    directories.open_clip("oc-text-local", "text_cfg", hf_model_name=str(directories.legit / "gpt2"))
    directories.open_clip(
        "oc-tokenizer", "text_cfg", hf_tokenizer_name=REMOTE, tokenizer_kwargs={"trust_remote_code": True}
    )
    directories.open_clip("oc-timm-hub", "vision_cfg", timm_model_name=f"hf-hub:{REMOTE}")
    directories.open_clip("oc-timm", "vision_cfg", timm_model_name="resnet18", timm_model_pretrained=True)
    sentence_encoders(directories)
    pickled(directories)
    return directories


def sentence_encoders(directories: Directories) -> None:
    """Sentence-transformers directories whose small files name code, other files or repositories."""
    root, named = directories.root, dict(tokenizer_class="Evil", auto_map=AUTO_MAP, trust_remote_code=True)
    edit(directories.copy("bert", "bert-code"), **NAMES_CODE, _attn_implementation="attacker/kernels")
    edit(directories.copy("bert", "bert-word"), hidden_act=f"{root}/bert-word/evil.py")
    edit(directories.copy("bert", "bert-reference"), checkpoint_path=str(directories.canary))
    files = {key: str(directories.canary) for key in ("tokenizer_file", "vocab_file", "name_or_path")}
    edit(directories.copy("roberta", "roberta-tokenizer"), "tokenizer_config.json", **named, **files)
    path = edit(directories.copy("bert", "bert-no-tokenizer"), "tokenizer_config.json", **named, **files)
    (path / "tokenizer.json").unlink()
    hostile_modules = {
        "bert-module-type": dict(type="modeling_evil.Evil"),
        "bert-module-remote": dict(type=f"{REMOTE}--modeling_evil.Evil"),
        "bert-module-dotted": dict(type="sentence_transformers.models.Transformer; import os"),
        "bert-module-path": dict(path="../canary.json"),
        "bert-module-absolute": dict(path=str(root / "legit")),
        "bert-module-number": dict(path=3),
    }
    for name, change in hostile_modules.items():
        path = directories.copy("bert", name)
        said = json.loads((path / "modules.json").read_text())
        said[1] |= change
        (path / "modules.json").write_text(json.dumps(said))
    for kind in ("Dense", "StaticEmbedding", "Router", "WordEmbeddings"):
        path = directories.copy("bert", f"bert-{kind.lower()}")
        said = json.loads((path / "modules.json").read_text())
        said.append({"idx": 3, "name": "3", "path": "3_X", "type": f"sentence_transformers.models.{kind}"})
        (path / "modules.json").write_text(json.dumps(said))
    for name, text in {"object": "{}", "deep": "[" * 5000, "empty": "", "strings": '["evil"]'}.items():
        (directories.copy("bert", f"bert-modules-{name}") / "modules.json").write_text(text)
    path = directories.copy("bert", "bert-pooling-link")
    (path / "1_Pooling/config.json").unlink()
    (path / "1_Pooling/config.json").symlink_to(root / "nowhere")
    edit(directories.copy("bert", "bert-pooling-mode"), "1_Pooling/config.json", pooling_mode=REMOTE)
    edit(directories.copy("bert", "bert-pooling-two"), "1_Pooling/config.json", pooling_mode_cls_token=True)
    for name, length in {"huge": 10**300, "negative": -1, "text": "evil", "long": 10_000}.items():
        edit(
            directories.copy("bert", f"bert-length-{name}"),
            "sentence_bert_config.json",
            max_seq_length=length,
        )


def pickled(directories: Directories) -> None:
    """Pickles under every name that something might load."""
    state = {"weight": torch.zeros(2), "more": Program(directories.mark)}
    for kind, name in (("vit", "pytorch_model.bin"), ("open_clip", "open_clip_pytorch_model.bin"),
                       ("gpt2", "pytorch_model.bin")):  # fmt: skip
        path = directories.copy(kind, f"pickle-{kind}")
        for file in path.glob("*.safetensors"):
            file.unlink()
        torch.save(state, path / name)
        (path / "other.safetensors").write_bytes(pickle.dumps(Program(directories.mark)))
    path = directories.root / "adapter"
    path.mkdir()
    directories.made["adapter"] = plant(path, directories.mark)
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    lora |= {"base_model_name_or_path": REMOTE, "auto_mapping": {"parent_library": "evil"}}
    (path / "adapter_config.json").write_text(json.dumps(lora))
    torch.save(state, path / "adapter_model.bin")
    path = directories.root / "bank"
    path.mkdir()
    directories.made["bank"] = plant(path, directories.mark)
    (path / "manifest.json").write_text(json.dumps({"base": REMOTE, "vectors": ["evil.pth"]}))
    (path / "task.toml").write_text('reader = "evil:Evil"\nroot = "https://example.org"\n')


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return hostile(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def report(world: Directories) -> Report:
    given = {name: str(path) for name, path in world.made.items()}
    return run_guarded(BODY, given, root=world.root, canaries=(world.canary,), memory_mb=4_000)


def test_no_way_in_does_more_than_read(world: Directories, report: Report) -> None:
    assert report.violations == []
    assert report.finished, report.stderr
    assert not world.mark.exists()
    assert len(report.result["said"]) == len(world.made) * len(report.result["entries"])


def test_no_way_in_crashes(report: Report) -> None:
    assert report.result["crashes"] == []


UNSAFE = {
    "wrapped-checkpoint": "model_args.checkpoint_path",
    "wrapped-hub": "architecture",
    "wrapped-local": "architecture",
    "timm-checkpoint": "model_args.checkpoint_path",
    "timm-hub": "architecture",
    "timm-file": "pretrained_cfg.file",
    "timm-url": "pretrained_cfg.url",
    "timm-hf_hub_id": "pretrained_cfg.hf_hub_id",
    "vit-backbone": "backbone",
    "vit-deep": "attention.inner.checkpoint_path",
    "vit-word": "hidden_act",
    "clip-code": "vision_config.backbone",
    "oc-text-hub": "text_cfg.hf_model_name",
    "oc-text-known": "text_cfg.hf_model_name",
    "oc-text-local": "text_cfg.hf_model_name",
    "oc-timm-hub": "vision_cfg.timm_model_name",
}


@pytest.mark.parametrize("name", UNSAFE)
def test_a_key_that_names_something_to_load_is_refused_by_name(report: Report, name: str) -> None:
    code, exit_code, said = report.result["said"][f"{name}: load_model"]
    assert (code, exit_code) == ("DIR-CONFIG", 4), said
    assert UNSAFE[name] in said and "config.json" in said


SENTENCE_UNSAFE = {
    "bert-word": "hidden_act",
    "bert-reference": "checkpoint_path",
    "bert-module-type": "type",
    "bert-module-remote": "type",
    "bert-module-dotted": "type",
    "bert-module-path": "path",
    "bert-module-absolute": "path",
    "bert-module-number": "path",
}


@pytest.mark.parametrize("name", SENTENCE_UNSAFE)
def test_a_sentence_encoder_that_names_something_to_load_is_refused(report: Report, name: str) -> None:
    code, exit_code, said = report.result["said"][f"{name}: load_model"]
    assert (code, exit_code) == ("DIR-CONFIG", 4), said
    assert SENTENCE_UNSAFE[name] in said and ".json" in said


def test_sentence_encoders_that_cannot_be_built_are_refused(report: Report) -> None:
    odd = ("dense", "staticembedding", "router", "wordembeddings", "modules-object", "modules-deep",
           "modules-empty", "modules-strings", "pooling-link", "pooling-mode", "pooling-two",
           "length-huge", "length-negative", "length-text", "length-long")  # fmt: skip
    found = {name: report.result["said"][f"bert-{name}: load_model"][0] for name in odd}
    assert set(found.values()) == {"DIR-CONFIG"}, found
    assert report.result["said"]["bert-no-tokenizer: load_model"][0] == "MODEL-TOKENIZER"


@pytest.mark.parametrize("name", ["bert-code", "roberta-tokenizer"])
def test_a_sentence_encoder_s_names_of_code_and_files_are_not_followed(report: Report, name: str) -> None:
    assert report.result["said"][f"{name}: load_model"] == ["", 0, ""]


def test_layers_of_their_own_are_refused(report: Report) -> None:
    code, exit_code, said = report.result["said"]["gpt2-layers: load_language_model"]
    assert (code, exit_code) == ("DIR-CONFIG", 4) and "per_layer_config" in said


@pytest.mark.parametrize("name", ["vit-code", "clip-fast", "clip-tokenizer"])
def test_what_asks_for_code_or_other_files_is_not_followed(report: Report, name: str) -> None:
    assert report.result["said"][f"{name}: load_model"] == ["", 0, ""]


@pytest.mark.parametrize("name", ["gpt2-code", "gpt2-tokenizer", "t5-tokenizer", "gpt2-fast", "gpt2-mistral"])
def test_a_language_model_s_names_of_code_and_files_are_not_followed(report: Report, name: str) -> None:
    assert report.result["said"][f"{name}: load_language_model"] == ["", 0, ""]


def test_an_open_clip_directory_is_told_where_its_tokenizer_belongs(report: Report) -> None:
    code, exit_code, said = report.result["said"]["oc-tokenizer: load_model"]
    assert (code, exit_code) == ("MODEL-TOKENIZER", 3)
    assert f"hf download {REMOTE} tokenizer.json" in said and "--local-dir" in said


def test_a_known_text_tower_is_told_by_which_name_to_load_it(report: Report) -> None:
    said = report.result["said"]["oc-text-known: load_model"][2]
    assert "load_model('xlm-roberta-base-ViT-B-32', weights=" in said


# sizes

HUGE = 10**9
LARGE = {
    "vit-wide": dict(
        hidden_size=65536, intermediate_size=262144, num_hidden_layers=96, num_attention_heads=64
    ),
    "vit-deep": dict(num_hidden_layers=HUGE),
    "vit-layers": dict(num_hidden_layers=65536),
    "vit-image": dict(image_size=4096, patch_size=1),
    "vit-labels": dict(num_labels=HUGE, id2label=None, label2id=None),
    "vit-digits": dict(num_hidden_layers=10**300),
    "timm-depth": dict(model_args={"depth": HUGE}),
    "timm-layers": dict(model_args={"depth": 65536}),
    "timm-wide": dict(model_args={"embed_dim": 2048, "depth": 48, "mlp_ratio": 64.0}),
    "timm-classes": dict(num_classes=HUGE),
    "timm-large": dict(architecture="vit_giant_patch14_224"),
    "oc-layers": dict(vision_cfg={"layers": HUGE}),
    "oc-deep": dict(text_cfg={"layers": 65536}),
    "oc-wide": dict(vision_cfg={"width": 4096, "layers": 48}),
    "oc-context": dict(text_cfg={"context_length": 1 << 20}),
    "oc-timm": dict(vision_cfg={"timm_model_name": "vit_giant_patch14_clip_224"}),
    "gpt2-layers": dict(n_layer=HUGE),
    "gpt2-deep": dict(n_layer=65536),
    "gpt2-positions": dict(n_positions=1 << 30),
    "gpt2-wide": dict(n_embd=16384, n_head=16, n_layer=96),
    "clip-layers": dict(
        vision_config={"num_hidden_layers": 4096, "hidden_size": 32, "num_attention_heads": 2}
    ),
    "clip-wide": dict(text_config={"hidden_size": 4096, "num_hidden_layers": 96}),
}


def large(directories: Directories) -> dict[str, str]:
    for name, settings in LARGE.items():
        kind = name.partition("-")[0]
        if kind == "oc":
            ((part, tower),) = settings.items()
            directories.open_clip(f"large-{name}", part, **tower)
        else:
            edit(directories.copy(kind, f"large-{name}"), **settings)
    return {name: str(directories.made[f"large-{name}"]) for name in LARGE}


def test_a_configuration_far_larger_than_its_weights_costs_neither_memory_nor_time(
    tmp_path: Path,
) -> None:
    body = """
    import time
    import aniso
    from aniso.errors import AnisoError
    result = {}
    for name, path in given.items():
        start = time.process_time()
        try:
            (aniso.load_language_model if name.startswith("gpt2") else aniso.load_model)(path)
            said = ["loaded", 0]
        except AnisoError as e:
            said = [e.code, e.exit_code]
        result[name] = [*said, time.process_time() - start]
    """
    found = run_guarded(body, large(Directories(tmp_path)), root=tmp_path, cpu_seconds=60, memory_mb=1500)
    assert found.finished, found.stderr
    assert not found.violations
    codes = {name: said[:2] for name, said in found.result.items()}
    assert all(code in (["CKPT-SHAPE", 3], ["DIR-CONFIG", 3]) for code in codes.values()), codes
    assert max(said[2] for said in found.result.values()) < 15
    assert found.memory_mb < 500


# the guard itself

FORBIDDEN = {
    "connect": "import socket; socket.create_connection(('127.0.0.1', 9))",
    "resolve": "import socket; socket.getaddrinfo('example.org', 80)",
    "hub": "import huggingface_hub; huggingface_hub.model_info('attacker/beacon')",
    "torch.load": "torch.load(path / 'evil.pth', weights_only=False)",
    "unpickle": "import pickle; pickle.loads(b'N.')",
    "system": "import os; os.system('true')",
    "program": "import subprocess; subprocess.run(['true'])",
    "exec": "exec((path / 'evil.py').read_text(), {})",
    "import": "sys.path.insert(0, str(path)); import modeling_evil",
    "canary": "(path.parent / 'canary.json').read_text()",
}


def test_the_guard_notices_what_it_forbids(world: Directories) -> None:
    body = """
import sys
from pathlib import Path
import torch
path, result = Path(given["path"]), {}
for name, code in given["cases"].items():
    try:
        exec(code, {"path": path, "sys": sys, "torch": torch})
    except BaseException as e:
        result[name] = type(e).__name__
"""
    given = {"path": str(world.made["vit-code"]), "cases": FORBIDDEN}
    found = run_guarded(body, given, root=world.root, canaries=(world.canary,), libraries="import torch")
    assert found.finished, found.stderr
    assert found.result == dict.fromkeys(FORBIDDEN, "ForbiddenError")
    assert len(found.violations) >= len(FORBIDDEN)
    assert not world.mark.exists()
