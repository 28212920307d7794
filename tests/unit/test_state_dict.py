"""The rules by which a model's weights are found in a checkpoint."""

import pytest

from aniso.errors import AnisoError
from aniso.weights.pickle_values import Inert, OddTensor, Storage, TensorView
from aniso.weights.state_dict import find_state_dict


def tensor(key="0"):
    return TensorView(Storage(key, "F32", 4), "F32", 0, (4,), (1,))


def module(parameters=None, buffers=None, modules=None, **more):
    state = {"_parameters": parameters or {}, "_buffers": buffers or {}, "_modules": modules or {}}
    return Inert("lib.Module", state={**state, "training": True, **more})


def find(root, entry=""):
    return find_state_dict(root, entry, "model.pt")


W, V = tensor("w"), tensor("v")


def reported(root, what):
    """Whether ``what`` is told to the user: in a note or in an error."""
    try:
        return any(what in note for note in find(root).notes)
    except AnisoError as e:
        return what in str(e)


# Rule 1: FILE::a.b


def test_entry_is_followed_by_its_path():
    root = {"a": {"b": {"w": W}, "c": {"w": V}}, "d": {"w": V}}
    assert find(root, "a.b").tensors == {"w": W}
    assert find(root, "d").tensors == {"w": V}


def test_entry_may_be_an_attribute_of_an_object():
    root = {"trainer": Inert("lib.Trainer", state={"model": module({"w": W}), "ema": {"w": V}})}
    assert find(root, "trainer.model").tensors == {"w": W}
    assert find(root, "trainer.ema").tensors == {"w": V}


def test_entry_is_searched_like_a_checkpoint_of_its_own():
    assert find({"a": {"state_dict": {"module.w": W}}, "b": {"w": V}}, "a").tensors == {"w": W}


@pytest.mark.parametrize("entry", ["nope", "a.nope", "a.w.deeper", "a.b.c"])
def test_entry_that_is_not_there_is_an_error_that_lists_the_others(refused, entry):
    with refused("CKPT-NONE", 3, "model.pt", f"no entry '{entry}'", "a, epoch"):
        find({"a": {"w": W}, "epoch": 3}, entry)


def test_entry_without_tensors_is_an_error(refused):
    with refused("CKPT-NONE", 3, "model.pt", "no model weights", "lr"):
        find({"a": {"w": W}, "args": {"lr": 1}}, "args")


# Rule 2: modules


def test_module_becomes_its_state_dict_in_order():
    inner = module({"weight": W, "bias": None}, {"mean": V, "none": None})
    root = module({"scale": V}, {"ids": W}, {"a": inner, "none": None, "b": module(modules={"c": inner})})
    found = find(root)
    assert list(found.tensors) == ["scale", "ids", "a.weight", "a.mean", "b.c.weight", "b.c.mean"]
    assert found.tensors["b.c.weight"] is W and found.notes == ()


@pytest.mark.parametrize(
    "names",
    [Inert("builtins.set", items=["mask"]), Inert("set", args=(["mask"],)), Inert("set", args=["mask"])],
    ids=["ADDITEMS", "set([...])", "FROZENSET"],
)
def test_buffers_that_are_not_persistent_are_left_out(names):
    root = module({"mask": V}, {"mask": W, "kept": W}, _non_persistent_buffers_set=names)
    assert find(root).tensors == {"mask": V, "kept": W}


def test_buffers_are_kept_where_old_versions_did_not_tell():
    assert list(find(module(buffers={"mask": W})).tensors) == ["mask"]


def test_attributes_of_a_module_are_not_its_weights():
    inner = module({"w": V})
    root = module({"w": W}, modules={}, teacher=inner, cache={"w": V}, hook=V)
    assert find(root).tensors == {"w": W}


def test_module_is_found_inside_a_wrapper():
    found = find({"model": module({"w": W}), "epoch": 3})
    assert found.tensors == {"w": W}
    assert found.notes == ("weights taken from entry 'model'", "entries left out: epoch")


def test_part_of_a_module_that_is_not_understood_is_told():
    odd = Inert("lib.Odd", state=({"_parameters": {"w": V}}, {}))
    assert reported(module({"w": W}, modules={"odd_child": odd}), "odd_child")


def test_two_tensors_of_one_name_are_told():
    clash = module({"a.w": W}, modules={"a": module({"w": V})})
    assert reported(clash, "a.w")


def test_parameter_that_is_not_a_plain_tensor_is_named(refused):
    sparse = OddTensor("a sparse tensor")
    with refused("PICKLE-UNSUPPORTED", 3, "model.pt", "block.w", "a sparse tensor"):
        find(module({"ok": W}, modules={"block": module({"w": sparse})}))


# Rule 3: mappings


def test_mapping_of_names_to_tensors_is_a_state_dict():
    found = find({"b": W, "a.x": V})
    assert list(found.tensors.items()) == [("b", W), ("a.x", V)] and found.notes == ()


def test_object_with_entries_is_a_mapping_too():
    assert find(Inert("lib.Dict", mapping={"w": W})).tensors == {"w": W}


def test_entries_that_are_not_tensors_are_told():
    found = find({"w": W, "epoch": 3, "args": {"lr": 1}})
    assert found.tensors == {"w": W}
    assert found.notes == ("entries that are not tensors, left out: epoch, args",)


@pytest.mark.parametrize("key", [17, None, b"bytes"])
def test_tensor_under_a_key_that_is_no_name_is_told(key):
    assert reported({"w": W, key: V}, str(key))


def test_tensor_that_is_not_a_plain_array_is_named_even_alone(refused):
    with refused("PICKLE-UNSUPPORTED", 3, "model.pt", "w", "a quantised tensor"):
        find({"w": OddTensor("a quantised tensor")})


def test_tensors_beside_sets_of_tensors_are_ambiguous(refused):
    with refused("CKPT-AMBIGUOUS", 3, "model.pt", "visual", "model.pt::visual"):
        find({"scale": W, "visual": {"w": V}})


# Rule 4: candidates


@pytest.mark.parametrize("name", ["state_dict", "model", "params", "anything at all"])
def test_single_candidate_is_taken_and_told(name):
    found = find({"epoch": 1, name: {"w": W}})
    assert found.tensors == {"w": W}
    assert found.notes == (f"weights taken from entry '{name}'", "entries left out: epoch")


def test_wrappers_in_wrappers_are_told_one_by_one():
    found = find({"a": {"b": {"c": {"w": W}}}})
    assert found.tensors == {"w": W}
    assert [note[-3:] for note in found.notes] == ["'a'", "'b'", "'c'"]


def test_wrappers_nested_deeper_than_any_checkpoint_are_refused(refused):
    root = {"w": W}
    for _ in range(7):
        root = {"a": root}
    assert find(root).tensors == {"w": W}
    with refused("PICKLE-LIMIT", 4, "model.pt", "more than 8 deep"):
        find({"a": root})


@pytest.mark.parametrize("name", ["callbacks", "loops"])
def test_state_of_a_training_loop_is_no_candidate(name):
    best = {"ModelCheckpoint": {"best_model_score": V}}
    found = find({"state_dict": {"w": W}, name: best, "epoch": 3})
    assert found.tensors == {"w": W} and f"entries left out: {name}, epoch" in found.notes


def test_module_without_tensors_is_no_candidate():
    loss = module(modules={"inner": module()})
    found = find({"criterion": loss, "net": {"w": W}})
    assert found.tensors == {"w": W}
    assert "entries left out: criterion" in found.notes


@pytest.mark.parametrize(
    "name", ["optimizer", "optim", "Optimizer_state", "scheduler", "lr_sched", "scaler", "grad_scaler"]
)
def test_state_of_an_optimiser_is_no_candidate(name):
    root = {"net": {"w": W}, name: {"w": V}}
    if name == "lr_sched":
        assert reported(root, "net, lr_sched")  # only how a name begins is looked at
    else:
        assert find(root).tensors == {"w": W}


def test_state_of_an_optimiser_alone_is_no_model(refused):
    with refused("CKPT-NONE", 3, "model.pt", "no model weights", "optimizer"):
        find({"optimizer": {"w": W}})


def test_several_candidates_are_listed(refused):
    with refused("CKPT-AMBIGUOUS", 3, "model.pt", "model, ema", "model.pt::model"):
        find({"model": {"w": W}, "epoch": 1, "ema": module({"w": V})})


@pytest.mark.parametrize(
    "root", [None, 3, "text", [], [W], (), {}, {"a": {}}, Inert("lib.C"), module()], ids=str
)
def test_nothing_to_find_is_an_error(refused, root):
    with refused("CKPT-NONE", 3, "model.pt", "no model weights"):
        find(root)


def test_strange_names_are_escaped_in_notes(refused):
    found = find({"a\x1b[31m\n": {"w": W}, "b\r": 1})
    assert all(note.isprintable() for note in found.notes)
    with refused("CKPT-AMBIGUOUS", 3) as refusal:
        find({"a\x1b": {"w": W}, "b\n": {"w": V}})
    assert all(line.isprintable() for line in str(refusal.error).split("\n"))


# Rule 5: prefixes


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefix_shared_by_all_names_is_removed_and_told(prefix):
    found = find({f"{prefix}a.w": W, f"{prefix}b": V})
    assert found.tensors == {"a.w": W, "b": V}
    for part in prefix.rstrip(".").split("."):
        assert f"prefix '{part}.' removed from all names" in found.notes


@pytest.mark.parametrize("other", ["w", "modules.w", "x.module.w"])
def test_prefix_of_some_names_is_kept(other):
    found = find({"module.w": W, other: V})
    assert list(found.tensors) == ["module.w", other] and found.notes == ()


def test_prefix_of_a_module_wrapped_for_several_devices_is_removed():
    assert find(module(modules={"module": module({"w": W})})).tensors == {"w": W}
