"""Small sentence encoders with random weights, saved as sentence-transformers saves them; texts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXTS = [
    "the cat sat on a mat",
    "two dogs ran over green hills and one bird sang",
    "rain",
    "people walked home from work by the river under tall trees while it was not far",
    "the old town",
    "a bird sang of rain in the old town when people walked home",
]
WORDS = sorted({word for text in TEXTS for word in text.split()})
KINDS = ("bert", "mpnet", "roberta", "xlm-roberta", "distilbert")
_MARKS = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "distilbert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
}
_OTHERS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def tokenizer(kind: str) -> Any:
    """A word-level tokenizer with the family's special tokens around every text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = _MARKS.get(kind, _OTHERS)
    names = ("pad", "unk", "cls", "sep", "mask") if kind in _MARKS else ("cls", "pad", "sep", "unk", "mask")
    mark = dict(zip(names, marks, strict=True))
    vocabulary = {word: i for i, word in enumerate([*marks, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=mark["unk"]))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = [(mark[name], vocabulary[mark[name]]) for name in ("cls", "sep")]
    made.post_processor = processors.TemplateProcessing(
        single=f"{mark['cls']} $A {mark['sep']}", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": token for name, token in mark.items()}
    )


def network(kind: str, size: int, seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(vocab_size=size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(intermediate_size=24, max_position_embeddings=40, initializer_range=0.3)
    if kind == "distilbert":
        config: Any = transformers.DistilBertConfig(
            vocab_size=size, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=40
        )
        return transformers.DistilBertModel(config)
    if kind != "bert":
        sizes |= dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
    config = transformers.CONFIG_MAPPING[kind](**sizes)
    return transformers.AutoModel.from_config(config)


def save(
    path: Path,
    kind: str = "bert",
    *,
    pooling: str = "mean",
    normalise: bool = True,
    length: int | None = 12,
    seed: int = 0,
) -> Any:
    """Write a directory with network, tokenizer and pooling; the network is returned."""
    tokens = tokenizer(kind)
    made = network(kind, len(tokens), seed).eval()
    made.save_pretrained(path)
    tokens.save_pretrained(path)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
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
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    flags = {f"pooling_mode_{name}": mode == pooling for mode, name in modes.items()}
    (path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 16, **flags}))
    (path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": length, "do_lower_case": False})
    )
    return made


@torch.no_grad()
def embedded(
    path: Path, texts: list[str], *, pooling: str = "mean", normalise: bool = True, length: int = 12
) -> torch.Tensor:
    """The embeddings by transformers and the stated pooling, one text at a time: no padding anywhere."""
    from transformers import AutoModel, AutoTokenizer

    tokens, made = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    rows = []
    for text in texts:
        given = tokens(text, truncation=True, max_length=length, return_tensors="pt")
        given = {key: given[key] for key in ("input_ids", "attention_mask")}
        hidden = made(**given).last_hidden_state[0]
        rows.append({"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0)}[pooling])
    out = torch.stack(rows)
    return torch.nn.functional.normalize(out, dim=-1) if normalise else out


def write_task(path: Path, each: int = 12) -> Path:
    """A task of two classes, whose texts differ by their words, as CSV."""
    animals, places = ("cat", "dogs", "bird"), ("town", "river", "hills")
    rows = ["text,label"]
    for i in range(each):
        rows.append(f"the {animals[i % 3]} sat {' '.join(WORDS[i % 7 : i % 7 + 3])} {WORDS[i]},bird")
        rows.append(f"the old {places[i % 3]} {' '.join(WORDS[i % 5 : i % 5 + 4])} {WORDS[-i - 1]},town")
    path.write_text("\n".join(rows) + "\n")
    return path
