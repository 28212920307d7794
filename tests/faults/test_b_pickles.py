"""Bad and hostile pickles: whatever they ask for, nothing runs, nothing is imported or written."""

import argparse
import collections
import contextlib
import copyreg
import datetime
import functools
import io
import itertools
import os
import pickle
import pickletools
import struct
import sys
import tarfile
import types
import uuid
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.transforms import InterpolationMode
from watch import FUZZ, no_hang, peak_below, read_all

from aniso.errors import AnisoError
from aniso.weights import open_weights
from aniso.weights.pickle import Machine

FOUR = torch.tensor([1.0, 2.0, 3.0, 4.0])
FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
TRAP = "trap_for_unpicklers"


def same_bits(a, b):
    assert list(a) == list(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        ours, theirs = (t.detach().clone(memory_format=torch.contiguous_format) for t in (a[name], b[name]))
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours, theirs))), name


# Pickles by hand


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def call(module, attribute, *args):
    return name(module, attribute) + b"(" + b"".join(args) + b"tR"


def mapping(**values):
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"u"


def storage(kind="FloatStorage", key="0", numel=4, where="cpu"):
    parts = text("storage"), name("torch", kind), text(key), text(where), number(numel)
    return b"(" + b"".join(parts) + b"tQ"


def tensor(shape=(4,), stride=(1,), offset=0, hooks=b"", **of):
    return call(
        "torch._utils",
        "_rebuild_tensor_v2",
        storage(**of),
        number(offset),
        numbers(shape),
        numbers(stride),
        b"\x89",
        hooks or call("collections", "OrderedDict"),
    )


def program(body, protocol=2):
    return b"\x80" + bytes([protocol]) + body + b"."


def save(path, data):
    """A checkpoint around a pickle, with one storage of four floats."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", FOUR.numpy().tobytes())
        archive.writestr("archive/version", b"3\n")
    return path


@pytest.fixture
def checkpoint(tmp_path):
    """``checkpoint(w=tensor())`` is a file with that dictionary as its pickle."""
    return lambda **values: save(tmp_path / "model.pt", program(mapping(**values)))


def saved(path, value, zipped=True):
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def saved_bytes(value, zipped=True):
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def patched(path, **edits):
    """The same archive with ``data.pkl`` or others changed, stored again with right checksums."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in entries.items():
            edit = edits.get(entry.rpartition("/")[2].replace(".", "_"), lambda data: data)
            archive.writestr(entry, edit(data))
    return path


def test_b0_the_pickles_written_here_are_what_torch_reads(checkpoint):
    path = checkpoint(w=tensor(), column=tensor((2,), (2,), 1))
    _, tensors = read_all(path)
    same_bits(tensors, torch.load(path, weights_only=False))
    assert tensors["column"].tolist() == [2, 4]


# B1: calls


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A path that the functions of these tests create when they are called."""
    pip = types.ModuleType("pip")
    pip.main = lambda path: Path(path).touch()
    pip.always = lambda *args, **more: (tmp_path / "marker").touch()
    monkeypatch.setitem(sys.modules, "pip", pip)
    monkeypatch.setattr(torch.hub, "load", lambda path: Path(path).touch())
    return tmp_path / "marker"


def fires(marker, load):
    """Whether ``load`` calls what creates the marker; it is removed again."""
    with contextlib.suppress(Exception):
        load()
    found = marker.exists()
    marker.unlink(missing_ok=True)
    return found


CALLS = ["posix.system", "builtins.eval", "pip.main", "torch.hub.load"]


def hostile(function, marker):
    module, _, attribute = function.rpartition(".")
    wish = {"system": f"touch '{marker}'", "eval": f"open({str(marker)!r}, 'w').close()"}
    return call(module, attribute, text(wish.get(attribute, str(marker))))


PLACES = {
    "a value": lambda bad: mapping(w=tensor(), extra=bad),
    "deep inside": lambda bad: mapping(w=tensor(), args=b"(" + mapping(a=b"]" + bad + b"a") + b"t"),
    "beside the weights": lambda bad: mapping(model=mapping(w=tensor()), epoch=bad),
    "a key": lambda bad: b"}(" + text("w") + tensor() + bad + b"Nu",
    "an argument": lambda bad: mapping(w=tensor(hooks=bad)),
    "thrown away": lambda bad: bad + b"0" + mapping(w=tensor()),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", CALLS)
def test_b1_calls_are_refused_by_name(tmp_path, refused, marker, function, place):
    path = save(tmp_path / "model.pt", program(PLACES[place](hostile(function, marker))))
    assert fires(marker, lambda: torch.load(path, weights_only=False))
    said = f"contains calls to {function}; not executed"
    with refused("PICKLE-CALL", 4, str(path), said, "aniso convert --tensors-only"):
        read_all(path)
    assert not marker.exists()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", CALLS)
def test_b1_tensors_only_reads_past_calls(tmp_path, marker, function, place):
    path = save(tmp_path / "model.pt", program(PLACES[place](hostile(function, marker))))
    source, tensors = read_all(path, tensors_only=True)
    same_bits(tensors, {"w": FOUR})
    assert source.info.pickle.calls == (function,)
    assert f"calls not executed: {function}" in source.info.notes
    assert not marker.exists()


class Reduced:
    """Pickles as whatever call it is given."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@FORMS
@pytest.mark.parametrize("function", [os.system, eval])
def test_b1_objects_that_reduce_to_calls(tmp_path, refused, marker, function, zipped):
    wish = f"touch '{marker}'" if function is os.system else f"open({str(marker)!r}, 'w').close()"
    hidden = [{"x": (Reduced(function, wish),)}]
    path = saved(tmp_path / "model.pt", {"state_dict": {"w": FOUR}, "args": hidden}, zipped)
    assert fires(marker, lambda: torch.load(path, weights_only=False))
    named = "posix.system" if function is os.system else "builtin__.eval"
    with refused("PICKLE-CALL", 4, str(path), named, "not executed"):
        read_all(path)
    _, tensors = read_all(path, tensors_only=True)
    same_bits(tensors, {"w": FOUR})
    assert not marker.exists()


def test_b1_plain_pickle_with_a_call(tmp_path, refused, marker):
    path = tmp_path / "model.bin"
    for protocol in range(6):
        wish = {"w": Reduced(os.system, f"touch '{marker}'")}
        path.write_bytes(pickle.dumps(wish, protocol))
        assert fires(marker, lambda: pickle.loads(path.read_bytes()))
        with refused("PICKLE-CALL", 4, str(path), "posix.system"):
            read_all(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "function",
    [
        "subprocess.Popen",
        "builtins.exec",
        "builtins.__import__",
        "__builtin__.eval",
        "importlib.import_module",
        "runpy.run_path",
        "ctypes.CDLL",
        "types.FunctionType",
        "operator.attrgetter",
        "webbrowser.open",
        "nt.system",
        "code.InteractiveInterpreter",
        "pickle.loads",
        "builtins.getattr",
        "builtins.print",
        "torch.load",
        "torch.utils.cpp_extension.load_inline",
        "numpy.testing._private.utils.runstring",
        "setuptools.setup",
        "joblib.load",
        "torch._dynamo.guards._private",
        "torch.classes.load_library",
    ],
)
def test_b1_other_functions_are_refused_by_name(checkpoint, refused, function):
    module, _, attribute = function.rpartition(".")
    path = checkpoint(w=tensor(), x=call(module, attribute, text("x")))
    with refused("PICKLE-CALL", 4, str(path), f"contains calls to {function}; not executed"):
        read_all(path)


def indirect(marker):
    system, wish = name("posix", "system"), text(f"touch '{marker}'")
    looked_up = call("builtins", "getattr", name("posix", "system"), text("__call__"))
    return {
        "through partial": call("functools", "partial", system, wish) + b")R",
        "through getattr": looked_up + wish + b"\x85R",
        "through a tensor": call(
            "torch._tensor", "_rebuild_from_type_v2", system, b"N", wish + b"\x85", b"N"
        ),
        "through a result": call("builtins", "getattr", system, text("__call__")) + wish + b"\x85R",
        "through map": call("builtins", "list", call("builtins", "map", system, b"]" + wish + b"a")),
    }


@pytest.mark.parametrize("way", indirect(""))
def test_b1_indirect_calls_are_refused(checkpoint, refused, marker, way):
    bad = indirect(marker)[way]
    assert fires(marker, lambda: pickle.loads(program(bad)))
    path = checkpoint(w=tensor(), x=bad)
    with refused("PICKLE-CALL", 4, str(path), "not executed"):
        read_all(path)
    assert not marker.exists()


def test_b1_partial_of_a_function_pickled_for_real(tmp_path, refused, marker):
    bad = Reduced(functools.partial(os.system, f"touch '{marker}'"))
    path = saved(tmp_path / "model.pt", {"w": FOUR, "x": bad})
    assert fires(marker, lambda: torch.load(path, weights_only=False))
    with refused("PICKLE-CALL", 4, str(path), "functools.partial"):
        read_all(path)


# Constructors of plain data that call a method of an argument, which the file has replaced.


def made_of(module, attribute, **attributes):
    """An object of this class with these attributes, made without a call of the class."""
    return name(module, attribute) + b")\x81" + mapping(**attributes) + b"b"


def namespace(**attributes):
    return made_of("argparse", "Namespace", **attributes)


def command(marker):
    """The marker's shell command as a partial, which calls it whenever it is called without arguments."""
    return call("functools", "partial", name("posix", "system"), text(f"touch '{marker}'"))


def shell_commands(marker):
    """Pickles of which each runs a shell command in torch.load, though it calls known constructors only."""
    system, wish = name("posix", "system"), text(f"touch '{marker}'")
    nothing = call("collections", "OrderedDict")
    simple = made_of("types", "SimpleNamespace", detach=command(marker))
    inner = program(system + wish + b"\x85R")
    wrapper = name("torch.utils.data.datapipes.datapipe", "_DataPipeSerializationWrapper")
    arguments = b"(" + wrapper + name("builtins", "object") + b"Nt"
    state = b"(B" + struct.pack("<I", len(inner)) + inner + b"\x89t"
    unset = call("functools", "partial", name("torch.nn", "LayerNorm"))
    return {
        "a parameter of a namespace": call(
            "torch._utils", "_rebuild_parameter", namespace(detach=command(marker)), b"\x88", nothing
        ),
        "a parameter with state": call(
            "torch._utils", "_rebuild_parameter_with_state", simple, b"\x88", nothing, b"}"
        ),
        "a tensor that is none": call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            name("copyreg", "_reconstructor"),
            wrapper,
            arguments,
            state,
        ),
        "a partial changed by its state": call(
            "collections", "OrderedDict", namespace(items=unset + b"(" + system + wish + b"\x85}}tb")
        ),
        "a state after a state": namespace(__setstate__=system) + wish + b"b",
        "a state after the state of a dictionary": nothing
        + mapping(__setstate__=system)
        + b"b"
        + wish
        + b"b",
        "a state after the state of a module": made_of(
            "torch.nn", "Module", _parameters=b"}", _modules=b"}", __setstate__=system
        )
        + wish
        + b"b",
        "a state after the state of a tensor": tensor()
        + b"(}"
        + mapping(__setstate__=system)
        + b"tb"
        + wish
        + b"b",
        "an item after a state": namespace(append=system) + wish + b"a",
        "members after a state": namespace(add=system) + b"(" + wish + b"\x90",
    }


NOT_FIRED = {
    "a state after the state of a tensor",
    *("Counter", "storage of a tensor", "state of a tensor", "sparse tensor", "scheduler"),
    *("tensor with attributes", "place of a storage"),
}
"""What this version of torch or Python happens not to call, and that is no plain data either."""


@pytest.mark.parametrize("way", shell_commands(""))
def test_b1_shell_commands_behind_known_constructors_are_refused(checkpoint, refused, marker, aniso, way):
    path = checkpoint(w=tensor(), x=shell_commands(marker)[way])
    assert fires(marker, lambda: torch.load(path, weights_only=False)) or way in NOT_FIRED
    with refused("PICKLE-CALL", 4, str(path), "not executed"):
        read_all(path)
    assert aniso("inspect", path).code == 4
    assert not marker.exists()


def inner_file(value):
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return b"B" + struct.pack("<I", len(out.getvalue())) + out.getvalue()


def replaced_methods():
    """Pickles that call a function they merely name, by the method of an argument that a constructor uses."""
    always, any_class = name("pip", "always"), name("lib", "Class")
    nothing, one = call("collections", "OrderedDict"), b"K\1"
    answering = namespace(__torch_function__=always)
    hidden = inner_file(argparse.Namespace(detach=torch.hub.list))
    named = call(
        "torch._utils", "_rebuild_parameter_with_state", tensor(), b"\x88", nothing, mapping(detach=always)
    )
    layout = name("torch", "sparse_coo")
    place = b"(" + text("storage") + name("torch", "FloatStorage") + text("0")
    return {
        "items after a state": namespace(extend=always) + b"(Ne",
        "OrderedDict": call("collections", "OrderedDict", namespace(items=always, keys=always)),
        "OrderedDict of one with attributes": call(
            "collections", "OrderedDict", nothing + mapping(items=always, keys=always) + b"b"
        ),
        "Counter": call("collections", "Counter", namespace(keys=always, items=always)),
        "defaultdict": call("collections", "defaultdict", b"N", namespace(keys=always)),
        "dict": call("builtins", "dict", namespace(keys=always)),
        "str": call("builtins", "str", namespace(_get_args=always, _get_kwargs=always)),
        "UUID": call("uuid", "UUID", namespace(replace=always)),
        "UUID of a module": call("uuid", "UUID", name("lib", "methods")),
        "base of _reconstructor": call(
            "copyreg", "_reconstructor", any_class, namespace(__new__=always), one
        ),
        "state of _reconstructor": call(
            "copyreg", "_reconstructor", name("lib", "Dict"), name("builtins", "dict"), namespace(keys=always)
        ),
        "storage of a tensor": call(
            *("torch._utils", "_rebuild_tensor_v2"),
            namespace(
                dtype=name("torch", "float32"),
                _untyped_storage=namespace(device=text("cpu"), __torch_function__=always),
            ),
            *(b"K\0", numbers([4]), numbers([1]), b"\x89", nothing),
        ),
        "state of a tensor": tensor() + b"(" + answering + b"K\0" + numbers([4]) + numbers([1]) + b"tb",
        "sparse tensor": call(
            "torch._utils",
            "_rebuild_sparse_tensor",
            layout,
            b"(" + answering + tensor() + numbers([4]) + b"t",
        ),
        "quantised tensor": call(
            *("torch._utils", "_rebuild_qtensor", storage(), b"K\0", numbers([4]), numbers([1])),
            *(call("collections", "defaultdict", always), b"\x89", nothing),
        ),
        "tensor with attributes": call("torch._utils", "_rebuild_parameter", named, b"\x88", nothing),
        "file inside": call(
            *("torch._utils", "_rebuild_parameter", call("torch.storage", "_load_from_bytes", hidden)),
            *(b"\x88", nothing),
        ),
        "place of a storage": place + namespace(startswith=always, split=always) + number(4) + b"tQ",
        "optimiser": made_of("torch.optim.sgd", "SGD", _patch_step_function=always, defaults=b"}"),
        "group of an optimiser": made_of(
            "torch.optim.sgd", "SGD", defaults=b"}", param_groups=b"]" + namespace(setdefault=always) + b"a"
        ),
        "scheduler": made_of(
            *("torch.optim.lr_scheduler", "ReduceLROnPlateau"),
            **{key: text("x") for key in ("mode", "threshold", "threshold_mode")},
            _init_is_better=always,
        ),
        "class that NumPy makes": call(
            "numpy._core.multiarray", "_reconstruct", name("lib", "Array"), numbers([0]), text("b")
        )
        + b"Nb",
    }


@pytest.fixture
def library(marker, monkeypatch):
    """A library whose classes and functions create the marker."""
    always = sys.modules["pip"].always
    lib = types.ModuleType("lib")
    lib.methods = types.ModuleType("lib.methods")
    lib.methods.replace = always
    lib.Class = type("Class", (), {})
    lib.Dict = type("Dict", (dict,), {})
    lib.Array = type("Array", (np.ndarray,), {"__setstate__": always})
    monkeypatch.setitem(sys.modules, "lib", lib)
    monkeypatch.setattr(torch.hub, "list", always)
    return marker


REPLACED = replaced_methods()


@pytest.mark.parametrize("way", REPLACED)
def test_b1_methods_that_the_file_replaced_are_calls(checkpoint, library, way):
    path = checkpoint(x=REPLACED[way], w=tensor())
    assert fires(library, lambda: torch.load(path, weights_only=False)) or way in NOT_FIRED
    with pytest.raises(AnisoError) as caught:
        read_all(path)
    expected = "PICKLE-MALFORMED" if way == "place of a storage" else "PICKLE-CALL"
    assert (caught.value.code, caught.value.exit_code) == (expected, 4), str(caught.value)
    assert not library.exists()


def test_b1_loggers_are_not_changed(checkpoint, refused):
    """A logger is shared by the whole program, so that its attributes are called later."""
    logger = call("logging", "getLogger", text("x"))
    read_all(checkpoint(w=tensor(), x=logger))
    with refused("PICKLE-CALL", 4, "logging.getLogger.__setstate__"):
        read_all(checkpoint(w=tensor(), x=logger + mapping(info=name("posix", "system")) + b"b"))


@FORMS
def test_b1_plain_data_of_real_checkpoints_is_not_a_call(tmp_path, zipped):
    optimiser = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    tagged = nn.Parameter(FOUR.clone())
    tagged.tag = "x"
    beside = {
        "norm": functools.partial(nn.LayerNorm, eps=1e-6),
        "nested": functools.partial(functools.partial(nn.LayerNorm, eps=1e-6), bias=False),
        "counts": collections.defaultdict(int, a=1),
        "tree": collections.defaultdict(functools.partial(collections.defaultdict, list)),
        "seen": collections.Counter("aab"),
        "recent": collections.deque([1, 2], maxlen=3),
        "array": np.ones(3),
        "objects": np.array([{"a": 1}, None], dtype=object),
        "accuracy": np.float64(3),
        "args": argparse.Namespace(lr=1, path=Path("x"), append=True),
        "when": datetime.datetime(2024, 1, 2),
        "run": uuid.UUID(int=5),
        "optimizer": optimiser,
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser),
    }
    path = saved(tmp_path / "model.pt", {"state_dict": {"w": FOUR, "tagged": tagged}, **beside}, zipped)
    source, tensors = read_all(path)
    same_bits(tensors, {"w": FOUR, "tagged": FOUR})
    assert source.info.pickle.calls == ()


# B2: every operation


def calling(marker):
    """The same call by every operation that calls, or that names what is called."""
    system, wish = name("posix", "system"), text(f"touch '{marker}'")
    framed = system + wish + b"\x85R"
    return {
        "GLOBAL REDUCE": system + wish + b"\x85R",
        "STACK_GLOBAL": text("posix") + text("system") + b"\x93" + wish + b"\x85R",
        "STACK_GLOBAL short": b"\x8c\x05posix\x8c\x06system\x93" + wish + b"\x85R",
        "INST": b"(" + wish + b"iposix\nsystem\n",
        "OBJ": b"(" + system + wish + b"o",
        "STRING": system + f"(S\"touch '{marker}'\"\ntR".encode(),
        "UNICODE": system + f"(Vtouch '{marker}'\ntR".encode(),
        "PUT GET": system + b"p7\n0g7\n" + wish + b"\x85R",
        "BINPUT BINGET": system + b"q\x070h\x07" + wish + b"\x85R",
        "LONG_BINPUT": system + b"r\x07\0\0\x000j\x07\0\0\0" + wish + b"\x85R",
        "MEMOIZE": system + b"\x940h\0" + wish + b"\x85R",
        "DUP": system + b"2" + wish + b"\x85R\x86",
        "POP_MARK": b"N(" + system + wish + b"\x85R1",
        "EXT1": b"\x82\x7f" + wish + b"\x85R",
        "EXT2": b"\x83\x7f\x7f" + wish + b"\x85R",
        "EXT4": b"\x84\x7f\x7f\x7f\x7f" + wish + b"\x85R",
        "FRAME": b"\x95" + struct.pack("<Q", len(framed)) + framed,
    }


@pytest.fixture
def extensions():
    codes = 0x7F, 0x7F7F, 0x7F7F7F7F
    names = ("posix", "system"), ("nt", "system"), ("os", "system")
    for code, (module, attribute) in zip(codes, names, strict=True):
        copyreg._inverted_registry[code] = ("posix", "system")
        copyreg._extension_registry[module, attribute] = code
    yield
    for code, key in zip(codes, names, strict=True):
        del copyreg._inverted_registry[code], copyreg._extension_registry[key]
    copyreg.clear_extension_cache()


@pytest.mark.parametrize("operation", calling(""))
def test_b2_calls_by_any_operation_are_refused(tmp_path, refused, marker, extensions, operation):
    bad = calling(marker)[operation]
    for protocol in range(6):
        assert fires(marker, lambda p=protocol: pickle.loads(program(bad, p)))
        path = save(tmp_path / "model.pt", program(mapping(w=tensor(), x=bad), protocol))
        expected = "copyreg.extension" if operation.startswith("EXT") else "posix.system"
        with refused("PICKLE-CALL", 4, str(path), expected):
            read_all(path)
        assert not marker.exists()


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that can be imported, and creates the marker in whatever way it is touched."""
    folder, marker = tmp_path / "trap", tmp_path / "marker"
    folder.mkdir()
    methods = ["__init__", "__setstate__", "__setitem__", "append", "extend", "update", "add"]
    (folder / f"{TRAP}.py").write_text(
        f"import pathlib\nfire = pathlib.Path({str(marker)!r}).touch\nfire()\n"
        "class Trap:\n    def __new__(cls, *args, **more):\n        fire()\n"
        "        return object.__new__(cls)\n"
        + "".join(f"    def {m}(self, *args):\n        fire()\n        return 0\n" for m in methods)
    )
    monkeypatch.syspath_prepend(folder)
    yield marker
    sys.modules.pop(TRAP, None)


CLASS = name(TRAP, "Trap")
TOUCHING = {
    "GLOBAL": CLASS,
    "STACK_GLOBAL": text(TRAP) + text("Trap") + b"\x93",
    "NEWOBJ": CLASS + b")\x81",
    "NEWOBJ_EX": CLASS + b")}\x92",
    "a key": b"}" + CLASS + b")\x81Ns",
    "a set": b"\x8f(" + CLASS + b")\x81\x90",
    "_reconstructor": call("copyreg", "_reconstructor", CLASS, name("builtins", "object"), b"N"),
    "BUILD of a module": CLASS + b")\x81" + mapping(_parameters=b"}", _modules=b"}") + b"b",
}
# What runs code of the class itself, whatever the class is called; and how the report names it.
RUNNING = {
    "REDUCE": (CLASS + b")R", "Trap"),
    "INST": (f"(i{TRAP}\nTrap\n".encode(), "Trap"),
    "OBJ": (b"(" + CLASS + b"o", "Trap"),
    "BUILD": (CLASS + b")\x81}b", "Trap.__setstate__"),
    "BUILD state": (CLASS + b")\x81" + mapping(a=b"N") + b"b", "Trap.__setstate__"),
    "BUILD state and slots": (CLASS + b")\x81}}\x86b", "Trap.__setstate__"),
    "APPEND": (CLASS + b")\x81Na", "Trap.extend"),
    "APPENDS": (CLASS + b")\x81(Ne", "Trap.extend"),
    "ADDITEMS": (CLASS + b")\x81(N\x90", "Trap.extend"),
    "SETITEM": (CLASS + b")\x81NNs", "Trap.__setitem__"),
    "SETITEMS": (CLASS + b")\x81(NNu", "Trap.__setitem__"),
    "_reconstructor with a base": (call("copyreg", "_reconstructor", CLASS, CLASS, b"N"), "Trap.__init__"),
}


@pytest.mark.parametrize("operation", TOUCHING)
def test_b2_classes_are_recorded_by_name_only(checkpoint, trap, operation):
    assert fires(trap, lambda: pickle.loads(program(TOUCHING[operation])))
    del sys.modules[TRAP]
    source, tensors = read_all(checkpoint(w=tensor(), x=TOUCHING[operation]))
    same_bits(tensors, {"w": FOUR})
    assert f"{TRAP}.Trap" in source.info.pickle.classes
    assert any("classes recorded by name only" in note and TRAP in note for note in source.info.notes)
    assert TRAP not in sys.modules and not trap.exists()


@pytest.mark.parametrize("operation", RUNNING)
def test_b2_what_runs_code_of_a_class_is_a_call(checkpoint, refused, trap, operation):
    bad, called = RUNNING[operation]
    assert fires(trap, lambda: pickle.loads(program(bad)))
    del sys.modules[TRAP]
    path = checkpoint(w=tensor(), x=bad)
    with refused("PICKLE-CALL", 4, str(path), f"contains calls to {TRAP}.{called}; not executed"):
        read_all(path)
    source, tensors = read_all(path, tensors_only=True)
    same_bits(tensors, {"w": FOUR})
    assert source.info.pickle.calls == (f"{TRAP}.{called}",)
    assert TRAP not in sys.modules and not trap.exists()


def dotted(module, attribute):
    return text(module) + text(attribute) + b"\x93"


# Names that reach a function of the standard library through a library that merely imports it.
THROUGH = {
    "a module of a module": ("torch.utils.data", "_utils.worker.os.system"),
    "a class of a module": ("torch.utils.data", "_utils.subprocess.Popen"),
    "a class after a class": ("lib", "Class.os.Popen"),
    "an import of a library": ("psutil", "Popen"),
    "a private step": ("lib", "_Inner._os.Popen"),
}


MAKING = ["REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "OBJ"]
# an object made without its __init__ is data, of psutil.Popen as of any class of a library
LEADING = [(w, m) for w in THROUGH for m in MAKING if "library" not in w or not m.startswith("NEWOBJ")]


@pytest.mark.parametrize(("way", "made"), LEADING)
def test_b1_names_that_lead_elsewhere_are_calls(checkpoint, refused, aniso, way, made):
    target, wish = dotted(*THROUGH[way]), text("touch x")
    bad = {
        "REDUCE": target + wish + b"\x85R",
        "NEWOBJ": target + wish + b"\x85\x81",
        "NEWOBJ_EX": target + wish + b"\x85}\x92",
        "BUILD": target + b")\x81" + mapping(args=wish) + b"b",
        "OBJ": b"(" + target + wish + b"o",
    }[made]
    path = checkpoint(w=tensor(), x=bad)
    with refused("PICKLE-CALL", 4, str(path), ".".join(THROUGH[way])):
        read_all(path)
    ran = aniso("inspect", path)
    assert ran.code == 4 and "would have called: " + ".".join(THROUGH[way]) in ran.out


def test_b1_nested_classes_are_still_recorded(checkpoint):
    source, _ = read_all(checkpoint(w=tensor(), x=dotted("lib.models", "Outer._Inner") + b")\x81"))
    assert source.info.pickle.calls == () and source.info.pickle.classes == ("lib.models.Outer._Inner",)


@FORMS
@pytest.mark.parametrize("protocol", range(2, 6))
def test_b1_a_file_inside_of_a_pickle_is_read_too(tmp_path, refused, marker, zipped, protocol):
    inner = io.BytesIO()
    wish = {"x": Reduced(os.system, f"touch '{marker}'")}
    torch.save(wish, inner, _use_new_zipfile_serialization=zipped)
    hidden = [Reduced(torch.storage._load_from_bytes, inner.getvalue())]
    path = tmp_path / "model.pt"
    torch.save({"w": FOUR, "x": hidden}, path, pickle_protocol=protocol)
    assert fires(marker, lambda: torch.load(path, weights_only=False))
    expected = "torch.storage._load_from_bytes" if zipped else "posix.system"
    with refused("PICKLE-CALL", 4, str(path), expected):
        read_all(path)
    assert not marker.exists()


@pytest.mark.parametrize("beside", [b"}", mapping(a=mapping(w=tensor()), b=mapping(w=tensor()))])
def test_b1_a_call_comes_before_what_else_is_wrong(tmp_path, aniso, marker, beside):
    path = save(tmp_path / "model.pt", program(hostile("posix.system", marker) + b"0" + beside))
    for command in (("inspect", path), ("convert", path, "-o", tmp_path / "out.safetensors")):
        ran = aniso(*command)
        assert ran.code == 4 and "PICKLE-CALL" in ran.err and "posix.system" in ran.err
        assert f"fix       aniso {command[0]} '{path}'" not in ran.err
    assert not marker.exists()


def test_b1_a_call_in_a_truncated_pickle_comes_first(tmp_path, refused, marker):
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x02" + hostile("posix.system", marker) + b"]" + text("x" * 40)[:20])
    for tensors_only in (False, True):
        with refused("PICKLE-CALL", 4, str(path), "posix.system", "ends in the middle"):
            read_all(path, tensors_only=tensors_only)


@pytest.mark.parametrize(
    "value", [{}, {"a": {"w": FOUR}, "b": {"w": FOUR}}, {"w": FOUR.to_sparse()}], ids=str
)
def test_b8_no_fix_repeats_the_command_that_was_typed(tmp_path, aniso, value):
    path = saved(tmp_path / "model.pt", value)
    for command in (("inspect", path), ("inspect", f"{path}::nope"), ("inspect", tmp_path)):
        ran = aniso(*command)
        fix = next(line for line in ran.err.splitlines() if line.startswith("  fix"))
        assert ran.code == 3 and f"aniso {command[0]} '{command[1]}'" not in fix, fix


MALFORMED = {
    "empty stack": b"R",
    "result of nothing": b"",
    "no mark": b"t",
    "mark as a value": b"(\x85R",
    "object of no class": b"(o",
    "object of a number": b"K\1)\x81",
    "name that is no text": b"K\1K\2\x93",
    "memo never set": b"h\7",
    "memo of nothing": b"q\0",
    "state of a number": b"K\1}b",
    "items of a tuple": b")(Ne",
    "items of a number": b"K\1(NNu",
    "odd items": b"}(NNNu",
    "outside buffer": b"\x97",
    "read-only buffer": b"N\x98",
    "reference by text": b"Psomewhere\n",
    "reference by number": b"K\1Q",
    "unknown operation": b"\xff",
    "storage of no type": b"(" + text("storage") + b"NX\1\0\0\x000X\1\0\0\0cK\4tQ",
    "tensor without arguments": call("torch._utils", "_rebuild_tensor_v2"),
    "parameter without arguments": call("torch._utils", "_rebuild_parameter"),
    "pairs that are none": call("collections", "OrderedDict", b"](Ne"),
    "object of a result": call("copyreg", "_reconstructor", b"N", b"N", b"N"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_b2_malformed_pickles_are_refused(tmp_path, refused, kind):
    path = save(tmp_path / "model.pt", program(MALFORMED[kind]))
    with refused("PICKLE-MALFORMED", 4, str(path), "malformed"):
        read_all(path)


ARGUMENTS = [b"", b"\0" * 9, b"\1" * 9, b"1\n1\n", b"'a'\n", b"x\ny\n", b"\xff" * 9, b"\n\n"]
STACKS = [b"", b"N", b"NN", b"NNN", b"(", b"(N", b"}N", b"}NN", b"](N", b"}(NN", CLASS + b")"]


def test_b2_no_operation_breaks_the_reader():
    refusals = set()
    for opcode, stack, argument in itertools.product(pickletools.opcodes, STACKS, ARGUMENTS):
        code = opcode.code.encode("latin-1")
        try:
            Machine().run(io.BytesIO(program(stack + code + argument + b".")))
        except AnisoError as e:
            refusals.add((e.code, e.exit_code))
    assert refusals == {("PICKLE-MALFORMED", 4), ("PICKLE-LIMIT", 4), ("FILE-TRUNCATED", 3)}


atoms = st.sampled_from(
    [
        *(b"N", b"\x88", b"K\1", b")", b"]", b"}", b"\x8f", b"h\0", b"h\1", b"G" + bytes(8)),
        *(b"\x82\x7f", b"\x83\x7f\x7f", b"\x84\x7f\x7f\x7f\x7f", b"C\2ab", b"S'w'\n", b"I01\n", b"F1.5\n"),
        *(number(-1), number(2**70), number(1 << 40_000), numbers([4]), numbers([-2, 3])),
        *(text(s) for s in ("w", "posix", "system", "storage", "cpu", "0", "_modules", "_parameters")),
        *(storage(), storage(numel=3), storage("UntypedStorage", numel=16), tensor(), tensor((2, 2), (2, 1))),
        *(name("posix", "system"), name("builtins", "eval"), name("builtins", "getattr"), CLASS),
        *(name("torch._utils", f"_rebuild_{s}") for s in ("tensor", "tensor_v2", "tensor_v3", "parameter")),
        *(name("collections", s) for s in ("OrderedDict", "defaultdict")),
        *(name("torch", s) for s in ("Size", "FloatStorage", "float32", "device")),
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("copyreg", "_reconstructor"),
        name("builtins", "set"),
    ]
)


def joined(inner):
    return st.lists(inner, max_size=5).map(b"".join)


def compound(inner):
    """Expressions made of others: groups, calls, objects, and what is done to them."""
    one, some = inner, joined(inner)
    return st.one_of(
        st.builds(lambda a, end: b"(" + a + end, some, st.sampled_from([b"t", b"l", b"d", b"\x91", b"o"])),
        st.builds(lambda f, a: f + b"(" + a + b"tR", one, some),
        st.builds(lambda f, a, end: f + a + end, one, one, st.sampled_from([b"R", b"\x81", b"b", b"\x93"])),
        st.builds(lambda f, a: f + a + b"}\x92", one, one),
        st.builds(lambda f, a, end: f + b"(" + a + end, one, some, st.sampled_from([b"e", b"u", b"\x90"])),
        st.builds(lambda f, a: f + a + b"a", one, one),
        st.builds(lambda f, k, v: f + k + v + b"s", one, one, one),
        st.builds(lambda a: b"(" + a + b"iposix\nsystem\n", some),
        st.builds(
            lambda a, end: a + end, one, st.sampled_from([b"q\0", b"q\1", b"\x94", b"\x85", b"2\x86", b"Q"])
        ),
        st.builds(lambda a: mapping(_modules=mapping(a=a), _parameters=mapping(w=a)), one),
    )


expressions = st.recursive(atoms, compound, max_leaves=16)
noise = st.lists(
    st.sampled_from([bytes([b]) for b in range(256)] + [b"cposix\nsystem\n", b"(", b"N", b")"]), max_size=6
).map(b"".join)
protocols = st.integers(0, 5)


def survives(path, trap):
    """Reading ends well or in one of our errors, and touches nothing."""
    for tensors_only in (False, True):
        try:
            read_all(path, tensors_only=tensors_only)
        except AnisoError as e:
            assert e.exit_code in (3, 4), str(e)
    assert TRAP not in sys.modules and not trap.exists()


@FUZZ
@given(protocol=protocols, values=st.lists(expressions, max_size=3), odd=noise)
def test_b2_structured_pickles_end_in_our_errors_only(tmp_path, trap, protocol, values, odd):
    entries = {f"x{i}": value for i, value in enumerate(values)}
    body = mapping(w=tensor(), **entries) + odd
    survives(save(tmp_path / "model.pt", program(body, protocol)), trap)


@FUZZ
@given(protocol=protocols, value=expressions, plain=st.booleans())
def test_b2_any_expression_as_a_whole_pickle(tmp_path, trap, protocol, value, plain):
    path = tmp_path / "model.pt"
    if plain:
        path.write_bytes(program(value, protocol).ljust(8, b"."))
    else:
        save(path, program(value, protocol))
    survives(path, trap)


@FUZZ
@given(start=st.sampled_from([b"\x80\x02", b"\x80\x04\x95", b"(", b"]", b"}", b"c"]), data=st.binary())
def test_b2_random_bytes_end_in_our_errors_only(tmp_path, trap, start, data):
    path = tmp_path / "model.pt"
    path.write_bytes((start + data).ljust(8, b"."))
    survives(path, trap)


@FUZZ
@given(data=st.lists(noise, min_size=1, max_size=8).map(b"".join), protocol=protocols)
def test_b2_random_operations_end_in_our_errors_only(tmp_path, trap, data, protocol):
    survives(save(tmp_path / "model.pt", program(data, protocol)), trap)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)


def realistic():
    torch.manual_seed(0)
    model = Tiny()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    args = argparse.Namespace(lr=0.1, name="tiny", path=Path("x"))
    return {"model": model, "optimizer": optimiser.state_dict(), "args": args}


REAL = {zipped: saved_bytes(realistic(), zipped) for zipped in (True, False)}
edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 2), st.binary(max_size=3)),
    min_size=1,
    max_size=4,
)


def edited(data, changes):
    for where, dropped, added in changes:
        at = int(where * len(data))
        data = data[:at] + added + data[at + dropped :]
    return data


@FUZZ
@given(changes=edits)
def test_b2_damaged_archives_end_in_our_errors_only(tmp_path, trap, changes):
    path = tmp_path / "model.pt"
    path.write_bytes(edited(REAL[True], changes))
    survives(path, trap)


@FUZZ
@given(changes=edits)
def test_b2_damaged_pickles_in_archives_end_in_our_errors_only(tmp_path, trap, changes):
    path = tmp_path / "model.pt"
    path.write_bytes(REAL[True])
    survives(patched(path, data_pkl=lambda data: edited(data, changes)), trap)


@FUZZ
@given(changes=edits)
def test_b2_damaged_legacy_files_end_in_our_errors_only(tmp_path, trap, changes):
    path = tmp_path / "model.pt"
    path.write_bytes(edited(REAL[False], changes))
    survives(path, trap)


@pytest.mark.parametrize("limit", ["MAX_OPCODES", "MAX_STACK"])
def test_b2_too_many_operations_are_refused(checkpoint, refused, monkeypatch, limit):
    path = checkpoint(w=tensor(), x=b"(" + b"N" * 1000 + b"t")
    read_all(path)
    monkeypatch.setattr(f"aniso.weights.pickle.{limit}", 900)
    with refused("PICKLE-LIMIT", 4, str(path), "900 o"):
        read_all(path)


def test_b2_operations_that_leave_nothing_behind_are_counted(checkpoint, refused, monkeypatch):
    path = checkpoint(w=tensor(), x=b"N0" * 1000 + b"N")
    read_all(path)
    monkeypatch.setattr("aniso.weights.pickle.MAX_OPCODES", 1900)
    with refused("PICKLE-LIMIT", 4, str(path), "1900 operations"):
        read_all(path)


@pytest.mark.parametrize("body", [b"N0" * 600, text("x" * 1100) + b"0", b"V" + b"x" * 1100 + b"\n0"])
def test_b2_too_many_bytes_are_refused(tmp_path, refused, monkeypatch, body):
    path = tmp_path / "model.pt"
    path.write_bytes(program(body + b"N" * 8))
    monkeypatch.setattr("aniso.weights.pickle.MAX_BYTES", 1000)
    with refused("PICKLE-LIMIT", 4, str(path)):
        read_all(path)


def test_b2_too_long_a_pickle_in_an_archive_is_not_even_read(checkpoint, refused, monkeypatch):
    path = checkpoint(w=tensor(), x=text("x" * 2000))
    monkeypatch.setattr("aniso.weights.torch_file.MAX_BYTES", 1000)
    with refused("PICKLE-LIMIT", 4, str(path), "bytes"):
        read_all(path)


@pytest.mark.parametrize(
    "opening", [b"\x8e", b"\x8d", b"\x96"], ids=["BINBYTES8", "BINUNICODE8", "BYTEARRAY8"]
)
@pytest.mark.parametrize("length", [1 << 40, (1 << 63) - 1])
def test_b2_declared_lengths_reserve_nothing(tmp_path, refused, opening, length):
    path = save(tmp_path / "model.pt", program(opening + struct.pack("<Q", length) + b"x"))
    with refused("PICKLE-LIMIT", 4, str(path)), peak_below(50):
        open_weights(path)


DEEP = {
    "tuples": b")" + b"\x85" * 200_000,
    "lists": b"]" * 100_000 + b"a" * 99_999,
    "dictionaries": b"}K\1" * 20_000 + b"N" + b"s" * 20_000,
    "named entries": b"}X\1\0\0\0a" * 20_000 + b"N" + b"s" * 20_000,
    "objects": b"cm\nC\n" * 20_000 + b")R" + b"\x85R" * 19_999,
    "states": b"cm\nC\n)\x81" * 20_000 + b"b" * 19_999,
    "a key": b"}" + b")" + b"\x85" * 200_000 + b"Ns",
    "doubled": b"N" + b"2\x86" * 1000,
    "doubled as a key": b"}N" + b"2\x86" * 1000 + b"Ns",
}


@pytest.mark.parametrize("kind", DEEP)
def test_b2_deep_values_beside_the_weights_do_no_harm(checkpoint, kind):
    path = checkpoint(w=tensor(), x=DEEP[kind])
    with no_hang():
        source, tensors = read_all(path, tensors_only=True)
    same_bits(tensors, {"w": FOUR})
    assert any("left out: x" in note for note in source.info.notes)


@pytest.mark.parametrize("kind", DEEP)
def test_b2_deep_values_alone_hold_no_weights(tmp_path, refused, kind):
    path = save(tmp_path / "model.pt", program(DEEP[kind]))
    calls = kind in ("objects", "states")
    code, number_ = ("PICKLE-CALL", 4) if calls else ("CKPT-NONE", 3)
    with no_hang(), refused(code, number_, str(path), "no model weights"):
        read_all(path, tensors_only=True)


def test_b2_tensors_of_tensors_of_tensors_are_refused(checkpoint):
    again = (
        name("torch._tensor", "_rebuild_from_type_v2") + b"q\0" + b"(h\0N" * 5000 + b")" + b"Nt" * 5000 + b"R"
    )
    with pytest.raises(AnisoError) as caught:
        read_all(checkpoint(w=tensor(), x=again))
    assert (caught.value.code, caught.value.exit_code) == ("PICKLE-LIMIT", 4)


def module(parameters=b"}", modules=b"}"):
    return name("m", "Module") + b")\x81" + mapping(_parameters=parameters, _modules=modules) + b"b"


def test_b2_modules_nested_too_deeply_are_refused(tmp_path, refused):
    body = module(mapping(w=tensor()))
    for depth in range(70):
        body = module(modules=mapping(a=body))
        path = save(tmp_path / "model.pt", program(body))
        if depth == 60:
            _, tensors = read_all(path)
            same_bits(tensors, {"a." * 61 + "w": FOUR})
    with refused("PICKLE-LIMIT", 4, str(path), "nested"):
        read_all(path)


def test_b2_module_that_contains_itself_is_refused(tmp_path, refused):
    model = nn.Linear(1, 1)
    model.add_module("again", model)
    path = saved(tmp_path / "model.pt", model)
    with no_hang(), refused("PICKLE-LIMIT", 4, str(path)):
        read_all(path)


def doubled_modules(levels, word, parameters):
    """Each module holds the one before under two names: 2^levels paths in a short pickle."""
    body = module(parameters)
    for _ in range(levels):
        one, two = text("a" + word), text("b" + word)
        body = body + b"q\x000" + module(modules=b"}(" + one + b"h\0" + two + b"h\0u")
    return body


def test_b2_modules_with_too_many_paths_are_refused(tmp_path, refused):
    path = save(tmp_path / "model.pt", program(doubled_modules(40, "", mapping(w=tensor()))))
    with no_hang(), refused("PICKLE-LIMIT", 4, str(path)):
        read_all(path)


def test_b2_empty_modules_with_too_many_paths_end(tmp_path):
    body = module(mapping(w=tensor()), mapping(a=doubled_modules(40, "", b"}")))
    path = save(tmp_path / "model.pt", program(body))
    try:
        with no_hang():
            _, tensors = read_all(path)
    except AnisoError as e:
        assert (e.code, e.exit_code) == ("PICKLE-LIMIT", 4)
    else:
        same_bits(tensors, {"w": FOUR})


def test_b2_names_cannot_be_multiplied(tmp_path, refused):
    path = save(tmp_path / "model.pt", program(doubled_modules(12, "n" * 4000, mapping(w=tensor()))))
    assert path.stat().st_size < 150_000
    with no_hang(), refused("PICKLE-LIMIT", 4, str(path)), peak_below(50):
        open_weights(path)


def test_b2_few_levels_of_shared_modules_are_read(tmp_path):
    path = save(tmp_path / "model.pt", program(doubled_modules(2, "", mapping(w=tensor()))))
    source, tensors = read_all(path)
    same_bits(tensors, {f"{x}.{y}.w": FOUR for x in "ab" for y in "ab"})
    assert set(source.aliases.values()) == {"a.a.w"}


def test_b2_dictionaries_with_too_many_paths_are_looked_at_once(checkpoint):
    body = b"}"
    for _ in range(3):
        body += b"q\x000}(" + b"".join(text(f"k{i}") + b"h\0" for i in range(300)) + b"u"
    path = checkpoint(wide=body, model=mapping(w=tensor()))
    with no_hang():
        _, tensors = read_all(path)
    same_bits(tensors, {"w": FOUR})


def test_b2_dictionary_that_contains_itself_ends(tmp_path):
    body = b"}q\0(" + text("a") + b"h\0" + text("optimizer") + mapping(w=tensor()) + b"u"
    path = save(tmp_path / "model.pt", program(body))
    with no_hang(), pytest.raises(AnisoError):
        read_all(path)


def test_b2_long_names_cannot_be_multiplied(checkpoint):
    word = text("n" * 200_000)
    body = word + b"q\0" + word + b"q\1\x86(" + b"h\0h\1\x93" * 500 + b"t\x86"
    path = checkpoint(w=tensor(), x=body)
    with peak_below(50), contextlib.suppress(AnisoError):
        open_weights(path)


def test_b2_names_of_results_do_not_grow(checkpoint, refused):
    path = checkpoint(w=tensor(), x=call("posix", "system") + b")R\x94" * 5000)
    with refused("PICKLE-CALL", 4, str(path), "posix.system"), peak_below(50):
        open_weights(path)


@pytest.mark.parametrize(
    ("function", "items", "times"),
    [(name("torch", "Size"), b"K\1", 60_000), (name("collections", "OrderedDict"), b"h\1", 10_000)],
    ids=["sizes", "pairs"],
)
def test_b2_one_list_copied_many_times_is_refused_or_cheap(checkpoint, function, items, times):
    pair = text("k") + b"N\x86q\x010"
    several = pair + b"](" + items * 200_000 + b"e\x85q\x020" + function + b"q\x030"
    path = checkpoint(w=tensor(), x=several + b"h\3h\2R0" * times + b"N")
    with no_hang(), contextlib.suppress(AnisoError):
        open_weights(path)


# B3: whole modules


def publish(patch, module, *classes):
    """The classes as if they were defined in that module, for as long as the patch lasts."""
    home = types.ModuleType(module)
    package = module.partition(".")[0]
    patch.setitem(sys.modules, package, types.ModuleType(package))
    patch.setitem(sys.modules, module, home)
    for cls in classes:
        patch.setattr(cls, "__module__", module)
        setattr(home, cls.__name__, cls)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class VisualTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(8))
        self.conv1 = nn.Conv2d(3, 8, 4, bias=False)
        self.block = nn.Sequential(
            collections.OrderedDict(fc=nn.Linear(8, 8), gelu=QuickGELU(), ln=nn.LayerNorm(8))
        )
        self.register_buffer("attn_mask", torch.full((2, 2), -torch.inf), persistent=False)
        self.register_buffer("position_ids", torch.arange(5))
        self.register_parameter("none", None)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = VisualTransformer()
        self.token_embedding = nn.Embedding(7, 8)
        self.tied = self.token_embedding
        self.norm = nn.BatchNorm1d(8)
        self.fp16 = nn.Parameter(torch.randn(3, 2).half().T)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.6592)


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = CLIP()
        self.args = argparse.Namespace(model="ViT-B-32", save=Path("checkpoints"), lr=1e-5)
        bicubic = {"interpolation": InterpolationMode.BICUBIC}
        steps = torchvision.transforms
        self.train_preprocess = steps.Compose(
            [
                steps.RandomResizedCrop(224, scale=(0.9, 1.0), **bicubic),
                steps.ToTensor(),
                steps.Normalize((0.48, 0.45, 0.40), (0.26, 0.26, 0.27)),
            ]
        )
        self.val_preprocess = steps.Compose([steps.Resize(224, **bicubic), torch.nn.functional.relu])
        self.cache_dir = None


@pytest.fixture
def encoder(monkeypatch):
    """Makes an encoder of classes that are gone once it has been saved."""

    def write(path, zipped):
        torch.manual_seed(0)
        with monkeypatch.context() as patch:
            publish(patch, "open_clip.model", QuickGELU, VisualTransformer, CLIP)
            publish(patch, "src.modeling", ImageEncoder)
            model = ImageEncoder()
            saved(path, model, zipped)
        for gone in ("open_clip", "open_clip.model", "src", "src.modeling"):
            monkeypatch.setitem(sys.modules, gone, None)
        return model.state_dict()

    return write


@FORMS
def test_b3_pickled_encoder_is_its_state_dict(tmp_path, encoder, zipped):
    path = tmp_path / "finetuned.pt"
    expected = encoder(path, zipped)
    assert "model.tied.weight" in expected and "model.visual.attn_mask" not in expected
    with pytest.raises(ImportError):
        torch.load(path, weights_only=False)
    source, tensors = read_all(path)
    same_bits(tensors, expected)
    assert source.aliases == {"model.tied.weight": "model.token_embedding.weight"}


@FORMS
def test_b3_classes_are_listed(tmp_path, encoder, zipped):
    path = tmp_path / "finetuned.pt"
    encoder(path, zipped)
    source, _ = read_all(path)
    listed = source.info.pickle.classes
    assert {"src.modeling.ImageEncoder", "open_clip.model.VisualTransformer"} <= set(listed)
    assert "torchvision.transforms.functional.InterpolationMode" in listed
    assert source.info.pickle.calls == ()
    assert any("src.modeling.ImageEncoder" in note for note in source.info.notes)


@FORMS
def test_b3_encoder_inside_a_dictionary_is_found(tmp_path, zipped):
    model = Tiny()
    path = saved(tmp_path / "model.pt", {"model": model, "epoch": 3}, zipped)
    source, tensors = read_all(path)
    same_bits(tensors, model.state_dict())
    assert "mask" not in tensors and "seen" in tensors
    assert "weights taken from entry 'model'" in source.info.notes


# B4 and B5: views and storages


@FORMS
def test_b4_expanded_tensor_is_refused(tmp_path, refused, zipped):
    path = saved(tmp_path / "model.pt", {"ok": FOUR, "bomb": torch.zeros(1).expand(2**40)}, zipped)
    assert path.stat().st_size < 3000
    said = "view larger than its storage", "bomb", str(2**40), "4 bytes"
    with refused("PICKLE-VIEW", 4, str(path), *said), peak_below(50):
        open_weights(path)


@FORMS
def test_b4_expanded_in_one_dimension_is_refused(tmp_path, refused, zipped):
    path = saved(tmp_path / "model.pt", {"bomb": torch.zeros(1, 8).expand(2**30, 8)}, zipped)
    with refused("PICKLE-VIEW", 4, str(path), "bomb"):
        read_all(path)


def test_b4_huge_declared_storage_is_refused(checkpoint, refused):
    path = checkpoint(ok=tensor(key="0"), bomb=tensor((2**40,), numel=2**40, key="1"))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/1", bytes(16))
    said = "bomb", f"expected  {4 * 2**40} bytes", "found     16 bytes"
    with refused("PICKLE-STORAGE", 4, str(path), *said), peak_below(50):
        open_weights(path)


def test_b4_huge_declared_legacy_storage_is_truncated(tmp_path, refused):
    data = saved_bytes({"bomb": torch.arange(7.0)}, zipped=False)
    path = tmp_path / "model.pt"
    path.write_bytes(data.replace(b"K\x07N", b"\x8a\x05\0\0\0\0\x04N"))
    with refused("FILE-TRUNCATED", 3, str(path), f"needs {4 * 2**34} bytes"), peak_below(50):
        open_weights(path)


VIEWS = {
    "offset beyond the end": {"offset": 1},
    "offset far beyond the end": {"offset": 2**62},
    "offset before the start": {"offset": -1},
    "too many elements": {"shape": (5,)},
    "stride too long": {"stride": (2,)},
    "stride of nothing": {"shape": (5,), "stride": (0,)},
    "rows that repeat": {"shape": (4, 4), "stride": (0, 1)},
    "rows beyond the end": {"shape": (2, 2), "stride": (3, 1)},
    "negative stride": {"stride": (-1,), "offset": 3},
    "negative size": {"shape": (-4,)},
    "negative sizes": {"shape": (-2, -2), "stride": (2, 1)},
    "product that wraps": {"shape": (2**32, 2**32), "stride": (0, 0)},
}
WILD = {
    "offset that wraps": {"offset": 2**64 - 1},
    "stride that wraps": {"stride": (2**64,)},
    "stride too large to use": {"shape": (1,), "stride": (2**64,)},
    "size too large to use": {"shape": (0, 2**64), "stride": (1, 1)},
    "offset of many digits": {"offset": 1 << 20_000},
    "size of many digits": {"shape": (1 << 20_000,)},
    "stride of many digits": {"stride": (1 << 20_000,)},
}


@pytest.mark.parametrize("kind", VIEWS)
def test_b5_views_outside_of_their_storage_are_refused(checkpoint, refused, kind):
    path = checkpoint(ok=tensor(), bad=tensor(**VIEWS[kind]))
    said = "view larger than its storage", "key       bad", "storage of 16 bytes"
    with refused("PICKLE-VIEW", 4, str(path), *said):
        read_all(path)


@pytest.mark.parametrize("kind", WILD)
def test_b5_views_of_numbers_no_tensor_can_have_are_refused(checkpoint, kind):
    path = checkpoint(ok=tensor(), bad=tensor(**WILD[kind]))
    with pytest.raises(AnisoError) as caught:
        read_all(path)
    assert caught.value.code in ("PICKLE-VIEW", "PICKLE-MALFORMED"), str(caught.value)
    assert caught.value.exit_code == 4 and str(path) in str(caught.value)


@pytest.mark.parametrize("shape", [(0, 2**62), (2**40, 0, 2), (2**31, 2**31, 0)], ids=str)
def test_b5_sizes_beside_a_zero_are_limited(checkpoint, refused, shape):
    path = checkpoint(ok=tensor(), bad=tensor(shape, (1,) * len(shape)))
    with refused("PICKLE-VIEW", 4, str(path), "bad", str(max(shape))):
        read_all(path)


@pytest.mark.parametrize("key", [number(1 << 20_000), number(2**61 - 1), b"G" + bytes(8), b"K\1)\x86"])
def test_b5_tensors_under_keys_that_are_no_names_are_left_out(tmp_path, key):
    body = b"}(" + text("w") + tensor() + key + tensor() + b"u"
    source, tensors = read_all(save(tmp_path / "model.pt", program(body)))
    same_bits(tensors, {"w": FOUR})
    assert any("not tensors, left out" in note for note in source.info.notes)


UNNAMED = {
    "empty": (b"", "empty"),
    "half a pair": (b"a\xed\xa0\x80", r"a\ud800"),
    "long": (b"n" * 65537, "65537"),
}


@pytest.mark.parametrize("kind", UNNAMED)
def test_b5_names_that_are_no_text_are_refused(tmp_path, refused, kind):
    raw, shown = UNNAMED[kind]
    body = b"}(" + text("w") + tensor() + b"X" + struct.pack("<I", len(raw)) + raw + tensor() + b"u"
    path = save(tmp_path / "model.pt", program(body))
    with refused("WEIGHT-LABEL", 4, str(path), shown):
        read_all(path)


STORAGES = {
    "one element short": ({"numel": 5}, 20),
    "one element long": ({"numel": 3, "shape": (3,)}, 12),
    "other type": ({"kind": "DoubleStorage", "shape": (2,)}, 32),
    "narrow type": ({"kind": "ByteStorage"}, 4),
    "bytes": ({"kind": "UntypedStorage"}, 4),
    "negative": ({"numel": -4}, -16),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_b5_storage_of_another_size_is_refused(checkpoint, refused, kind):
    wrong, declared = STORAGES[kind]
    view = tensor(**wrong)
    if kind == "bytes":  # only the newest form of tensor has its type beside an untyped storage
        last = call("collections", "OrderedDict"), name("torch", "float32")
        first = storage(**wrong), number(0), numbers([1]), numbers([1]), b"\x89"
        view = call("torch._utils", "_rebuild_tensor_v3", *first, *last)
    path = checkpoint(bad=view)
    said = "key       bad", f"{declared} bytes", "16 bytes"
    with refused("PICKLE-STORAGE", 4, str(path), *said):
        read_all(path)


def test_b5_storage_size_of_many_digits_is_refused(checkpoint):
    path = checkpoint(bad=tensor(numel=1 << 20_000))
    with pytest.raises(AnisoError) as caught:
        read_all(path)
    assert caught.value.exit_code == 4


def test_b5_storage_declared_twice_differently_is_refused(checkpoint, refused):
    path = checkpoint(a=tensor(), b=tensor((2,), kind="DoubleStorage", numel=2))
    with refused("PICKLE-MALFORMED", 4, str(path), "declared twice"):
        read_all(path)


def test_b5_storage_that_is_not_there_is_named(checkpoint, refused):
    path = checkpoint(ok=tensor(), bad=tensor(key="7"))
    with refused("FILE-TRUNCATED", 3, str(path), "bad", "lacks the data"):
        read_all(path)


@pytest.mark.parametrize(
    "shape", [b"N", numbers([2, 2]), b"K\4", b"]\x88a", text("4"), b"]" + text("4") + b"a"]
)
def test_b5_tensor_of_nonsense_is_named(checkpoint, refused, shape):
    bad = call("torch._utils", "_rebuild_tensor_v2", storage(), b"K\0", shape, numbers([1]), b"\x89", b"}")
    path = checkpoint(ok=tensor(), bad=bad)
    with refused("PICKLE-UNSUPPORTED", 3, str(path), "bad"):
        read_all(path)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (b"K\x07\x85", b"K\x08\x85", "PICKLE-VIEW"),
        (b"K\x00K\x07", b"K\x01K\x07", "PICKLE-VIEW"),
        (b"FloatStorage", b"DoubleStorage", "PICKLE-STORAGE"),
        (b"FloatStorage", b"HalfStorage", "PICKLE-STORAGE"),
    ],
)
def test_b5_real_checkpoint_patched(tmp_path, refused, old, new, code):
    path = saved(tmp_path / "model.pt", {"visual.proj": torch.arange(7.0)})
    read_all(path)
    before = path.read_bytes()
    patched(path, data_pkl=lambda data: data.replace(old, new))
    assert path.read_bytes() != before
    with refused(code, 4, str(path), "visual.proj"):
        read_all(path)


def test_b5_legacy_storage_of_another_size_is_refused(tmp_path, refused):
    data = saved_bytes({"w": torch.arange(7.0)}, zipped=False)
    path = tmp_path / "model.pt"
    at = data.rindex(struct.pack("<q", 7))
    path.write_bytes(data[:at] + struct.pack("<q", 6) + data[at + 8 :])
    with refused("PICKLE-STORAGE", 4, str(path), "expected  7", "found     6"):
        read_all(path)


def test_b5_legacy_storages_must_be_listed_once_and_used(tmp_path, refused):
    data = saved_bytes({"w": torch.arange(7.0)}, zipped=False)
    path = tmp_path / "model.pt"
    at = data.rindex(struct.pack("<q", 7))
    end = data.rindex(b"a.", 0, at)  # the list of keys ends here
    key = data[data.rindex(b"X", 0, end) : end]
    path.write_bytes(data[:end] + b"a" + key + b"a." + data[at:] + data[at:])
    with refused("PICKLE-MALFORMED", 4, str(path), "listed"):
        read_all(path)


# B6: archives


def archive(*entries, shift=0, comment=b""):
    """A zip file byte by byte; an entry is a name, its data, and what is to be wrong with it."""
    body, directory = b"", b""
    for entry, data, wrong in entries:
        crc = wrong.get("crc", zlib.crc32(data))
        flags, method = wrong.get("flags", 0), wrong.get("method", 0)
        kept = wrong.get("kept", data)
        sizes = crc, len(kept), len(data)
        where = wrong.get("offset", len(body))
        local = wrong.get("local", entry).encode()
        if "offset" not in wrong:
            begin = wrong.get("begin", b"PK\3\4")
            head = struct.pack("<4s5H3I2H", begin, 20, flags, method, 0, 0, *sizes, len(local), 0)
            body += head + local + kept
        place = len(entry), 0, 0, 0, 0, 0, where
        head = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, flags, method, 0, 0, *sizes, *place)
        directory += head + entry.encode()
    count, at = len(entries), len(body) + shift
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), at, len(comment))
    return body + directory + end + comment


PKL = ("archive/data.pkl", program(mapping(w=tensor())), {})
DATA = ("archive/data/0", FOUR.numpy().tobytes(), {})


def test_b6_the_archives_written_here_are_read(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(PKL, DATA))
    _, tensors = read_all(path)
    same_bits(tensors, {"w": FOUR})
    with zipfile.ZipFile(path) as reread:
        assert reread.testzip() is None


def entry_with(entry, **wrong):
    return entry[0], entry[1], wrong


def record(entry):
    return archive(entry)[: 30 + len(entry[0]) + len(entry[1])]


OTHER = ("archive/data/1", b"x", {})
INSIDE = len(record(PKL)) + len(record(DATA)) + 30 + len("archive/x")
ARCHIVES = {
    "encrypted storage": (archive(PKL, entry_with(DATA, flags=1)), "encrypted", "data/0"),
    "encrypted pickle": (archive(entry_with(PKL, flags=1), DATA), "encrypted", "data.pkl"),
    "two pickles of one name": (archive(PKL, PKL, DATA), "two entries", "data.pkl"),
    "two storages of one name": (archive(PKL, DATA, DATA), "two entries", "data/0"),
    "parent": (archive(PKL, DATA, ("archive/../../x", b"x", {})), "leaves", "../x"),
    "absolute": (archive(PKL, DATA, ("/etc/x", b"x", {})), "leaves", "/etc/x"),
    "backslash": (archive(PKL, DATA, ("archive\\x", b"x", {})), "leaves", "archive"),
    "other local name": (archive(entry_with(PKL, local="archive/data.pkk"), DATA), "two names", "data.pkl"),
    "longer local name": (archive(PKL, entry_with(DATA, local="archive/data/01")), "two names", "data/0"),
    "inside another": (
        archive(PKL, DATA, ("archive/x", record(OTHER), {}), (*OTHER[:2], {"offset": INSIDE})),
        "overlap",
        "data/1",
    ),
    "offset beyond the end": (archive(PKL, DATA, (*OTHER[:2], {"offset": 1 << 20})), "outside", "data/1"),
    "offset at no entry": (archive(PKL, DATA, (*OTHER[:2], {"offset": 3})), "outside", "data/1"),
    "no entry where one should be": (archive(PKL, entry_with(DATA, begin=b"PK\3\5")), "outside", "data/0"),
    "compressed in name only": (archive(PKL, entry_with(DATA, method=8)), "compressed", "data/0"),
    "offset before the start": (archive(PKL, DATA, shift=1000), "", ""),
    "comment": (archive(PKL, DATA, comment=b"<html>"), "comment", ""),
    "behind another archive": (record(OTHER) + archive(PKL, DATA), "overlap", ""),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_b6_archives_torch_never_writes_are_refused(tmp_path, refused, kind):
    data, found, entry = ARCHIVES[kind]
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with refused("ZIP-UNSAFE", 4, str(path), found, entry):
        read_all(path)


@pytest.mark.parametrize("which", [PKL, DATA], ids=["pickle", "storage"])
def test_b6_compressed_entries_are_refused_before_they_grow(tmp_path, refused, which):
    path = tmp_path / "model.pt"
    bomb = bytes(200 << 20)
    with zipfile.ZipFile(path, "w") as out:
        for entry in (PKL, DATA):
            method = zipfile.ZIP_DEFLATED if entry is which else zipfile.ZIP_STORED
            out.writestr(entry[0], bomb if entry is which else entry[1], method, compresslevel=1)
    assert path.stat().st_size < 2 << 20
    with refused("ZIP-UNSAFE", 4, str(path), "compressed", which[0]), peak_below(50):
        open_weights(path)


def test_b6_entry_with_two_sizes_is_refused(tmp_path, refused):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(PKL, entry_with(DATA, kept=DATA[1][:8])))
    with refused("ZIP-UNSAFE", 4, str(path), "data/0"):
        read_all(path)


def test_b6_two_pickles_are_refused(tmp_path, refused):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(PKL, DATA, ("other/data.pkl", PKL[1], {})))
    with refused("ZIP-UNSAFE", 4, str(path), "other/data.pkl"):
        read_all(path)


def test_b6_archive_without_a_pickle_is_not_a_checkpoint(tmp_path, refused):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(("word/document.xml", b"<x/>", {})))
    with refused("FILE-FORMAT", 3, str(path), "word/document.xml"):
        read_all(path)


def test_b6_marker_of_spanned_archives_in_front_is_refused(tmp_path, refused):
    path = tmp_path / "model.pt"
    path.write_bytes(b"PK\7\x08" + archive(PKL, DATA))
    assert zipfile.is_zipfile(path)
    with pytest.raises(AnisoError) as caught:
        read_all(path)
    assert caught.value.exit_code == 4 and str(path) in str(caught.value)


@pytest.mark.parametrize("which", ["pickle", "storage"])
def test_b6_wrong_checksum_is_found(tmp_path, refused, which):
    wrong = [
        entry_with(e, crc=zlib.crc32(e[1]) ^ 1) if n == which else e
        for n, e in (("pickle", PKL), ("storage", DATA))
    ]
    path = tmp_path / "model.pt"
    path.write_bytes(archive(*wrong))
    key = "data.pkl" if which == "pickle" else "key       w"
    with refused("ZIP-CRC", 3, str(path), "damaged", key):
        read_all(path)


@pytest.mark.parametrize("bit", [0, 7])
def test_b6_one_flipped_bit_in_a_storage_is_found(tmp_path, refused, bit):
    path = saved(tmp_path / "model.pt", {"a": torch.ones(3), "b": torch.arange(9.0)})
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<9f", *range(9))) + 20] ^= 1 << bit
    path.write_bytes(data)
    source = open_weights(path)
    assert source.read("a").tolist() == [1, 1, 1]
    with refused("ZIP-CRC", 3, str(path), "key       b"):
        read_all(path)


def test_b6_flipped_bit_is_found_whichever_view_is_read(tmp_path, refused):
    whole = torch.arange(64.0)
    path = saved(tmp_path / "model.pt", {"head": whole[:2], "tail": whole[60:]})
    data = bytearray(path.read_bytes())
    data[data.index(whole.numpy().tobytes()) + 128] ^= 1
    path.write_bytes(data)
    for key in ("head", "tail", "head"):
        with refused("ZIP-CRC", 3, str(path), key):
            open_weights(path).read(key)


# B7: other containers


@FORMS
def test_b7_state_dicts_of_both_forms_are_read(tmp_path, zipped):
    expected = Tiny().state_dict()
    source, tensors = read_all(saved(tmp_path / "model.pt", expected, zipped))
    assert source.info.format == ("torch zip" if zipped else "torch legacy")
    same_bits(tensors, expected)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_b7_legacy_files_of_any_protocol_are_read(tmp_path, protocol):
    path = tmp_path / "model.pt"
    expected = Tiny().state_dict()
    torch.save(expected, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
    same_bits(read_all(path)[1], expected)


@pytest.mark.parametrize("compiled", ["script", "trace"])
def test_b7_torchscript_is_refused_as_such(tmp_path, refused, compiled):
    path = tmp_path / "model.pt"
    layer = nn.Linear(2, 2)
    made = torch.jit.script(layer) if compiled == "script" else torch.jit.trace(layer, torch.ones(1, 2))
    torch.jit.save(made, path)
    with refused("TORCHSCRIPT", 3, str(path), "TorchScript", "torch.jit.load", "state_dict"):
        read_all(path)


def test_b7_tar_checkpoint_says_what_to_do(tmp_path, refused):
    path = tmp_path / "model.pt"
    with tarfile.open(path, "w") as archive:
        for member in ("sys_info", "pickle", "tensors", "storages"):
            info = tarfile.TarInfo(member)
            info.size = 16
            archive.addfile(info, io.BytesIO(bytes(16)))
    with refused("FILE-FORMAT", 3, str(path), "safetensors", "torch.save"):
        read_all(path)


@pytest.mark.parametrize("protocol", range(6))
def test_b7_plain_pickle_of_tensors_is_named(tmp_path, refused, protocol):
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"visual.proj": FOUR}, protocol))
    with refused("PICKLE-UNSUPPORTED", 3, str(path), "visual.proj", "safetensors"):
        read_all(path)


def test_b7_big_endian_file_is_refused(tmp_path, refused):
    path = saved(tmp_path / "model.pt", {"w": FOUR})
    patched(path, byteorder=lambda data: b"big")
    with refused("PICKLE-UNSUPPORTED", 3, str(path), "big-endian"):
        read_all(path)


# B8: wrappers

SGD = {"state": {0: {"momentum_buffer": FOUR}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
WRAPPED = {
    "state_dict": ({"state_dict": {"w": FOUR}, "epoch": 3}, "entry 'state_dict'"),
    "model": ({"model": {"w": FOUR}, "args": argparse.Namespace(lr=1)}, "entry 'model'"),
    "twice": ({"checkpoint": {"model": {"w": FOUR}}, "args": None}, "entry 'checkpoint'"),
    "optimizer": ({"net": {"w": FOUR}, "optimizer": {"m": {"w": FOUR}}}, "entry 'net'"),
    "real optimizer": ({"net": {"w": FOUR}, "optim_state": SGD}, "entry 'net'"),
    "scheduler": ({"net": {"w": FOUR}, "scheduler": {"w": FOUR}, "scaler": {"w": FOUR}}, "entry 'net'"),
    "module.": ({"module.w": FOUR}, "prefix 'module.' removed"),
    "_orig_mod.": ({"_orig_mod.w": FOUR}, "prefix '_orig_mod.' removed"),
    "both prefixes": ({"module._orig_mod.w": FOUR}, "prefix '_orig_mod.' removed"),
    "prefix in a wrapper": ({"state_dict": {"module.w": FOUR}}, "prefix 'module.' removed"),
    "numbers beside": ({"w": FOUR, "epoch": 3, "note": "x"}, "left out: epoch, note"),
}


@FORMS
@pytest.mark.parametrize("kind", WRAPPED)
def test_b8_wrapped_weights_are_found_and_the_rule_is_told(tmp_path, kind, zipped):
    value, rule = WRAPPED[kind]
    source, tensors = read_all(saved(tmp_path / "model.pt", value, zipped))
    same_bits(tensors, {"w": FOUR})
    assert any(rule in note for note in source.info.notes), source.info.notes


def test_b8_what_was_left_out_is_told(tmp_path):
    value = {"epoch": 3, "model": {"w": FOUR}, "optimizer": SGD, "args": argparse.Namespace(lr=1)}
    source, _ = read_all(saved(tmp_path / "model.pt", value))
    assert "entries left out: epoch, optimizer, args" in source.info.notes


def test_b8_prefix_of_some_names_only_is_kept(tmp_path):
    value = {"module.w": FOUR, "head.w": FOUR + 1}
    source, tensors = read_all(saved(tmp_path / "model.pt", value))
    same_bits(tensors, value)
    assert not any("prefix" in note for note in source.info.notes)


def test_b8_two_sets_of_weights_are_listed(tmp_path, refused):
    value = {"model": {"w": FOUR}, "ema": {"w": FOUR + 1}, "epoch": 3}
    path = saved(tmp_path / "model.pt", value)
    with refused("CKPT-AMBIGUOUS", 3, str(path), "model, ema", f"{path}::model"):
        read_all(path)
    assert read_all(f"{path}::ema")[1]["w"].tolist() == [2, 3, 4, 5]


def test_b8_weights_beside_weights_are_ambiguous(tmp_path, refused):
    path = saved(tmp_path / "model.pt", {"logit_scale": FOUR, "visual": {"w": FOUR}})
    with refused("CKPT-AMBIGUOUS", 3, str(path), "visual"):
        read_all(path)


@pytest.mark.parametrize("value", [{}, [], 3, {"epoch": 3}, [FOUR], {"optimizer": SGD}], ids=str)
def test_b8_no_weights_at_all_is_said(tmp_path, refused, value):
    path = saved(tmp_path / "model.pt", value)
    with refused("CKPT-NONE", 3, str(path), "no model weights"):
        read_all(path)


def test_b8_missing_entry_lists_those_there_are(tmp_path, refused):
    path = saved(tmp_path / "model.pt", {"model": {"w": FOUR}, "epoch": 3})
    with refused("CKPT-NONE", 3, str(path), "no entry 'ema'", "model, epoch"):
        read_all(f"{path}::ema")


# B9: cut, moved and unusual


def test_b9_archive_cut_anywhere_is_called_truncated(tmp_path):
    data = saved_bytes({"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(3)})
    path = tmp_path / "model.pt"
    for left in range(8, len(data), 7):
        path.write_bytes(data[:left])
        with pytest.raises(AnisoError) as caught:
            read_all(path)
        assert (caught.value.code, caught.value.exit_code) == ("FILE-TRUNCATED", 3), left
        assert "truncated" in str(caught.value) and str(path) in str(caught.value)


def test_b9_legacy_file_cut_anywhere_is_called_truncated(tmp_path):
    data = saved_bytes({"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(3)}, zipped=False)
    path = tmp_path / "model.pt"
    for left in range(8, len(data)):
        path.write_bytes(data[:left])
        with pytest.raises(AnisoError) as caught:
            read_all(path)
        assert (caught.value.code, caught.value.exit_code) == ("FILE-TRUNCATED", 3), left


@FORMS
def test_b9_storages_of_a_gpu_are_read_to_memory(tmp_path, monkeypatch, zipped):
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:3")
    path = saved(tmp_path / "model.pt", {"w": FOUR}, zipped)
    monkeypatch.undo()
    assert b"cuda:3" in path.read_bytes()
    _, tensors = read_all(path)
    same_bits(tensors, {"w": FOUR})
    assert tensors["w"].device.type == "cpu"


def test_b9_storage_types_of_a_gpu_are_read_to_memory(tmp_path):
    path = saved(tmp_path / "model.pt", {"w": FOUR})
    patched(path, data_pkl=lambda data: data.replace(b"ctorch\nFloat", b"ctorch.cuda\nFloat"))
    same_bits(read_all(path)[1], {"w": FOUR})


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b9_half_precision_is_read_bit_for_bit(tmp_path, dtype, zipped):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    path = saved(tmp_path / "model.pt", {"w": every}, zipped)
    same_bits(read_all(path)[1], {"w": every})


def unusual():
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return {
        "sparse": torch.eye(3).to_sparse(),
        "sparse rows": torch.eye(3).to_sparse_csr(),
        "quantised": quantised,
        "meta": torch.ones(2, device="meta"),
        "complex": torch.ones(2, dtype=torch.complex64),
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
    }


@FORMS
@pytest.mark.parametrize("beside", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("kind", ["sparse", "sparse rows", "quantised", "meta", "complex", "float8"])
def test_b9_tensors_that_are_not_plain_arrays_are_named(tmp_path, refused, kind, beside, zipped):
    value = {"ok": FOUR, "odd.one": unusual()[kind]} if beside else {"odd.one": unusual()[kind]}
    path = saved(tmp_path / "model.pt", value, zipped)
    with refused("PICKLE-UNSUPPORTED", 3, str(path), "odd.one", "safetensors"):
        read_all(path)
