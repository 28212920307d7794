"""The pickle reader against torch and pickle themselves, on files that mean no harm."""

import argparse
import collections
import enum
import io
import pathlib
import pickle
import struct

import pytest
import torch
import torchvision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.transforms import InterpolationMode

from aniso.errors import AnisoError
from aniso.weights import open_weights, save_safetensors
from aniso.weights.dtypes import TORCH
from aniso.weights.pickle import Machine
from aniso.weights.pickle_values import Global, Inert, OddKey, Storage, TensorView

FUZZ = settings(
    deadline=None,
    max_examples=100,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def run(data):
    return Machine().run(io.BytesIO(data))


def saved(path, value, zipped=True):
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def agrees_with_torch(path):
    """Names, order, types, shapes and bits as torch reads them."""
    theirs = torch.load(path, weights_only=False)
    source = open_weights(path)
    assert list(source.tensors) == list(theirs)
    for name, tensor in theirs.items():
        plain = tensor.detach().resolve_neg().as_subclass(torch.Tensor)
        ours = source.read(name)
        assert (ours.dtype, ours.shape) == (plain.dtype, plain.shape), name
        assert source.tensors[name].shape == tuple(plain.shape)
        assert TORCH[source.tensors[name].dtype] == plain.dtype
        expected = plain.clone(memory_format=torch.contiguous_format)
        assert ours.stride() == expected.stride() and not ours.requires_grad, name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours, expected))), name
    return source


# torch itself cannot read wide unsigned integers back from its legacy form
WIDE = {torch.uint16, torch.uint32, torch.uint64}
DTYPES = [(d, zipped) for d in TORCH.values() for zipped in (True, False) if zipped or d not in WIDE]


@pytest.mark.parametrize(("dtype", "zipped"), DTYPES, ids=str)
def test_every_dtype_is_read_as_torch_reads_it(tmp_path, dtype, zipped):
    values = torch.tensor([[0, 1, 2], [3, 4, 250]]).to(dtype)
    agrees_with_torch(saved(tmp_path / "f", {"w": values, "one": values[1, 1], "b": values[1]}, zipped))


@FORMS
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1, 1, 2), (7, 5)], ids=str)
def test_every_shape_is_read_as_torch_reads_it(tmp_path, shape, zipped):
    agrees_with_torch(saved(tmp_path / "f", {"w": torch.randn(shape)}, zipped))


BASE = torch.arange(120.0).reshape(2, 3, 4, 5)
VIEWS = {
    "transposed": BASE.permute(3, 1, 0, 2),
    "sliced": BASE[1, :, 1:3, ::2],
    "last element": BASE[-1, -1, -1, -1],
    "nothing at the end": BASE.reshape(-1)[120:],
    "diagonal": BASE[0, 0, :, :4].diagonal(),
    "windows": BASE.reshape(-1).as_strided((30, 4), (3, 1)),
    "few repeated": BASE[0, 0, 0, :1].expand(9),
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "column": BASE.reshape(12, 10)[:, 3],
    "one in steps": BASE.reshape(-1)[:2:2],
    "nothing in steps": BASE.reshape(-1)[:0:2],
    "nothing beyond the end": BASE.reshape(12, 10)[12:, 10:],
}


@FORMS
@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_read_as_torch_reads_them(tmp_path, kind, zipped):
    path = saved(tmp_path / "f", {"view": VIEWS[kind], "base": BASE}, zipped)
    agrees_with_torch(path)
    source = open_weights(path)
    assert torch.equal(source.read("base"), BASE)  # in the other order, too
    assert torch.equal(source.read("view"), VIEWS[kind])
    save_safetensors(tmp_path / "again", {"view": source.read("view")})
    assert torch.equal(open_weights(tmp_path / "again").read("view"), VIEWS[kind])


@st.composite
def views(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.uint8]))
    base = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    view = base
    for axis, size in enumerate(shape):
        start = draw(st.integers(0, size))
        stop = draw(st.integers(start, size))
        view = view[(slice(None),) * axis + (slice(start, stop, draw(st.integers(1, 3))),)]
    return {"base": base, "view": view.permute(draw(st.permutations(range(len(shape)))))}


@FUZZ
@given(tensors=views(), zipped=st.booleans())
def test_random_views_are_read_as_torch_reads_them(tmp_path, tensors, zipped):
    agrees_with_torch(saved(tmp_path / "f", tensors, zipped))


class Named(torch.Tensor):
    pass


def with_attribute(tensor):
    tensor.note = {"any": ["thing"]}
    return tensor


KINDS = {
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "frozen parameter": lambda: nn.Parameter(torch.arange(3), requires_grad=False),
    "parameter with attributes": lambda: with_attribute(nn.Parameter(torch.randn(3))),
    "tensor with attributes": lambda: with_attribute(torch.randn(3)),
    "buffer": lambda: nn.Buffer(torch.randn(3)),
    "subclass": lambda: torch.randn(3).as_subclass(Named),
    "subclass with attributes": lambda: with_attribute(torch.randn(3).as_subclass(Named)),
    "leaf with gradient": lambda: torch.randn(3, requires_grad=True),
}


@FORMS
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tensor_are_read_as_torch_reads_them(tmp_path, kind, zipped):
    source = agrees_with_torch(saved(tmp_path / "f", {"w": KINDS[kind]()}, zipped))
    assert source.info.pickle.calls == ()


@FORMS
def test_lazily_negated_tensor_never_has_the_wrong_sign(tmp_path, zipped):
    value = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert value.is_neg()
    path = saved(tmp_path / "f", {"ok": torch.ones(1), "w": value}, zipped)
    try:
        found = open_weights(path).read("w")
    except AnisoError as e:
        assert e.code == "PICKLE-UNSUPPORTED" and e.facts["key"] == "w"
    else:
        assert found.tolist() == [-2, 4]


@FORMS
def test_state_dict_of_a_model_is_read_as_torch_reads_it(tmp_path, zipped):
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.MultiheadAttention(4, 2))
    source = agrees_with_torch(saved(tmp_path / "f", model.state_dict(), zipped))
    assert source.info.pickle.classes == () and source.info.notes == ()


@FORMS
def test_tied_tensors_are_aliases_of_the_first(tmp_path, zipped):
    tied = nn.Parameter(torch.randn(4, 3))
    tensors = {"embed": tied, "equal": tied.detach().clone(), "head": tied, "part": tied[:2], "t": tied.T}
    source = agrees_with_torch(saved(tmp_path / "f", tensors, zipped))
    assert source.aliases == {"head": "embed"}


@FORMS
def test_each_read_is_a_fresh_tensor(tmp_path, zipped):
    source = open_weights(saved(tmp_path / "f", {"w": torch.ones(3)}, zipped))
    source.read("w").zero_()
    assert source.read("w").tolist() == [1, 1, 1]


# Values without tensors

plain = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.integers(-(2**2100), 2**2100), st.text()),
        *(st.floats(allow_nan=False), st.integers(0, 70_000)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(-999_999, 999_999), st.none()), inner, max_size=5),
    ),
    max_leaves=20,
)


@FUZZ
@given(value=plain, protocol=st.integers(0, 5))
def test_plain_values_are_what_pickle_makes_of_them(value, protocol):
    assert run(pickle.dumps(value, protocol)) == value


@FUZZ
@given(value=st.one_of(st.binary(), st.binary().map(bytearray)), protocol=st.just(5))
def test_bytes_are_what_pickle_makes_of_them(value, protocol):
    assert run(pickle.dumps([value], protocol)) == [value]


@pytest.mark.parametrize("protocol", range(6))
def test_long_containers_are_what_pickle_makes_of_them(protocol):
    value = {"list": list(range(3000)), **{str(i): i for i in range(3000)}, "text": "x" * 70_000}
    assert run(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_shared_and_circular_values_stay_so(protocol):
    inner = {}
    value = [inner, inner]
    value.append(value)
    ours = run(pickle.dumps(value, protocol))
    assert ours[0] is ours[1] and ours[2] is ours


def test_the_stream_is_left_behind_the_pickle():
    stream = io.BytesIO(pickle.dumps(1) + pickle.dumps("two") + b"rest")
    machine = Machine()
    assert machine.run(stream) == 1
    assert machine.run(stream) == "two"
    assert stream.read() == b"rest"


@pytest.mark.parametrize("protocol", range(6))
def test_sets_are_recorded(protocol):
    found = run(pickle.dumps({7}, protocol))
    assert isinstance(found, Inert) and found.name.endswith("set")
    assert found.items == [7] or found.args == ([7],)


class Thing:
    def __init__(self):
        self.x = [1, 2]


class Colour(enum.Enum):
    RED = "red"


class Listed(list):
    pass


class Mapped(dict):
    pass


@pytest.mark.parametrize("protocol", range(6))
def test_objects_are_recorded_with_their_state(protocol):
    machine = Machine()
    found = machine.run(io.BytesIO(pickle.dumps(Thing(), protocol)))
    assert isinstance(found, Inert) and found.name == f"{__name__}.Thing"
    assert found.state == {"x": [1, 2]}
    assert machine.report.classes == (f"{__name__}.Thing",)
    assert machine.report.calls == (f"{__name__}.Thing.__setstate__",)  # which no one can know to be harmless


@pytest.mark.parametrize("protocol", range(2, 6))
def test_items_of_objects_are_recorded(protocol):
    listed = run(pickle.dumps(Listed([1, 2]), protocol))
    mapped = run(pickle.dumps(Mapped(a=1), protocol))
    assert listed.items == [1, 2] and mapped.mapping == {"a": 1}


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(a=1),
        pathlib.Path("a/b"),
        torch.float32,
        torch.device("cpu"),
        torch.Size([1, 2]),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1]),
        frozenset([1]),
        b"bytes",
        complex(1, 2),
        range(3),
        slice(1, 2),
        InterpolationMode.BICUBIC,
        torchvision.transforms.Compose([torchvision.transforms.ToTensor()]),
        nn.functional.relu,
        torch.optim.SGD,
        torch.tensor(1.5).numpy(),
        torch.tensor(1.5).numpy()[()],
        torch.Generator,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_checkpoints_hold_beside_weights_is_not_called_a_call(tmp_path, value):
    for protocol in range(2, 6):
        path = tmp_path / "f"
        content = {"model": {"w": torch.ones(2)}, "extra": value}
        torch.save(content, path, pickle_protocol=protocol)
        source = open_weights(path)
        assert source.info.pickle.calls == () and list(source.tensors) == ["w"]


def test_other_enumerations_are_called_and_so_a_call():
    machine = Machine()
    machine.run(io.BytesIO(pickle.dumps(Colour.RED, 2)))
    assert machine.report.calls == (f"{__name__}.Colour",)


@pytest.mark.parametrize(
    "key", [2**20, -(2**61), 1 << 20_000, 1.5, (1, 2)], ids=["20", "61", "long", "float", "pair"]
)
def test_keys_that_could_be_made_to_collide_are_not_hashed(key):
    found = run(pickle.dumps({key: "a", "b": "c"}, 2))
    odd, plain = found
    assert isinstance(odd, OddKey) and plain == "b" and list(found.values()) == ["a", "c"]


def test_ordered_dictionaries_are_dictionaries_in_order():
    value = collections.OrderedDict(b=1, a=2)
    for protocol in range(6):
        assert list(run(pickle.dumps(value, protocol)).items()) == [("b", 1), ("a", 2)]
    given_pairs = b"ccollections\nOrderedDict\n(](X\1\0\0\0b" + b"K\1\x86X\1\0\0\0aK\2\x86etR."
    assert run(given_pairs) == {"b": 1, "a": 2}


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


MEMBER = b"cbuiltins\ngetattr\n"


def test_member_of_an_enumeration_by_getattr_is_a_name():
    machine = Machine()
    data = MEMBER + b"ctorchvision.transforms.functional\nInterpolationMode\n" + text("BICUBIC")
    found = machine.run(io.BytesIO(data + b"\x86R."))
    assert found == Global("torchvision.transforms.functional.InterpolationMode.BICUBIC")
    assert machine.report.calls == ()


@pytest.mark.parametrize(
    ("module", "owner", "member"),
    [("torch", "hub", "load"), ("lib", "Class", "__subclasses__"), ("builtins", "object", "x"),
     ("subprocess", "Popen", "wait"), ("collections", "OrderedDict", "fromkeys")],
)  # fmt: skip
def test_getattr_of_anything_else_is_a_call(module, owner, member):
    machine = Machine()
    machine.run(io.BytesIO(MEMBER + f"c{module}\n{owner}\n".encode() + text(member) + b"\x86R."))
    assert machine.report.calls == ("builtins.getattr",)


def test_method_found_by_getattr_is_a_call_once_it_is_called():
    machine = Machine()
    data = MEMBER + b"clib\nClass\n" + text("run") + b"\x86R)R."
    machine.run(io.BytesIO(data))
    assert machine.report.calls == ("lib.Class.run",)


def test_calls_and_classes_are_listed_once_in_order():
    machine = Machine()
    data = b"(cb\nrun\n)Rca\nrun\n)Rcb\nrun\n)Rclib\nC\n)Rclib\nC\n)Rt."
    machine.run(io.BytesIO(data))
    assert machine.report.calls == ("b.run", "a.run", "lib.C")
    assert machine.report.classes == ("b.run", "a.run", "lib.C")


def test_naming_a_function_is_not_calling_it():
    machine = Machine()
    assert machine.run(io.BytesIO(b"cposix\nsystem\n.")) == Global("posix.system")
    assert machine.report.calls == () and machine.report.classes == ("posix.system",)


def storage(key="0", numel=b"K\4"):
    return b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + numel + b"tQ"


def test_storages_are_shared_by_the_pickles_of_one_machine(refused):
    machine = Machine()
    assert machine.run(io.BytesIO(storage() + b".")) == Storage("0", "F32", 4)
    machine.run(io.BytesIO(storage() + b"."))
    with refused("PICKLE-MALFORMED", 4, "declared twice"):
        machine.run(io.BytesIO(storage(numel=b"K\5") + b"."))


@pytest.mark.parametrize(
    ("shape", "stride", "span"),
    [
        ((), (), 1),
        ((0,), (1,), 0),
        ((2, 0), (9, 9), 0),
        ((4,), (1,), 4),
        ((4,), (3,), 10),
        ((2, 3), (3, 1), 6),
    ],
)
def test_span_reaches_from_the_first_element_to_the_last(shape, stride, span):
    assert TensorView(Storage("0", "F32", 99), "F32", 0, shape, stride).span == span
