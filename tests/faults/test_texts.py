"""Texts, tokenizers and language models that cannot be used: each refused by name, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import language
import pytest
import tiny
from adapters import random_adapter

from aniso.data import TextDataset, read_examples
from aniso.data.text_dataset import Example
from aniso.learn import LanguageLoss, evaluate_lm, text_dataset
from aniso.learn.unwrap import encoder_of, language_model_of
from aniso.models import load_language_model
from aniso.vectors import Bank

transformers = pytest.importorskip("transformers")

Aniso = Callable[..., Any]
Refused = Callable[..., AbstractContextManager[Any]]

GOOD = b'{"prompt": "the cat", "completion": " sat"}\n'
FILES = {
    "empty": (b"", "DATA-TEXT", "bad.jsonl"),
    "blank": (b"\n \n\t\n", "DATA-TEXT", "bad.jsonl"),
    "no JSON": (GOOD + b"the cat sat\n", "DATA-TEXT", "line 2"),
    "cut": (GOOD + b'{"text": "the c', "DATA-TEXT", "line 2"),
    "list": (b'["the cat", "sat"]\n', "DATA-TEXT", "line 1"),
    "word": (b'"the cat"\n', "DATA-TEXT", "line 1"),
    "key twice": (b'{"text": "a", "text": "b"}\n', "DATA-TEXT", "twice"),
    "no number": (b'{"text": "a", "n": NaN}\n', "DATA-TEXT", "NaN"),
    "deep": (b'{"text": ' + b"[" * 100_000 + b"\n", "DATA-TEXT", "deep"),
    "no keys": (GOOD + b"{}\n", "DATA-TEXT", "line 2"),
    "other keys": (b'{"question": "a", "answer": "b"}\n', "DATA-TEXT", "question: str, answer: str"),
    "prompt alone": (b'{"prompt": "the cat"}\n', "DATA-TEXT", "completion"),
    "completion alone": (b'{"completion": " sat"}\n', "DATA-TEXT", "prompt"),
    "number": (b'{"text": 5}\n', "DATA-TEXT", "text: int"),
    "null": (b'{"prompt": null, "completion": " sat"}\n', "DATA-TEXT", "prompt: NoneType"),
    "list of texts": (b'{"prompt": "a", "completion": ["b"]}\n', "DATA-TEXT", "completion: list"),
    "empty completion": (GOOD + b'{"prompt": "a", "completion": ""}\n', "DATA-TEXT", "line 2"),
    "blank completion": (b'{"prompt": "a", "completion": " \\n"}\n', "DATA-TEXT", "line 1"),
    "empty text": (b'{"text": ""}\n', "DATA-TEXT", "line 1"),
    "Latin 1": (b'{"text": "caf\xe9"}\n', "DATA-FORMAT", "byte 13 is not UTF-8"),
    "UTF-16": ('{"text": "a"}\n'.encode("utf-16"), "DATA-FORMAT", "UTF-8"),
    "zipped": (b"\x1f\x8b\x08\x00\x00", "DATA-FORMAT", "UTF-8"),
    "terminal": (b'{"\\u001b[31m": "a"}\n', "DATA-TEXT", "x1b[31m: str"),
    "half a character": (b'{"text": "the \\ud800 cat"}\n', "DATA-TEXT", "line 1"),
    "prompt of a text": (b'{"prompt": "the cat", "text": " sat"}\n', "DATA-TEXT", "line 1"),
}
NAMES = list(FILES)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "base"
    language.save("gpt2", place)
    return place


@pytest.fixture
def own(base: Path, tmp_path: Path) -> Path:
    """A model that may be spoilt."""
    return shutil.copytree(base, tmp_path / "own")


@pytest.fixture
def fails(aniso: Aniso, base: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a command that has to be refused; gives what it said."""
    (tmp_path / "good.jsonl").write_bytes(GOOD)

    def ran(code: str, exit_code: int, *more: object, **said: object) -> str:
        given = {"model": base, "train": tmp_path / "good.jsonl", "method": "none", **said}
        options = [word for key, value in given.items() for word in (f"--{key}", value)]
        found = aniso("fit", "lm", *options, *more, "-o", tmp_path / "out")
        assert found.code == exit_code and f"error[{code}]" in found.err, found.err
        assert "fix " in found.err and "\x1b" not in found.err
        assert not (tmp_path / "out").exists()
        return found.err

    return ran


# files


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["train", "test"])
def test_a_file_that_holds_no_examples_is_refused_by_line(
    fails: Callable[..., str], tmp_path: Path, name: str, role: str
) -> None:
    data, code, words = FILES[name]
    (tmp_path / "bad.jsonl").write_bytes(data)
    said = fails(code, 3, **{role: tmp_path / "bad.jsonl"})
    assert "bad.jsonl" in said and words in said, said


@pytest.mark.parametrize("data", [b"", b" \n\n\t "])
def test_a_text_without_a_word_is_refused(fails: Callable[..., str], tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.txt").write_bytes(data)
    assert "bad.txt" in fails("DATA-TEXT", 3, train=tmp_path / "bad.txt")


@pytest.mark.parametrize("role", ["train", "val", "test"])
def test_a_file_that_is_not_there_is_named(fails: Callable[..., str], tmp_path: Path, role: str) -> None:
    assert "none.jsonl" in fails("DATA-MISSING", 3, **{role: tmp_path / "none.jsonl"})


def test_what_is_no_file_is_refused_and_not_waited_for(fails: Callable[..., str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "regular file" in fails("DATA-FORMAT", 3, train=tmp_path / "pipe.jsonl")
    assert "regular file" in fails("DATA-FORMAT", 3, train=tmp_path)


def test_a_file_that_may_not_be_read_is_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").symlink_to(tmp_path / "bad.jsonl")
    assert "bad.jsonl" in fails("DATA-FORMAT", 3, train=tmp_path / "bad.jsonl")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_examples(tmp_path / "a.jsonl")[0].prompt == "the cat"


def test_a_text_of_one_token_has_nothing_to_guess(own: Path, refused: Refused) -> None:
    without_end(own)
    model = load_language_model(own)
    with refused("DATA-TEXT", 3, "line 1", "two tokens"):
        text_dataset(model, [Example(None, "a", "line 1")], "made")


def test_an_empty_prompt_gives_nothing_to_guess_from(own: Path, refused: Refused) -> None:
    without_end(own)
    model = load_language_model(own)
    with refused("DATA-TEXT", 3, "line 1"):
        text_dataset(model, [Example("", "a", "line 1")], "made")


def without_end(model: Path) -> None:
    said = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**said, "eos_token": None}))


@pytest.mark.parametrize("more", [(), ("--task", "t"), ("--head", "h"), ("--linearised",)])
def test_an_evaluation_is_of_texts_or_of_pictures(aniso: Any, base: Path, more: tuple[str, ...]) -> None:
    texts = ("--texts", "t.jsonl") if more else ()
    ran = aniso("eval", base, *texts, *more)
    assert ran.code == 2 and "error[USAGE]" in ran.err


def test_a_split_without_rows_is_none(refused: Refused) -> None:
    with refused("DATA-TEXT", 2, "made"):
        TextDataset("made", [], [], 8)


def test_a_text_for_a_model_that_answers_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    language.save("t5", tmp_path / "t5")
    (tmp_path / "bad.jsonl").write_bytes(GOOD + b'{"text": "the cat sat"}\n')
    said = fails("DATA-TEXT", 3, model=tmp_path / "t5", train=tmp_path / "bad.jsonl")
    assert "bad.jsonl line 2" in said


# tokenizers


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '"a"', "\x00", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_refused(fails: Callable[..., str], own: Path, text: str) -> None:
    (own / "tokenizer.json").write_text(text)
    said = fails("MODEL-TOKENIZER", 3, model=own)
    assert "damaged" in said and "tokenizer.json" in said


def test_a_missing_tokenizer_is_refused(fails: Callable[..., str], own: Path) -> None:
    (own / "tokenizer.json").unlink()
    assert "there is none" in fails("MODEL-TOKENIZER", 3, model=own)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(fails: Callable[..., str], own: Path) -> None:
    tokens = language.tokenizer("gpt2")
    tokens.add_tokens(["one more"])
    tokens.save_pretrained(own)
    said = fails("MODEL-TOKENIZER", 3, model=own)
    assert "at most 300" in said and "it has 301" in said


def test_a_tokenizer_cannot_bring_code(fails: Callable[..., str], own: Path, tmp_path: Path) -> None:
    said = json.loads((own / "tokenizer_config.json").read_text())
    said |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (own / "tokenizer_config.json").write_text(json.dumps(said))
    (own / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    try:
        load_language_model(own).tokens.whole("the cat")
    except Exception:
        fails("MODEL-TOKENIZER", 3, model=own)
    assert not (tmp_path / "ran").exists()


# models


def test_a_model_cannot_bring_code(own: Path, tmp_path: Path) -> None:
    said = json.loads((own / "config.json").read_text())
    said["auto_map"] = {"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.Own"}
    (own / "config.json").write_text(json.dumps(said))
    (own / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    assert load_language_model(own).max_length == 64
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_a_model_is_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for place in (tmp_path / "nothing", tmp_path / "none", tmp_path / "good.jsonl"):
        assert place.name in fails("MODEL-NAME", 3, model=place)


def test_a_model_of_pictures_is_no_language_model(fails: Callable[..., str], tmp_path: Path) -> None:
    tiny.hf_clip_directory(tmp_path / "clip")
    assert "clip" in fails("MODEL-NAME", 3, model=tmp_path / "clip")


@pytest.mark.parametrize(
    "change",
    [{"model_type": "nonsense"}, {"model_type": None}, {"vocab_size": "many"}, {"n_head": 5}, {"n_embd": -1}],
    ids=str,
)
def test_a_configuration_that_describes_no_model_is_refused(
    fails: Callable[..., str], own: Path, change: dict[str, Any]
) -> None:
    said = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**said, **change}))
    assert "own" in fails("MODEL-NAME", 3, model=own)


def test_a_configuration_that_is_no_json_is_refused(fails: Callable[..., str], own: Path) -> None:
    (own / "config.json").write_text("{")
    assert "config.json" in fails("DIR-CONFIG", 3, model=own)


def test_weights_that_do_not_fit_are_refused(fails: Callable[..., str], own: Path) -> None:
    said = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**said, "n_layer": 3}))
    assert "transformer.h.2" in fails("CKPT-KEYS", 3, model=own)
    (own / "config.json").write_text(json.dumps({**said, "n_positions": 32}))
    assert "wpe" in fails("CKPT-SHAPE", 3, model=own)


def test_a_model_that_sees_what_comes_next_is_refused(own: Path, refused: Refused) -> None:
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    made = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=300, **sizes))
    made.save_pretrained(own)
    with refused("MODEL-NAME", 3, "own"):
        load_language_model(own)


def test_models_that_answer_have_a_longest_prompt_too(own: Path, refused: Refused) -> None:
    sides = ("encoder", "decoder")
    sizes = {f"{side}_{what}": n for side in sides for what, n in (("layers", 1), ("attention_heads", 2))}
    sizes |= {f"{side}_ffn_dim": 32 for side in sides}
    marks = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    config = transformers.BartConfig(vocab_size=300, d_model=32, max_position_embeddings=16, **sizes, **marks)
    transformers.BartForConditionalGeneration(config).save_pretrained(own)
    model = load_language_model(own)
    long = [Example("the cat sat on a mat " * 8, " home", "line 1")]
    assert evaluate_lm(model, text_dataset(model, long, "made")).tokens > 0
    with refused("MODEL-LENGTH", 2, "16"):
        text_dataset(model, long, "made", length=17)


@pytest.mark.parametrize("bank", ["other weights", "other kind"])
def test_a_bank_of_another_base_is_refused(fails: Callable[..., str], tmp_path: Path, bank: str) -> None:
    pytest.importorskip("peft")
    kind, code = ("gpt2", "BANK-BASE") if bank == "other weights" else ("llama", "BANK-LAYOUT")
    network = language.save(kind, tmp_path / "other", seed=1)
    layers = dict(target_modules=["c_attn"], fan_in_fan_out=True) if kind == "gpt2" else {}
    random_adapter(network, tmp_path / "a", r=2, **(layers or dict(target_modules=["q_proj"])))
    Bank.build(tmp_path / "other", {"a": tmp_path / "a"}, to=tmp_path / "bank")
    fails(code, 3, method="coefficients", bank=tmp_path / "bank")


def test_an_adapter_is_no_model_and_no_bank(fails: Callable[..., str], base: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    network = transformers.GPT2LMHeadModel.from_pretrained(base)
    random_adapter(network, tmp_path / "a", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    fails("MODEL-NAME", 3, model=tmp_path / "a")
    fails("BANK-MANIFEST", 3, method="coefficients", bank=tmp_path / "a")


def test_vectors_that_are_not_there_cannot_be_left_out(
    fails: Callable[..., str], base: Path, tmp_path: Path
) -> None:
    fails("BANK-NAME", 2, "--leave-out", "zoo", method="coefficients", bank="random:2")
    said = fails(
        "BANK-NAME",
        3,
        *("--leave-out", "random-0", "--leave-out", "random-1"),
        method="coefficients",
        bank="random:2",
    )
    assert "no vector left" in said


def test_pictures_and_texts_are_not_confused(base: Path, refused: Refused) -> None:
    with refused("MODEL-NAME", 2, "load_model"):
        encoder_of(load_language_model(base))
    with refused("MODEL-NAME", 2, "load_language_model"):
        language_model_of(tiny.seeing(8))
    with refused("OBJECTIVE", 2, "text dataset"):
        LanguageLoss("train.jsonl")  # type: ignore[arg-type]


def test_texts_for_testing_are_not_learned_from(base: Path, refused: Refused) -> None:
    split = text_dataset(load_language_model(base), [Example("a", " cat", "line 1")], "made", "test")
    with refused("LEARN-TEST", 2, "made", "--train"):
        LanguageLoss(split)
