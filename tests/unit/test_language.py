"""Language models: guesses against transformers' own loss, rows of tokens, gradients, runs and commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import language
import naive
import pytest
import torch
from adapters import random_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import At
from torch import Tensor

from aniso.compose import Coefficients, Composition, Partition
from aniso.data import Batches, TextDataset, read_examples
from aniso.data import text_dataset as data_passages
from aniso.data.text_dataset import NOTHING, Example, Padded
from aniso.errors import StoppedError, UsageError
from aniso.experiments.parsing import parse_setting
from aniso.experiments.strict_yaml import Document
from aniso.learn import Best, LanguageLoss, Last, Schedule, Trainable, evaluate_lm, fit, text_dataset
from aniso.learn._training.epoch_sampler import EpochSampler
from aniso.learn._training.loop import Loop
from aniso.learn._training.validation import Validation, scores
from aniso.learn.finetune import tuned_weights
from aniso.learn.language import LanguageScore
from aniso.learn.objectives import TermInputs
from aniso.learn.selection import BlockwiseGradient, WholeGradient
from aniso.models import LanguageModel, language_model, load_language_model
from aniso.records import EpochRow
from aniso.vectors import Bank, LowRank
from aniso.weights import save_safetensors

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

Aniso = Callable[..., Any]
Refused = Callable[..., AbstractContextManager[Any]]

KINDS = ("gpt2", "llama", "t5")
BLOCKS = Partition.blocks()
LAYERS: dict[str, dict[str, Any]] = {
    "gpt2": dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "llama": dict(target_modules=["q_proj", "v_proj", "down_proj"]),
    "t5": dict(target_modules=["q", "v", "wo"]),
}
TRAIN = [
    ("the cat", " sat on a mat"),
    ("two dogs ran over", " hills"),
    ("when people walked home from work by the river", " it was"),
    ("one bird", " sang of rain in the old town"),
    ("under tall trees", " so it was here"),
]
VAL = [("a bird", " sang in the old town"), ("the dogs", " ran home")]
TEST = [("two people", " sat by the river"), ("when it was", " not far"), ("a cat", " walked")]
TEXT = " ".join(language.WORDS)
FAST = Schedule(epochs=2, lr=0.05, batch_size=2, warmup_steps=0)


def lines(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of every kind, two adapters and a bank of each, and texts."""
    root = tmp_path_factory.mktemp("language")
    for kind in KINDS:
        network = language.save(kind, root / kind)
        for i, name in enumerate("ab"):
            fresh = type(network).from_pretrained(root / kind)
            how = dict(r=2 + i, lora_alpha=8, scale=0.2, **LAYERS[kind])
            random_adapter(fresh, root / f"{kind}-{name}", seed=i, **how)
        Bank.build(root / kind, {n: root / f"{kind}-{n}" for n in "ab"}, to=root / f"{kind}-bank")
    for name, pairs in (("train", TRAIN), ("val", VAL), ("test", TEST)):
        language.write_lines(root / f"{name}.jsonl", lines(pairs))
    return root


@pytest.fixture(scope="module")
def model(home: Path) -> Callable[[str], LanguageModel]:
    """Of each kind one, which no test changes."""
    made = {kind: load_language_model(home / kind) for kind in KINDS}
    return made.__getitem__


@pytest.fixture
def made(home: Path, model: Callable[[str], LanguageModel]) -> Callable[..., Composition]:
    def of(kind: str, partition: Partition = BLOCKS) -> Composition:
        return Composition(model(kind), Bank.load(home / f"{kind}-bank"), partition)

    return of


def texts(
    of: LanguageModel, pairs: list[tuple[str, str]] = TRAIN, role: str = "train", length: int = 32
) -> TextDataset:
    examples = [Example(prompt, completion, f"line {i}") for i, (prompt, completion) in enumerate(pairs, 1)]
    return text_dataset(of, examples, f"made {role}", role, length=length)


def stacked(split: TextDataset) -> Tensor:
    (batch,) = Batches(split, Padded(split.length), size=len(split))
    return batch.views[0]


def alone(network: Any, row: tuple[Tensor, Tensor]) -> tuple[float, int, int]:
    """Of a row without padding, as transformers has it: the sum of -log p, how many, and how many right."""
    read, wanted = (part.long()[None] for part in row)
    labels = wanted.masked_fill(wanted == NOTHING, -100)
    with torch.no_grad():
        out = network(input_ids=read, labels=labels)
    logits = out.logits
    if not network.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    count = int((labels != -100).sum())
    return float(out.loss) * count, count, int((logits.argmax(-1) == labels).sum())


def greedy(network: Any, read: list[int], count: int = 6) -> tuple[Tensor, Tensor]:
    """A row that a model guesses right, but for its last token."""
    made = list(read)
    with torch.no_grad():
        for _ in range(count):
            if network.config.is_encoder_decoder:
                begun = torch.tensor([[0, *made[len(read) :]]])
                logits = network(input_ids=torch.tensor([read]), decoder_input_ids=begun).logits
            else:
                logits = network(input_ids=torch.tensor([made])).logits
            made.append(int(logits[0, -1].argmax()))
    made[-1] = (made[-1] + 1) % 300
    said = made[len(read) :]
    if network.config.is_encoder_decoder:
        return torch.tensor(read, dtype=torch.int32), torch.tensor(said, dtype=torch.int32)
    wanted = [NOTHING] * len(read) + said
    return torch.tensor(made, dtype=torch.int32), torch.tensor(wanted, dtype=torch.int32)


# guesses


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_transformers_whatever_is_in_the_same_batch(
    home: Path, model: Callable[[str], LanguageModel], kind: str
) -> None:
    split = texts(model(kind))
    network = model(kind)._network
    rows = [*split.rows, greedy(network, [5, 80, 9])]
    split = TextDataset("made", rows, [f"row {i}" for i in range(len(rows))], 40)
    assert len({len(read) for read, _ in rows}) > 2
    expected = torch.tensor([alone(network, row) for row in rows], dtype=torch.float64)
    assert int(expected[-1, 2]) == 5
    with torch.no_grad():
        found = model(kind)(stacked(split)).double()
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, 1:], expected[:, 1:])
    for batch in (1, 2, 16):
        whole = evaluate_lm(model(kind), split, batch_size=batch)
        assert whole.total_loss == pytest.approx(float(expected[:, 0].sum()), rel=1e-5)
        assert (whole.tokens, whole.correct) == tuple(int(x) for x in expected[:, 1:].sum(0))


def test_losses_and_perplexities_are_about_tokens() -> None:
    one = LanguageScore(total_loss=6.0, tokens=3, correct=1)
    assert one.loss == 2.0 and one.perplexity == pytest.approx(torch.e**2)
    assert one.likelihood == pytest.approx(1 / one.perplexity)
    assert LanguageScore(total_loss=1e9, tokens=1, correct=0).perplexity < float("inf")


def test_a_model_is_left_in_its_mode_and_progress_is_told(model: Callable[[str], LanguageModel]) -> None:
    split, progress = texts(model("gpt2")), []
    for mode in (True, False):
        model("gpt2").train(mode)
        evaluate_lm(model("gpt2"), split, batch_size=2, progress=lambda *words: progress.append(words))
        assert model("gpt2").training == model("gpt2")._network.training == mode
    assert progress[:3] == [("made train", 2, 5), ("made train", 4, 5), ("made train", 5, 5)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_names_that_transformers_has(
    home: Path, model: Callable[[str], LanguageModel], kind: str
) -> None:
    fresh = getattr(transformers, type(model(kind)._network).__name__).from_pretrained(home / kind)
    own = model(kind).state_dict()
    assert list(own) == list(fresh.state_dict())
    assert all(torch.equal(own[key], value) for key, value in fresh.state_dict().items())
    assert not any(p.requires_grad for p in model(kind).parameters())


# rows


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_read_and_completions_guessed_to_their_end(
    model: Callable[[str], LanguageModel], kind: str
) -> None:
    own, tokens = model(kind), model(kind).tokens._tokenizer
    ((read, wanted),), cut = own.rows("the cat", " sat on", 32)
    before = tokens.encode("the cat", add_special_tokens=False)
    after = [*tokens.encode(" sat on", add_special_tokens=False), tokens.eos_token_id]
    assert not cut
    if kind == "t5":
        assert read.tolist() == [*before, tokens.eos_token_id] and wanted.tolist() == after
        return
    begin = [tokens.bos_token_id] if kind == "llama" else []
    assert read.tolist() == begin + before + after
    assert wanted.tolist() == [NOTHING] * len(begin + before) + after


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_are_too_long_lose_their_beginning_and_it_is_said(
    model: Callable[[str], LanguageModel], kind: str
) -> None:
    long = ("when people walked home from work by the river", " it was")
    ((whole, wanted),), cut = model(kind).rows(*long, 60)
    assert not cut
    split = texts(model(kind), [("a", " cat"), long], length=12)
    read, guess = split.rows[1]
    marks = [1] if kind == "llama" else []  # that of a beginning stays
    assert read.tolist() == marks + whole.tolist()[-12 + len(marks) :]
    assert guess[guess != NOTHING].tolist() == wanted[wanted != NOTHING].tolist()
    assert split.notes == ("1 example is longer than 12 tokens and cut, first: line 2",)
    assert not texts(model(kind), length=60).notes


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_longer_than_a_row_is_cut_at_its_end(
    model: Callable[[str], LanguageModel], kind: str
) -> None:
    after = model(kind).tokens.ending(TEXT)
    split = texts(model(kind), [("the cat", TEXT)], length=8)
    assert split.rows[0][1].tolist()[1:] == after[1:8] and len(split.notes) == 1
    assert evaluate_lm(model(kind), split).tokens == (8 if kind == "t5" else 7)


@pytest.mark.parametrize("pair", [("", "the cat sat"), ("the cat", TEXT)])
def test_tokens_to_guess_are_as_many_as_are_guessed(
    model: Callable[[str], LanguageModel], pair: tuple[str, str]
) -> None:
    split = texts(model("gpt2"), [pair], length=16)
    assert split.tokens == evaluate_lm(model("gpt2"), split).tokens


@settings(deadline=None, max_examples=60, database=None, derandomize=True)
@given(length=st.integers(2, 64), words=st.integers(1, 40))
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_token_of_a_text_but_the_first_is_guessed_once(
    model: Callable[[str], LanguageModel], kind: str, length: int, words: int
) -> None:
    text = " ".join(language.WORDS[:words])
    rows, cut = model(kind).rows(None, text, length)
    tokens = model(kind).tokens._tokenizer
    expected = [*tokens.encode(text), tokens.eos_token_id]
    assert (expected[0] == tokens.bos_token_id) == (kind == "llama") and not cut
    assert [t for _, wanted in rows for t in wanted.tolist() if t != NOTHING] == expected[1:]
    assert rows[0][0][0] == expected[0]
    for read, wanted in rows:
        assert 2 <= len(read) <= length
        assert wanted[0] == NOTHING and torch.equal(read[1:], wanted[1:])
    for (one, _), (other, _) in pairwise(rows):
        assert one[-1] == other[0] and len(one) == length


def test_text_files_and_lines_of_text_are_the_same_rows(
    model: Callable[[str], LanguageModel], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    language.write_lines(tmp_path / "a.jsonl", [{"text": TEXT}])
    one, other = (
        text_dataset(model("gpt2"), read_examples(tmp_path / name), name, length=16)
        for name in ("a.txt", "a.jsonl")
    )
    assert one.manifest == other.manifest and len(one) > 2
    assert (
        one.describe(2) == str(tmp_path / "a.txt") and other.describe(2) == f"{tmp_path / 'a.jsonl'} line 1"
    )


def test_lines_may_be_of_both_kinds_and_blank_ones_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "the cat"}\r\n\n {"completion": " b", "prompt": "a"}\n')
    assert read_examples(tmp_path / "a.jsonl") == (
        Example(None, "the cat", f"{tmp_path / 'a.jsonl'} line 2"),
        Example("a", " b", f"{tmp_path / 'a.jsonl'} line 4"),
    )


def test_models_that_answer_refuse_texts_without_prompts(
    model: Callable[[str], LanguageModel], refused: Refused
) -> None:
    with refused("DATA-TEXT", 3, "prompt"):
        model("t5").rows(None, TEXT, 16)


@pytest.mark.parametrize(("kind", "length"), [("gpt2", 1), ("gpt2", 65), ("llama", 0), ("t5", 1)])
def test_a_length_that_a_model_cannot_read_is_refused(
    model: Callable[[str], LanguageModel], refused: Refused, kind: str, length: int
) -> None:
    with refused("MODEL-LENGTH", 2, str(length), "--length"):
        texts(model(kind), length=length)


def test_a_length_that_is_not_said_is_what_the_model_can_read(model: Callable[[str], LanguageModel]) -> None:
    examples = [Example("the cat", " sat", "line 1")]
    assert [text_dataset(model(kind), examples, "made").length for kind in KINDS] == [64, 64, 512]


def test_a_tokenizer_that_was_saved_while_it_cut_texts_does_not_cut_them(home: Path, tmp_path: Path) -> None:
    language.save("gpt2", tmp_path / "m")
    said = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    said["truncation"] = dict(direction="Right", max_length=3, strategy="LongestFirst", stride=0)
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(said))
    own = load_language_model(tmp_path / "m").tokens
    assert len(own.whole(TEXT)) > 40
    assert own.fingerprint == load_language_model(home / "gpt2").tokens.fingerprint


def test_an_end_that_a_prompt_says_itself_is_read(model: Callable[[str], LanguageModel]) -> None:
    assert model("llama").tokens.opening("the cat</s>")[-1] == 2


def test_a_tokenizer_with_another_end_is_another_tokenizer(home: Path, tmp_path: Path) -> None:
    language.save("gpt2", tmp_path / "m")
    said = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({**said, "eos_token": "<pad>"}))
    one, other = (load_language_model(path).tokens for path in (home / "gpt2", tmp_path / "m"))
    assert one.ending("a") != other.ending("a")
    assert one.fingerprint != other.fingerprint


# splits


def test_both_sides_mean_the_same_by_nothing() -> None:
    assert data_passages.NOTHING == language_model.NOTHING == NOTHING


def test_equal_rows_have_keys_of_their_own_and_any_token_changes_the_manifest() -> None:
    def split(*rows: tuple[list[int], list[int]]) -> TextDataset:
        made = [(torch.tensor(read), torch.tensor(wanted)) for read, wanted in rows]
        return TextDataset("made", made, ["here"] * len(made), 8)

    one = ([1, 2, 3], [NOTHING, 2, 3])
    twice = split(one, one)
    assert len(set(twice.keys)) == 2 and twice.keys == split(one, one).keys
    others = [
        split(one),
        split(one, ([1, 2, 4], [NOTHING, 2, 3])),
        split(one, ([1, 2, 3], [NOTHING, 2, 4])),
        split(one, ([1, 2, 3], [NOTHING, NOTHING, 3])),
        split(one, ([1, 2], [NOTHING, 2])),
        split(one, ([1, 23], [NOTHING, 2, 3])),
    ]
    assert len({twice.manifest, *(other.manifest for other in others)}) == 7
    assert twice.manifest == split(one, one).manifest


def test_padding_keeps_tokens_and_workers_change_nothing(model: Callable[[str], LanguageModel]) -> None:
    split = texts(model("gpt2"))
    for i, (read, wanted) in enumerate(split.rows):
        row = stacked(split)[i]
        assert row.shape == (2, 32) and row.dtype == torch.long
        assert torch.equal(row[0, : len(read)].int(), read) and bool((row[0, len(read) :] == NOTHING).all())
        assert torch.equal(row[1, : len(wanted)].int(), wanted)
    (other,) = Batches(split, Padded(32), size=8, workers=1)
    assert torch.equal(other.views[0], stacked(split))


# compositions


@pytest.mark.parametrize("kind", KINDS)
def test_a_composition_at_zero_is_the_base_bit_for_bit(
    model: Callable[[str], LanguageModel], made: Callable[..., Composition], kind: str
) -> None:
    rows = stacked(texts(model(kind)))
    with torch.no_grad():
        composition = made(kind)
        assert torch.equal(composition(rows), model(kind)(rows))
        base = model(kind)(rows)
        naive.randomise(composition)
        assert not torch.equal(composition(rows), base)
        assert torch.equal(model(kind)(rows), base)


def by_hand(network: Any, split: TextDataset) -> Tensor:
    """The mean over rows of their mean -log p, in the network's own precision and without padding."""
    total = torch.zeros((), dtype=torch.float64)
    for read, wanted in split.rows:
        kept = wanted.long()[wanted != NOTHING]
        if network.config.is_encoder_decoder:
            begun = torch.cat([torch.zeros(1, dtype=torch.long), kept[:-1]])[None]
            logits = network(input_ids=read.long()[None], decoder_input_ids=begun).logits[0]
        else:
            logits = network(input_ids=read.long()[None]).logits[0, -len(kept) - 1 : -1]
        total = total - logits.log_softmax(-1)[torch.arange(len(kept)), kept].mean()
    return total / len(split)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_coefficients_are_those_of_a_naive_sum(home: Path, kind: str) -> None:
    own = load_language_model(home / kind).double()
    bank = Bank.load(home / f"{kind}-bank")
    assert {type(bank["a"][block.name]) for block in bank["a"].blocks} == {LowRank}
    composition, split = Composition(own, bank), texts(own)
    naive.randomise(composition)
    loss = LanguageLoss(split).loss(TermInputs((composition(stacked(split)),), (), None))
    (found,) = torch.autograd.grad(loss, composition.values)
    values = composition.values.detach().double().clone().requires_grad_()
    expected = naive.run(composition, own._network, by_hand, split, values)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    (wanted,) = torch.autograd.grad(expected, values)
    assert float(wanted.abs().max()) > 1e-3
    assert naive.close(found.double(), wanted, 1e-4)


def gradients_in(composition: Composition, split: TextDataset, schedule: Schedule) -> tuple[Tensor, Any]:
    """What the loop adds up in its first step."""
    term = LanguageLoss(split)
    naive.randomise(composition, scale=0.1)
    loop = Loop(Trainable.coefficients(composition), term * 1.0, schedule, Last())
    batches = next(iter(EpochSampler([(split, term.views(composition))], schedule, 0).epoch(0)))
    losses = loop._gradients(batches)
    assert composition.values.grad is not None
    return composition.values.grad.clone(), losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_slices_of_a_step_give_the_gradient_of_the_whole(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel], kind: str, micro: int
) -> None:
    split = texts(model(kind))
    whole, losses = gradients_in(made(kind), split, Schedule(epochs=1, lr=0.1, batch_size=5))
    sliced, parts = gradients_in(
        made(kind), split, Schedule(epochs=1, lr=0.1, batch_size=5, micro_batch=micro)
    )
    assert naive.close(sliced, whole, 1e-4)
    assert {n: (pytest.approx(v, rel=1e-5), c) for n, (v, c) in losses.items()} == parts


# runs


def run(composition: Composition, own: LanguageModel, progress: Any = None, **more: Any) -> tuple[bytes, Any]:
    keep = Best(texts(own, VAL, "val"))
    done = fit(composition, LanguageLoss(texts(own)), FAST, keep=keep, progress=progress, **more)
    return composition.values.detach().numpy().tobytes(), done.history


def test_the_same_seed_gives_the_same_and_another_does_not(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel]
) -> None:
    found = [run(made("gpt2"), model("gpt2"), seed=seed, workers=w) for seed, w in ((0, 0), (0, 1), (1, 0))]
    assert found[0] == found[1] and found[0][0] != found[2][0]
    assert found[0][1][-1].loss < found[0][1][1].loss


@pytest.mark.parametrize("n", [1, 3, 5, 8])
def test_a_run_that_was_interrupted_anywhere_ends_the_same(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel], tmp_path: Path, n: int
) -> None:
    whole = run(made("llama"), model("llama"))
    with pytest.raises(StoppedError):
        run(made("llama"), model("llama"), At(n), directory=tmp_path / "run")
    assert run(made("llama"), model("llama"), directory=tmp_path / "run", resume=True) == whole


def test_a_run_does_not_go_on_with_other_texts(
    made: Callable[..., Composition],
    model: Callable[[str], LanguageModel],
    tmp_path: Path,
    refused: Refused,
) -> None:
    own = model("gpt2")
    with pytest.raises(StoppedError):
        fit(made("gpt2"), LanguageLoss(texts(own)), FAST, progress=At(2), directory=tmp_path / "run")
    for split in (texts(own, TRAIN[:4]), texts(own, length=16)):
        with refused("RUN-CHANGED", 3):
            fit(made("gpt2"), LanguageLoss(split), FAST, directory=tmp_path / "run", resume=True)


def test_the_epoch_with_the_lowest_perplexity_is_kept(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel]
) -> None:
    composition, own = made("gpt2"), model("gpt2")
    val, seen = texts(own, VAL, "val"), []
    done = fit(
        composition,
        LanguageLoss(texts(own)),
        Schedule(epochs=4, lr=0.4, batch_size=2, warmup_steps=0),
        keep=Best(val),
        epoch_done=lambda row: seen.append(composition.values.detach().clone()),
    )
    found = [row.perplexity["made val"] for row in done.history]
    assert all(row.accuracy == {} for row in done.history)
    assert found[0] == evaluate_lm(own, val).perplexity
    assert done.kept == found.index(min(found)) and [row.kept for row in done.history].count(True) == 1
    assert torch.equal(composition.values, seen[done.kept])
    assert evaluate_lm(composition, val).perplexity == found[done.kept]


def test_the_start_is_kept_if_nothing_is_better(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel]
) -> None:
    composition, own = made("gpt2", Partition.whole()), model("gpt2")
    split = texts(own)
    worse = Schedule(epochs=2, lr=0.2, batch_size=5, warmup_steps=0)
    done = fit(composition, -1.0 * LanguageLoss(split), worse, keep=Best(texts(own, TRAIN, "val")))
    assert done.kept == 0 and not composition.values.any()
    assert done.history[-1].perplexity["made val"] > done.history[0].perplexity["made val"]


def test_of_perplexities_the_lower_is_worth_more(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel]
) -> None:
    split = texts(model("gpt2"), VAL, "val")
    read = Validation(made("gpt2"), Best(split), batch_size=1).measure()
    expected = evaluate_lm(model("gpt2"), split)
    assert read == {"accuracy": {}, "perplexity": {"made val": pytest.approx(expected.perplexity)}}
    assert scores(EpochRow.model_validate(read)) == {"made val": pytest.approx(expected.likelihood)}
    assert scores(EpochRow(accuracy={"a": 0.5}, perplexity={"b": 4.0})) == {"a": 0.5, "b": 0.25}


def test_nothing_is_learned_from_or_chosen_by_texts_for_testing(
    model: Callable[[str], LanguageModel], refused: Refused
) -> None:
    split = texts(model("gpt2"), TEST, "test")
    with refused("LEARN-TEST", 2, "made test"):
        LanguageLoss(split)
    with refused("LEARN-TEST", 2, "made test"):
        Best(split)


def test_trained_weights_are_read_back_as_the_model_that_was_trained(
    model: Callable[[str], LanguageModel], home: Path, tmp_path: Path
) -> None:
    split = texts(model("gpt2"))
    trained = Trainable.weights(model("gpt2"))
    fit(trained, LanguageLoss(split), Schedule(epochs=1, lr=1e-2, batch_size=5, warmup_steps=0))
    weights = tuned_weights(model("gpt2"), trained)
    save_safetensors(tmp_path / "w.safetensors", {name: weights.read(name) for name in weights.tensors})
    again = load_language_model(home / "gpt2", tmp_path / "w.safetensors")
    assert evaluate_lm(again, split).total_loss == pytest.approx(
        evaluate_lm(trained.model, split).total_loss, rel=1e-6
    )


# choosing


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_to_choose_by_are_those_of_autograd(
    home: Path, model: Callable[[str], LanguageModel], made: Callable[..., Composition], kind: str
) -> None:
    split, bank = texts(model(kind)), Bank.load(home / f"{kind}-bank")
    composition = made(kind)
    LanguageLoss(split).loss(TermInputs((composition(stacked(split)),), (), None)).backward()
    assert composition.values.grad is not None
    labels = list(composition.index.labels())
    for strategy in (BlockwiseGradient, WholeGradient):
        for batch in (2, 64):
            found = strategy(model(kind), LanguageLoss(split), 1, batch_size=batch).scores(bank)
            own = torch.tensor([found[vector][block] for vector, block, _ in labels])
            assert naive.close(own, composition.values.grad, 1e-4)
    chosen = WholeGradient(model(kind), LanguageLoss(split), 1).choose(bank)
    assert len(chosen.bank.names) == 1


def test_losses_alone_improve_a_composition(
    made: Callable[..., Composition], model: Callable[[str], LanguageModel]
) -> None:
    pytest.importorskip("nevergrad")
    from aniso.learn.gradient_free import evolve, objective_loss

    composition, split = made("llama", Partition.whole()), texts(model("llama"))
    start = objective_loss(composition, LanguageLoss(split) * 1.0)
    done = evolve(composition, LanguageLoss(split), evaluations=24, keep=Best(texts(model("llama"), VAL)))
    losses = [row.loss for row in done.history[1:]]
    assert losses == sorted(losses, reverse=True) and losses[-1] < start
    found = [row.perplexity["made train"] for row in done.history]
    assert found[done.kept] == min(found)


# commands


def lm(home: Path, *more: object, kind: str = "gpt2", bank: bool = True) -> tuple[object, ...]:
    base = ("--model", home / kind, *(("--bank", home / f"{kind}-bank") if bank else ()))
    trained = not {"none", "gradient-free"} & {*more}
    quick = ("--epochs", 2, "--batch-size", 3, "--min-steps-per-epoch", 2) if trained else ()
    return ("fit", "lm", *base, "--train", home / "train.jsonl", "--length", 60, *quick, *more)


@pytest.fixture
def done(aniso: Aniso) -> Callable[..., Any]:
    def ran(*args: object) -> Any:
        found = aniso(*args, "--json")
        assert found.code == 0, found.err
        return json.loads(found.out)

    return ran


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_says_how_well_texts_are_guessed_before_and_after(
    home: Path, model: Callable[[str], LanguageModel], done: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    own, out = model(kind), tmp_path / "run"
    given = ("--test", home / "test.jsonl", "--val", home / "val.jsonl", "-o", out)
    made = done(*lm(home, *given, kind=kind))
    metrics, name = made["metrics"], "test.jsonl test"
    test = text_dataset(own, read_examples(home / "test.jsonl"), name, "test", length=60)
    base = evaluate_lm(own, test)
    assert metrics["base_perplexity"] == {name: pytest.approx(base.perplexity, rel=1e-5)}
    assert metrics["zero_shot"] == {name: pytest.approx(base.correct / base.tokens)}
    coefficients = Coefficients.load(out / "coefficients.safetensors")
    after = evaluate_lm(Composition.of(own, Bank.load(home / f"{kind}-bank"), coefficients), test)
    assert metrics["perplexity"] == {name: pytest.approx(after.perplexity, rel=1e-5)}
    assert (metrics["accuracy"][name]["correct"], metrics["accuracy"][name]["total"]) == (
        after.correct,
        after.tokens,
    )
    found = [row["perplexity"]["val.jsonl val"] for row in metrics["history"]]
    assert metrics["kept_epoch"] == found.index(min(found)) and metrics["epochs"] == 2
    assert made["spec"]["train"] == "train.jsonl train" and made["inputs"]["vectors"] == ["a", "b"]
    expected = {"model", "config", "tokens", "data", "content", "bank", "selected", "vectors"}
    assert set(made["inputs"]) == expected
    assert made["inputs"]["data"][name] == test.manifest
    assert str(home) not in (out / "record.json").read_text()
    written = {p.name for p in out.iterdir()}
    assert written == {"spec.yaml", "record.json", "coefficients.safetensors", "metrics.jsonl"}


def test_what_a_record_says_a_person_is_told_too(home: Path, aniso: Aniso, tmp_path: Path) -> None:
    ran = aniso(*lm(home, "--test", home / "test.jsonl", "--val", home / "val.jsonl", "-o", tmp_path / "run"))
    assert ran.code == 0, ran.err
    assert "base: perplexity" in ran.out and "learned: perplexity" in ran.out and "of 2; " in ran.out
    assert "val.jsonl val perplexity" in ran.err
    again = aniso(*lm(home, "--test", home / "test.jsonl", "-o", tmp_path / "run"))
    assert again.code == 2 and "OUT-EXISTS" in again.err


def test_without_texts_to_test_by_there_is_a_warning(home: Path, aniso: Aniso, tmp_path: Path) -> None:
    ran = aniso(*lm(home, "-o", tmp_path / "run"))
    assert ran.code == 0 and "warning" in ran.err and "--test" in ran.err
    found = json.loads((tmp_path / "run" / "record.json").read_text())["metrics"]
    assert found["accuracy"] == {} and "perplexity" not in found
    assert (tmp_path / "run" / "coefficients.safetensors").is_file()


def test_a_plan_says_what_will_be_done_and_does_nothing(
    home: Path, done: Callable[..., Any], tmp_path: Path
) -> None:
    made = done(*lm(home, "--test", home / "test.jsonl", "--plan", "-o", tmp_path / "run"))
    assert made["tests"] == {"test.jsonl test": 3} and made["learned_from"] == {"train.jsonl train": 5}
    assert made["steps"] == 4 and made["vectors"] == ["a", "b"] and made["trainable"] > 2
    assert not (tmp_path / "run").exists()
    lora = done(*lm(home, "--method", "weights", "--lora", 2, "--plan", bank=False))
    weights = done(*lm(home, "--method", "weights", "--plan", bank=False))
    assert 0 < lora["trainable"] < weights["trainable"]


def test_a_plan_speaks_of_texts(home: Path, aniso: Aniso) -> None:
    ran = aniso(*lm(home, "--plan"))
    assert ran.code == 0 and "train.jsonl train" in ran.out and "images" not in ran.out


def test_a_printed_spec_is_the_same_setting(home: Path, aniso: Aniso) -> None:
    import yaml

    ran = aniso(*lm(home, "--val", home / "val.jsonl", "--print-spec"))
    assert ran.code == 0
    said = yaml.safe_load(ran.out)
    assert (said["setting"], said["length"], said["schedule"]["lr"]) == ("lm", 60, 0.05)
    assert parse_setting(Document("spec", said, {})).spec() == said


def test_changing_nothing_measures_the_base(
    home: Path, model: Callable[[str], LanguageModel], done: Callable[..., Any]
) -> None:
    made = done(*lm(home, "--method", "none", "--test", home / "test.jsonl", bank=False))
    split = text_dataset(model("gpt2"), read_examples(home / "test.jsonl"), "t", length=60)
    (found,) = made["metrics"]["perplexity"].values()
    assert found == pytest.approx(evaluate_lm(model("gpt2"), split).perplexity, rel=1e-5)
    assert "base_perplexity" not in made["metrics"] and "bank" not in made["inputs"]


def test_all_weights_can_be_trained(home: Path, done: Callable[..., Any], tmp_path: Path) -> None:
    given = ("--method", "weights", "--lr", 1e-2, "--test", home / "test.jsonl", "-o", tmp_path / "run")
    made = done(*lm(home, *given, kind="llama", bank=False))
    assert made["metrics"]["perplexity"] != made["metrics"]["base_perplexity"]
    own = load_language_model(home / "llama", tmp_path / "run" / "weights.safetensors")
    split = text_dataset(own, read_examples(home / "test.jsonl"), "t", length=60)
    (found,) = made["metrics"]["perplexity"].values()
    assert evaluate_lm(own, split).perplexity == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lora_is_one_that_peft_reads(
    home: Path, done: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    given = ("--method", "weights", "--lora", 2, "--lr", 0.05, "--test", home / "test.jsonl")
    made = done(*lm(home, *given, "-o", tmp_path / "run", kind=kind, bank=False))
    assert made["metrics"]["perplexity"] != made["metrics"]["base_perplexity"]
    own = load_language_model(home / kind)
    split = text_dataset(own, read_examples(home / "test.jsonl"), "t", length=60)
    loaded = peft.PeftModel.from_pretrained(own._network, tmp_path / "run" / "adapter").eval()
    rows = [alone(loaded, row) for row in split.rows]
    total = LanguageScore(sum(r[0] for r in rows), sum(r[1] for r in rows), sum(r[2] for r in rows))
    (found,) = made["metrics"]["perplexity"].values()
    assert total.perplexity == pytest.approx(found, rel=1e-4)
    bank = Bank.build(home / kind, {"own": tmp_path / "run" / "adapter"})
    again = evaluate_lm(_at_one(load_language_model(home / kind), bank), split)
    assert again.perplexity == pytest.approx(found, rel=1e-4)


def _at_one(own: LanguageModel, bank: Bank) -> Composition:
    composition = Composition(own, bank, Partition.whole())
    with torch.no_grad():
        composition.values.fill_(1.0)
    return composition


def test_vectors_can_be_chosen_and_left_out(home: Path, done: Callable[..., Any]) -> None:
    chosen = done(*lm(home, "--select", "blockwise-gradient", "--budget", 1))
    (whole,) = {row["budget"] for row in (chosen["metrics"]["selection"],)}
    assert str(whole) == "1" and chosen["metrics"]["trainable"] < done(*lm(home))["metrics"]["trainable"]
    assert done(*lm(home, "--leave-out", "a"))["inputs"]["vectors"] == ["b"]


def test_coefficients_can_be_learned_from_losses_alone(home: Path, done: Callable[..., Any]) -> None:
    pytest.importorskip("nevergrad")
    given = ("--method", "gradient-free", "--evaluations", 4, "--partition", "whole")
    made = done(*lm(home, *given, "--val", home / "val.jsonl"))
    assert made["metrics"]["evaluations"] == 4 and made["metrics"]["trainable"] == 2
    assert set(made["metrics"]["history"][0]["perplexity"]) == {"val.jsonl val"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--method", "search"), "coefficients, gradient-free, weights or none"),
        (("--method", "vector"), "coefficients, gradient-free, weights or none"),
        (("--select", "features", "--budget", 1), "blockwise-gradient"),
        (("--select", "random"), "budget"),
        (("--lora", 2), "--method weights"),
        (("--method", "weights", "--select", "random", "--budget", 1), "no vectors to select from"),
        (("--length", 1), "--length"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    home: Path, aniso: Aniso, tmp_path: Path, more: tuple[object, ...], words: str
) -> None:
    ran = aniso(*lm(home, *more, "-o", tmp_path / "run"))
    assert ran.code == 2 and words in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_a_spec_for_texts_is_about_texts(refused: Refused) -> None:
    said = {"setting": "lm", "model": "m", "bank": "b", "train": "t.jsonl"}
    parse_setting(Document("spec", dict(said), {}))
    for key, value in (("linearised", True), ("split_seed", 1), ("task", "cars"), ("shots", 4)):
        with pytest.raises(UsageError) as caught:
            parse_setting(Document("spec", {**said, key: value}, {}))
        assert caught.value.code == "SPEC"
    without = {key: value for key, value in said.items() if key != "bank"}
    with refused("SPEC", 2, "bank"):
        parse_setting(Document("spec", without, {}))


def test_a_record_does_not_say_where_texts_lie(home: Path, done: Callable[..., Any]) -> None:
    made = done(*lm(home, "--length", 8))
    assert any("and cut" in note for note in made["notes"])
    assert str(home) not in json.dumps(made)


def test_texts_that_were_learned_from_are_no_test(home: Path, aniso: Aniso) -> None:
    ran = aniso(*lm(home, "--test", home / "train.jsonl"))
    assert ran.code != 0 or "warning" in ran.err
