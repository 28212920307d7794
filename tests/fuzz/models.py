"""Directories of models: configurations of strangers that decide what is built."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import torch

from . import mutations as change
from .targets import Case, Target


class _Directories(Target):
    """Whole directories in which one JSON file is edited."""

    quick: ClassVar[int] = 60  # building a network takes 50 ms, a thousand times what parsing takes

    def prepare(self, place: Path) -> None:
        self._seeds: list[dict[str, bytes]] = []
        for name in self._make(place):
            files = [path for path in sorted((place / name).rglob("*")) if path.is_file()]
            root = place / name
            self._seeds.append({path.relative_to(root).as_posix(): path.read_bytes() for path in files})

    def _make(self, place: Path) -> list[str]:
        raise NotImplementedError

    def case(self, rng: random.Random) -> Case:
        files = dict(rng.choice(self._seeds))
        names = [name for name in files if name.endswith(".json")]
        likely = [name for name in names if "config" in name or name == "modules.json"]
        name = rng.choice(likely if rng.random() < 0.8 else names)
        edited = change.json_edited(rng, json.loads(files[name]))
        return Case({**files, name: change.json_bytes(rng, edited)})

    def warm(self, folder: Path) -> None:
        for files in self._seeds:
            for name, data in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            self.read(folder)
            for name in files:
                (folder / name).unlink()


class Encoders(_Directories):
    """CLIP as Hugging Face and open_clip store it."""

    name: ClassVar[str] = "encoders"

    def _make(self, place: Path) -> list[str]:
        _hugging_face_clip(place / "hf")
        _open_clip(place / "open_clip")
        return ["hf", "open_clip"]

    def read(self, folder: Path) -> None:
        from aniso import load_model

        load_model(folder)


class SentenceEncoders(_Directories):
    """Small sentence encoders with tokenizer and pooling, as sentence-transformers stores them."""

    name: ClassVar[str] = "sentence-encoders"

    def _make(self, place: Path) -> list[str]:
        _sentence_encoder(place / "bert", "bert")
        _sentence_encoder(place / "mpnet", "mpnet")
        return ["bert", "mpnet"]

    def read(self, folder: Path) -> None:
        from aniso import load_model

        load_model(folder)


class LanguageModels(_Directories):
    """A small causal language model with its tokenizer."""

    name: ClassVar[str] = "language-models"

    def _make(self, place: Path) -> list[str]:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        tokenizer = _tokenizer()
        config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(place / "gpt2")
        tokenizer.save_pretrained(place / "gpt2")
        return ["gpt2"]

    def read(self, folder: Path) -> None:
        from aniso import load_language_model

        load_language_model(folder)


def _hugging_face_clip(path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "projection_dim": 24,
    }  # fmt: skip
    tokens = [*"abcdefgh", *(f"{letter}</w>" for letter in "abcdefgh"), "<|startoftext|>", "<|endoftext|>"]
    text = {"vocab_size": len(tokens), "max_position_embeddings": 12, "bos_token_id": 16, "eos_token_id": 17}
    vision = {"image_size": 16, "patch_size": 8}
    config = CLIPConfig(vision_config={**vision, **common}, text_config={**text, **common}, projection_dim=24)
    CLIPModel(config).save_pretrained(path)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=12).save_pretrained(path)


def _sentence_encoder(path: Path, kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    path.mkdir()
    (path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = transformers.BertTokenizerFast(str(path / "vocab.txt"), model_max_length=12)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 16,
    }  # fmt: skip
    network = transformers.AutoModel.from_config(transformers.CONFIG_MAPPING[kind](**sizes))
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{k}" if i else "",
            "type": f"sentence_transformers.models.{k}",
        }
        for i, k in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    length = {"max_seq_length": 12, "do_lower_case": False}
    (path / "sentence_bert_config.json").write_text(json.dumps(length))


def _open_clip(path: Path) -> None:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    from aniso.weights import save_safetensors

    torch.manual_seed(0)
    vision = {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16}
    text = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    model = CLIP(24, CLIPVisionCfg(**vision), CLIPTextCfg(**text))
    state = {key: value.half() for key, value in model.state_dict().items()}
    path.mkdir()
    save_safetensors(path / "open_clip_model.safetensors", state)
    config = {"model_cfg": {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": {}}
    (path / "open_clip_config.json").write_text(json.dumps(config))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(["<unk>", "<eos>", *"abcdefgh"])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>")
