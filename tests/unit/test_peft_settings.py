"""PEFT configurations: every field is used, known not to matter, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aniso.errors import AnisoError
from aniso.weights import PeftAdapter, open_weights
from aniso.weights.files import RawFile
from aniso.weights.peft_config import REFUSED, USED, WITHOUT_EFFECT, LoraSettings, read_settings

MODULE = "vision_model.encoder.layers.0.self_attn.q_proj"


def configured(directory: Path, **fields: object) -> Path:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def factors(module: str = MODULE, rank: int = 2, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    start = f"base_model.model.{module}"
    return {
        f"{start}.lora_A.weight": torch.ones(rank, 6),
        f"{start}.lora_B.weight": torch.ones(5, rank),
        **{f"{start}.{name}": tensor for name, tensor in more.items()},
    }


def adapter(directory: Path, tensors: dict[str, torch.Tensor], **fields: object) -> PeftAdapter:
    save_file(tensors, configured(directory, **fields) / "adapter_model.safetensors")
    source = open_weights(directory)
    assert isinstance(source, PeftAdapter)
    return source


# against PEFT itself


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def test_every_field_of_peft_is_classified_once(peft):
    groups = [USED, WITHOUT_EFFECT, frozenset(REFUSED)]
    assert sum(map(len, groups)) == len(frozenset().union(*groups))
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields - frozenset().union(*groups) == set()
    assert {"r", "use_dora", "lora_alpha"} <= fields


def test_what_peft_saves_by_default_is_read(tmp_path, peft):
    peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]).save_pretrained(tmp_path)
    assert read_settings(tmp_path) == LoraSettings(r=4, alpha=6.0)


def test_what_peft_saves_with_every_used_field_is_read(tmp_path, peft):
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        use_dora=True,
        fan_in_fan_out=True,
        rank_pattern={"q_proj": 8},
        alpha_pattern={"^a.q_proj": 3},
        init_lora_weights="gaussian",
        base_model_name_or_path="owner/base",
        target_modules=["q_proj"],
    )
    config.save_pretrained(tmp_path)
    settings = read_settings(tmp_path)
    assert settings == LoraSettings(
        r=4,
        alpha=6.0,
        rslora=True,
        dora=True,
        fan_in_fan_out=True,
        base_model="owner/base",
        rank_pattern={"q_proj": 8},
        alpha_pattern={"^a.q_proj": 3.0},
    )
    assert settings.scale("a.q_proj") == 3 / math.sqrt(8)


MODULES = [
    MODULE,
    "vision_model.encoder.layers.10.self_attn.q_proj",
    "vision_model.encoder.layers.1.self_attn.k_proj",
    "text_model.encoder.layers.1.mlp.fc1",
    "visual.transformer.resblocks.0.attn.out_proj",
    "q_proj",
    "a.q_proj",
    "xq_proj",
    "q_proj.inner",
    "layers.0",
    "a+b",
    "",
]
PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    "^q_proj",
    "^vision_model.encoder.layers.0.self_attn.q_proj",
    "^layers.0",
    "q_proj$",
    "proj",
    ".*proj",
    ".*_proj",
    r".*\.layers\.[01]\..*",
    r"layers\.1\.self_attn\.k_proj",
    "layers.1.self_attn.k_proj",
    "[qk]_proj",
    "q_proj|k_proj",
    "(q|k)_proj",
    r"layers.\d+.mlp.fc\d",
    "fc1",
    "0",
    "1",
    "Q_PROJ",
    "",
    ".",
    "a+b",
    r"a\+b",
    MODULE,
]


def peft_value(patterns: dict[str, int], module: str, default: int) -> int:
    """The very two lines with which PEFT looks a value up."""
    from peft.utils.other import get_pattern_key

    return patterns.get(get_pattern_key(patterns.keys(), module), default)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_matches_in_peft(peft, pattern):
    settings = LoraSettings(r=7, alpha=5.0, rank_pattern={pattern: 3}, alpha_pattern={pattern: 11.0})
    for module in MODULES:
        rank = peft_value({pattern: 3}, module, 7)
        alpha = peft_value({pattern: 11}, module, 5)
        assert (settings.rank(module), settings.scale(module)) == (rank, alpha / rank), module


def test_the_first_of_several_patterns_wins_as_in_peft(peft):
    for order in (PATTERNS, PATTERNS[::-1]):
        patterns = {pattern: i + 1 for i, pattern in enumerate(order) if pattern}
        settings = LoraSettings(r=99, alpha=1.0, rank_pattern=patterns)
        for module in MODULES:
            assert settings.rank(module) == peft_value(patterns, module, 99), module


def test_the_patterns_of_this_file_are_accepted(tmp_path):
    read_settings(configured(tmp_path, rank_pattern=dict.fromkeys(PATTERNS, 2)))


# the scale


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 2.0),
        ({"lora_alpha": 3}, 1.5),
        ({"lora_alpha": 0.5}, 0.25),
        ({"lora_alpha": 0}, 0.0),
        ({"use_rslora": True}, 4 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 10}}, 5.0),
        ({"alpha_pattern": {"k_proj": 10}}, 2.0),
        ({"r": 7, "rank_pattern": {"q_proj": 2}}, 2.0),
        ({"r": 7, "rank_pattern": {"q_proj": 2}, "use_rslora": True}, 4 / math.sqrt(2)),
        ({"rank_pattern": None, "alpha_pattern": None}, 2.0),
    ],
    ids=str,
)
def test_the_scale_follows_from_the_configuration(tmp_path, fields, scale):
    (update,) = adapter(tmp_path, factors(), **fields).updates
    assert update.module == MODULE
    assert update.scale == pytest.approx(scale, rel=1e-15)


def test_the_default_alpha_is_that_of_peft(tmp_path, peft):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    assert read_settings(tmp_path).alpha == peft.LoraConfig().lora_alpha


@pytest.mark.parametrize(
    ("fields", "formula"),
    [
        ({}, "alpha/r * B A"),
        ({"use_rslora": True}, "alpha/sqrt(r) * B A"),
        ({"use_dora": True}, "DoRA, alpha/r"),
        ({"use_dora": True, "use_rslora": True}, "DoRA, alpha/sqrt(r)"),
    ],
    ids=str,
)
def test_the_formula_is_said(tmp_path, fields, formula):
    more = {"lora_magnitude_vector.weight": torch.ones(5)} if "use_dora" in fields else {}
    source = adapter(tmp_path, factors(**more), **fields)
    assert f"update computed as {formula}" in source.info.notes


# refused by name


@pytest.mark.parametrize(
    "kind",
    [
        "LOHA",
        "LOKR",
        "ADALORA",
        "IA3",
        "OFT",
        "BOFT",
        "VERA",
        "FOURIERFT",
        "PREFIX_TUNING",
        "lora",
        None,
        7,
        ["LORA"],
    ],
    ids=str,
)
def test_other_kinds_of_adapter_are_refused_by_name(tmp_path, refused, kind):
    with refused("LORA-KIND", 3, f"peft_type {kind}"):
        read_settings(configured(tmp_path, peft_type=kind))


def test_every_kind_peft_knows_but_lora_is_refused(tmp_path, peft, refused):
    kinds = [kind.value for kind in peft.PeftType]
    assert "LORA" in kinds
    for kind in set(kinds) - {"LORA"}:
        with refused("LORA-KIND", 3, kind):
            read_settings(configured(tmp_path, peft_type=kind))


@pytest.mark.parametrize("field", [*REFUSED, "a_field_of_the_future"])
@pytest.mark.parametrize("value", [True, ["x"], {"a": 1}, "x"], ids=str)
def test_a_field_that_changes_the_update_is_refused_by_name(tmp_path, refused, field, value):
    with refused("LORA-KIND", 3, field, REFUSED.get(field, "unknown")):
        read_settings(configured(tmp_path, **{field: value}))


@pytest.mark.parametrize("value", [None, False, [], {}, ""], ids=repr)
def test_such_a_field_left_empty_is_no_hindrance(tmp_path, value):
    fields = dict.fromkeys([*REFUSED, "a_field_of_the_future"], value)
    assert read_settings(configured(tmp_path, **fields)).r == 2


@pytest.mark.parametrize(
    "init",
    [
        "pissa",
        "pissa_niter_16",
        "olora",
        "OLoRA",
        "corda",
        "loftq",
        "lora_ga",
        "of the future",
        None,
        7,
        ["eva"],
    ],
    ids=str,
)
def test_an_initialisation_that_changes_the_base_is_refused(tmp_path, refused, init):
    with refused("LORA-INIT", 3, f"init_lora_weights = {init}", "path_initial_model_for_weight_conversion"):
        read_settings(configured(tmp_path, init_lora_weights=init))


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialisation_that_keeps_the_base_is_read(tmp_path, init):
    assert read_settings(configured(tmp_path, init_lora_weights=init)).r == 2


def test_whatever_has_no_effect_is_accepted_with_any_value(tmp_path):
    assert read_settings(configured(tmp_path, **dict.fromkeys(WITHOUT_EFFECT, "anything"))).r == 2


def test_the_base_an_adapter_names_is_kept_and_never_opened(tmp_path, monkeypatch):
    base = tmp_path / "base"
    base.mkdir()
    save_file({"w": torch.ones(2)}, base / "model.safetensors")
    opened = []
    real = RawFile.__init__
    monkeypatch.setattr(RawFile, "__init__", lambda f, path: opened.append(path) or real(f, path))
    source = adapter(tmp_path, factors(), base_model_name_or_path=str(base))
    assert source.settings.base_model == str(base)
    assert {path.parent for path in opened} == {tmp_path}


# malformed


@pytest.mark.parametrize(
    "fields",
    [
        {"r": None},
        {"r": 0},
        {"r": -1},
        {"r": True},
        {"r": "8"},
        {"r": [8]},
        {"r": 2.5},
        {"r": 10**400},
        {"lora_alpha": None},
        {"lora_alpha": True},
        {"lora_alpha": "16"},
        {"lora_alpha": 10**400},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": "q_proj"},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": {"q_proj": "2"}},
        {"rank_pattern": {"q_proj": 2.5}},
        {"rank_pattern": {"q_proj": None}},
        {"alpha_pattern": {"q_proj": []}},
        {"alpha_pattern": 3},
        {"rank_pattern": {"(": 2}},
        {"alpha_pattern": {"[a": 2}},
        {"use_rslora": "false"},
        {"use_dora": "false"},
        {"fan_in_fan_out": "false"},
        {"base_model_name_or_path": {"a": 1}},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_value_that_peft_would_not_write_is_refused(tmp_path, refused, fields):
    huge = any(isinstance(value, int) and value > 1e300 for value in fields.values())
    with refused("DIR-CONFIG" if huge else "LORA-CONFIG", 3, "adapter_config.json"):
        read_settings(configured(tmp_path, **fields))


def test_a_configuration_without_a_rank_is_refused(tmp_path, refused):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    with refused("LORA-CONFIG", 3, "'r'"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"r": 1, "r": 2}', '{"r": NaN}', '{"peft_type": "LORA", "r": 1e999}'],
)
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(AnisoError) as caught:
        read_settings(tmp_path)
    assert caught.value.code in ("DIR-CONFIG", "LORA-CONFIG")


CATASTROPHIC = [
    "(a+)+",
    "(a*)*b",
    "(.*a){20}",
    "(a|aa)+b",
    "(?:a+)+b",
    "(?=a+)b",
    "a*a*a*b",
    ".*.*.*x",
    r"(a)\1",
    "((a)?)?b",
    "a" * 600,
    "a?" * 40 + "a" * 40,
    "(a|aa)" * 40 + "b",
    r"\\*" * 20 + "b",
]


@pytest.mark.parametrize("pattern", CATASTROPHIC, ids=lambda pattern: pattern[:12])
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_could_take_for_ever_is_refused(tmp_path, refused, field, pattern):
    with refused("LORA-CONFIG", 3, "adapter_config.json"):
        read_settings(configured(tmp_path, **{field: {pattern: 2}}))


def test_a_long_name_does_not_make_a_harmless_pattern_slow(tmp_path):
    """Two repeats take time cubic in the length of the name, and names are strangers' text as well."""
    tensors = factors("." * 20_000)
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
        try:
            adapter(tmp_path, tensors, rank_pattern={".*.*x": 2})
        except AnisoError:
            pass
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# the tensors


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_half_an_update_is_refused(tmp_path, refused, part):
    tensors = {key: tensor for key, tensor in factors().items() if part not in key}
    with refused("LORA-KEYS", 3, MODULE, "lora_A, lora_B"):
        adapter(tmp_path, tensors)


@pytest.mark.parametrize("part", ["lora_embedding_A", "lora_embedding_B"])
def test_half_an_embedding_is_refused(tmp_path, refused, part):
    with refused("LORA-KEYS", 3, "embed", "lora_embedding_A, lora_embedding_B"):
        adapter(tmp_path, {f"base_model.model.embed.{part}": torch.ones(2, 2)})


def test_two_halves_of_different_kinds_are_refused(tmp_path, refused):
    tensors = {"m.lora_A.weight": torch.ones(2, 6), "m.lora_embedding_B": torch.ones(5, 2)}
    with refused("LORA-KEYS", 3, "module    m"):
        adapter(tmp_path, tensors)


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"r": 3}, factors()),
        ({"rank_pattern": {"q_proj": 3}}, factors()),
        ({}, {"m.lora_A.weight": torch.ones(2, 6), "m.lora_B.weight": torch.ones(5, 3)}),
        ({}, {"m.lora_A.weight": torch.ones(6, 2), "m.lora_B.weight": torch.ones(2, 5)}),
        ({}, {"m.lora_A.weight": torch.ones(2), "m.lora_B.weight": torch.ones(5, 2)}),
        ({}, {"m.lora_A.weight": torch.ones(2, 6), "m.lora_B.weight": torch.ones(2)}),
        ({}, {"m.lora_A.weight": torch.tensor(1.0), "m.lora_B.weight": torch.tensor(1.0)}),
    ],
    ids=["r", "pattern", "unequal", "transposed", "A vector", "B vector", "scalars"],
)
def test_a_rank_that_differs_from_the_configuration_is_refused(tmp_path, refused, fields, tensors):
    with refused("LORA-RANK", 3, "rank", "rank_pattern in"):
        adapter(tmp_path, tensors, **fields)


def test_dora_needs_its_magnitudes_and_nothing_else_has_them(tmp_path, refused):
    magnitudes = {"lora_magnitude_vector.weight": torch.ones(5)}
    with refused("LORA-KEYS", 3, MODULE, "lora_magnitude_vector"):
        adapter(tmp_path, factors(), use_dora=True)
    with refused("LORA-KEYS", 3, MODULE, "lora_magnitude_vector"):
        adapter(tmp_path, factors(**magnitudes))
    (update,) = adapter(tmp_path, factors(**magnitudes), use_dora=True).updates
    assert update.magnitude == f"base_model.model.{MODULE}.lora_magnitude_vector.weight"


def test_a_bias_belongs_to_its_update(tmp_path, refused):
    (update,) = adapter(tmp_path, factors(**{"lora_B.bias": torch.ones(5)}), lora_bias=True).updates
    assert update.bias == f"base_model.model.{MODULE}.lora_B.bias"
    with refused("LORA-KEYS", 3, MODULE, "lora_A.bias"):
        adapter(tmp_path, factors(**{"lora_A.bias": torch.ones(2)}))


def test_embeddings_and_convolutions_are_updates_too(tmp_path):
    tensors = {
        "base_model.model.embed.lora_embedding_A": torch.ones(2, 9),
        "base_model.model.embed.lora_embedding_B": torch.ones(4, 2),
        "base_model.model.conv.lora_A.weight": torch.ones(2, 3, 8, 8),
        "base_model.model.conv.lora_B.weight": torch.ones(5, 2, 1, 1),
    }
    updates = {update.module: update for update in adapter(tmp_path, tensors).updates}
    assert set(updates) == {"embed", "conv"}
    assert updates["embed"].embedding
    assert not updates["conv"].embedding


@pytest.mark.parametrize("name", ["default", "weight", "lora", "lora_A", "my.adapter"])
def test_the_adapters_name_may_stand_in_the_key(tmp_path, name):
    tensors = {f"m.lora_A.{name}.weight": torch.ones(2, 6), f"m.lora_B.{name}.weight": torch.ones(5, 2)}
    (update,) = adapter(tmp_path, tensors).updates
    assert (update.module, update.a) == ("m", f"m.lora_A.{name}.weight")


def test_a_strange_module_name_is_still_that_of_an_update(tmp_path):
    source = adapter(tmp_path, factors("a\nb"))
    assert [update.module for update in source.updates] == ["a\nb"]
    assert source.replacements == {}


def test_a_second_tensor_for_the_same_factor_is_not_passed_over(tmp_path, refused):
    with refused("LORA-KEYS", 3, MODULE):
        adapter(tmp_path, factors(**{"lora_A.other.weight": torch.zeros(2, 6)}))


def test_what_is_no_factor_replaces_a_tensor_of_the_base(tmp_path):
    head = "base_model.model.head"
    tensors = {
        **factors(),
        f"{head}.modules_to_save.default.weight": torch.ones(2),
        "base_model.model.norm.modules_to_save.bias": torch.ones(2),
        f"base_model.model.{MODULE}.base_layer.bias": torch.ones(5),
        "base_model.model.other.bias": torch.ones(2),
    }
    assert adapter(tmp_path, tensors, modules_to_save=["head"]).replacements == {
        "head.weight": f"{head}.modules_to_save.default.weight",
        "norm.bias": "base_model.model.norm.modules_to_save.bias",
        f"{MODULE}.bias": f"base_model.model.{MODULE}.base_layer.bias",
        "other.bias": "base_model.model.other.bias",
    }


def test_two_replacements_of_one_tensor_are_refused(tmp_path, refused):
    head = "base_model.model.head"
    tensors = {
        **factors(),
        f"{head}.weight": torch.zeros(2),
        f"{head}.modules_to_save.default.weight": torch.ones(2),
    }
    with refused("LORA-KEYS", 3, "head"):
        adapter(tmp_path, tensors, modules_to_save=["head"])


def test_an_adapter_in_a_pickle_is_read_and_refused_alike(tmp_path, refused):
    configured(tmp_path)
    torch.save(factors(), tmp_path / "adapter_model.bin")
    assert [update.module for update in open_weights(tmp_path).updates] == [MODULE]
    torch.save({**factors(), "x": RunsACommand()}, tmp_path / "adapter_model.bin")
    with refused("PICKLE-CALL", 4, "adapter_model.bin"):
        open_weights(tmp_path)


class RunsACommand:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_safetensors_are_preferred_to_a_pickle_and_it_says_so(tmp_path):
    torch.save({"x": RunsACommand()}, tmp_path / "adapter_model.bin")
    source = adapter(tmp_path, factors())
    assert "adapter_model.safetensors used; adapter_model.bin not used" in source.info.notes
