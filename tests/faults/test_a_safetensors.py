"""Bad safetensors files: each is refused by name and number, or read exactly."""

import contextlib
import hashlib
import io
import json
import os
import socket
import struct
import zipfile

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from watch import FUZZ, no_hang, peak_below, read_all

from aniso.errors import AnisoError
from aniso.weights import SafetensorsFile, open_weights, save_safetensors

WEIGHTS = {"visual.proj": torch.arange(12.0).reshape(3, 4), "visual.bias": torch.arange(4.0)}


@contextlib.contextmanager
def ordinary_user():
    """Permissions do not bind root, so root becomes nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def good():
    return safetensors.torch.save(WEIGHTS)


@pytest.fixture
def file(tmp_path):
    """``file(data)`` is a file of that content."""

    def write(data, name="model.safetensors"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert torch.equal(a[name], b[name])


def test_a0_a_good_file_is_read(file):
    source, tensors = read_all(file(good()))
    assert source.info.format == "safetensors"
    same(tensors, safetensors.torch.load(good()))


def test_a1_empty_file_is_named(file, refused):
    path = file(b"")
    with refused("FILE-EMPTY", 3, str(path), "is empty"):
        read_all(path)


@pytest.mark.parametrize("size", [1, 7])
def test_a1_short_file_says_how_short(file, refused, size):
    path = file(good()[:size])
    with refused("FILE-EMPTY", 3, str(path), f"too short ({size} bytes)"):
        read_all(path)


@pytest.mark.parametrize("where", ["one byte", "half the data", "behind the header", "in the header"])
def test_a2_truncated_file_gives_both_sizes(file, refused, where):
    data = good()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    left = {
        "one byte": len(data) - 1,
        "half the data": (start + len(data)) // 2,
        "behind the header": start,
        "in the header": start - 20,
    }[where]
    expected = start if left < start else len(data)
    path = file(data[:left])
    numbers = f"says {expected} bytes, the file has {left}"
    with refused("FILE-TRUNCATED", 3, str(path), "truncated", numbers, "download it again"):
        read_all(path)


def test_a2_no_cut_is_mistaken_for_malice(file):
    data = good()
    for left in range(8, len(data)):
        with pytest.raises(AnisoError) as caught:
            open_weights(file(data[:left]))
        assert caught.value.exit_code == 3, (left, str(caught.value))


def zip_bytes():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", b"}.")
    return out.getvalue()


@pytest.mark.parametrize("extra", [b"\0", b"<html>hello</html>", zip_bytes()], ids=["1", "html", "zip"])
def test_a3_trailing_bytes_are_counted(file, refused, extra):
    path = file(good() + extra)
    with refused("ST-TRAILING", 4, str(path), f"{len(extra)} extra bytes"):
        read_all(path)


def test_a3_bytes_behind_no_tensors_are_counted(file, refused):
    path = file(raw({}, b"12345"))
    with refused("ST-TRAILING", 4, str(path), "5 extra bytes"):
        read_all(path)


@pytest.mark.parametrize("length", [2**62, 2**64 - 1, 200_000_000, (64 << 20) + 1])
def test_a4_header_length_is_refused_at_once(file, refused, length):
    path = file(raw(b'{"a":', length=length))
    os.truncate(path, 300_000_000)  # sparse: the bytes the length asks for are there
    with refused("ST-HEADER", 4, str(path), f"header of {length} bytes"), peak_below(50):
        open_weights(path)
    assert path.stat().st_size == 300_000_000


def test_a4_header_length_at_the_limit_is_only_truncated(file, refused):
    path = file(raw(b'{"a":', length=64 << 20))
    with refused("FILE-TRUNCATED", 3, str(path)), peak_below(50):
        read_all(path)


@pytest.mark.parametrize("inside", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000])
def test_a4_deeply_nested_header_is_refused(file, refused, inside):
    path = file(raw(b'{"a":' + inside + b"}"))
    with refused("ST-HEADER", 4, str(path), "nested too deeply"), peak_below(50):
        open_weights(path)


def test_a4_no_depth_of_nesting_escapes(file):
    for depth in range(1, 1200, 7):
        path = file(raw(b'{"a":' + b"[" * depth + b"]" * depth + b"}"))
        with pytest.raises(AnisoError) as caught:
            open_weights(path)
        assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "header", [b"{", b"{]", b'{"a"}', b'{"a": NaN}', b'{"\xff": 1}', b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a4_header_that_is_not_json_is_refused(file, refused, header):
    path = file(raw(header))
    with refused("ST-HEADER", 4, str(path), "malformed header"):
        read_all(path)


@pytest.mark.parametrize("metadata", [1, None, ["a"], {"a": 1}, {"a": None}])
def test_a4_metadata_that_is_not_text_is_refused(file, refused, metadata):
    path = file(raw({"__metadata__": metadata}))
    with refused("ST-HEADER", 4, str(path), "metadata"):
        read_all(path)


OFFSETS = {
    "overlap": {"a": entry("U8", [8], 0, 8), "bad": entry("U8", [8], 4, 12)},
    "same range": {"a": entry("U8", [8], 0, 8), "bad": entry("U8", [8], 0, 8)},
    "hole": {"a": entry("U8", [4], 0, 4), "bad": entry("U8", [4], 8, 12)},
    "hole at the front": {"bad": entry("U8", [8], 4, 12)},
    "backwards": {"bad": entry("U8", [4], 8, 4)},
    "negative": {"bad": entry("U8", [4], -4, 0)},
    "too few bytes": {"bad": entry("F32", [2], 0, 4)},
    "too many bytes": {"bad": entry("F32", [2], 0, 12)},
    "scalar too long": {"bad": entry("F32", [], 0, 8)},
    "bytes without elements": {"bad": entry("F32", [0], 0, 4)},
}


@pytest.mark.parametrize("kind", OFFSETS)
def test_a5_inconsistent_offsets_name_the_tensor(file, refused, kind):
    path = file(raw(OFFSETS[kind], bytes(12)))
    begin, end = OFFSETS[kind]["bad"]["data_offsets"]
    with refused("ST-OFFSETS", 4, str(path), "key       bad", "found") as refusal:
        read_all(path)
    numbers = refusal.error.facts["found"]
    assert f"begins at {begin}" in numbers or f"offsets {begin}:{end}" in numbers


def test_a5_order_of_names_does_not_matter(file):
    header = {
        "b": entry("U8", [2], 1, 3),
        "none": entry("U8", [0], 1, 1),
        "a": entry("U8", [1], 0, 1),
    }
    _, tensors = read_all(file(raw(header, b"xyz")))
    assert {name: bytes(t.tolist()) for name, t in tensors.items()} == {
        "b": b"yz",
        "none": b"",
        "a": b"x",
    }


@pytest.mark.parametrize(
    "shape", [[2**62, 4], [2**63], [2**64 + 1], [2**32, 2**32], [-1], [-1, -4], [2**62] * 300]
)
def test_a5_shape_overflow_names_the_tensor(file, refused, shape):
    path = file(raw({"bad": entry("F32", shape, 0, 4)}, bytes(4)))
    with refused("ST-OFFSETS", 4, str(path), "key       bad"):
        read_all(path)


def test_a5_shape_of_very_many_dimensions_is_refused_at_once(file, refused):
    path = file(raw({"bad": entry("F32", [2**62] * 100_000, 0, 4)}, bytes(4)))
    with no_hang(), refused("ST-OFFSETS", 4, str(path), "key       bad"), peak_below(50):
        open_weights(path)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "F32",
        {},
        entry("F99", [1], 0, 4),
        entry(None, [1], 0, 4),
        entry("F32", 1, 0, 4),
        entry("F32", [1.0], 0, 4),
        entry("F32", [True], 0, 4),
        entry("F32", ["1"], 0, 4),
        entry("F32", [1], 0, 4.0),
        entry("F32", [1], "0", "4"),
        entry("F32", [1], None, 4),
        entry("U8", [1], False, True),
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": [1]},
        entry("F32", [1], 0, 4) | {"__reduce__": "x"},
    ],
    ids=str,
)
def test_a5_malformed_entry_names_the_tensor(file, refused, value):
    path = file(raw({"bad": value}, bytes(1 if "U8" in str(value) else 4)))
    with refused("ST-OFFSETS", 4, str(path), "key       bad"):
        read_all(path)


odd = st.one_of(
    st.integers(-(2**65), 2**65),
    st.booleans(),
    st.none(),
    st.floats(0, 9),
    st.sampled_from(["4", []]),
)


@st.composite
def headers(draw):
    """A header that is right but for, perhaps, one or two of its numbers."""
    header, position = {}, 0
    for name in draw(st.lists(st.text(max_size=4), max_size=4, unique=True)):
        dtype, size = draw(st.sampled_from([("F32", 4), ("F16", 2), ("U8", 1), ("I64", 8), ("BOOL", 1)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = size * torch.Size(shape).numel()
        header[name] = entry(dtype, shape, position, position + nbytes)
        position += nbytes
    for name in draw(st.lists(st.sampled_from(sorted(header)), max_size=2)) if header else []:
        numbers = header[name][draw(st.sampled_from(["shape", "data_offsets"]))]
        if numbers:
            where = draw(st.integers(0, len(numbers) - 1))
            near = type(numbers[where]) is int and draw(st.booleans())
            numbers[where] = numbers[where] + draw(st.sampled_from([-1, 1])) if near else draw(odd)
    extra = draw(st.sampled_from([0, 0, 0, -1, 1]))
    return raw(header, bytes(max(0, position + extra)))


@FUZZ
@given(data=headers())
def test_a5_what_is_accepted_the_reference_reader_accepts_too(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    try:
        _, tensors = read_all(path)
    except AnisoError as e:
        assert e.exit_code in (3, 4)
    else:
        same(tensors, safetensors.torch.load(data))


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_a5_damaged_bytes_end_in_our_errors_only(tmp_path, edits):
    data = bytearray(good())
    for position, value in edits:
        data[position % len(data)] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with contextlib.suppress(AnisoError):
        read_all(path)


DUPLICATES = {
    "identical": b'{"twice":%b,"twice":%b}',
    "beside others": b'{"twice":%b,"a":1,"twice":%b}',
    "metadata": b'{"__metadata__":{"twice":"%b","twice":"%b"}}',
    "field": b'{"a":{"twice":%b,"twice":%b}}',
}


@pytest.mark.parametrize("kind", DUPLICATES)
def test_a6_duplicate_keys_are_refused(file, refused, kind):
    value = b"x" if kind == "metadata" else json.dumps(entry("U8", [4], 0, 4)).encode()
    path = file(raw(DUPLICATES[kind] % (value, value), bytes(4)))
    with refused("ST-HEADER", 4, str(path), "'twice' appears twice"):
        read_all(path)


NAMES = ["a\nb", "a\x1b[31mb", "../../escape", "/etc/passwd", "\u202egnp", "n" * 65536]
IMPOSSIBLE = {
    "half a pair": ("a\ud800", "ST-HEADER", r"a\ud800"),
    "the other half": ("\udc00b", "ST-HEADER", r"\udc00b"),
    "empty": ("", "WEIGHT-LABEL", "empty"),
    "too long": ("n" * 65537, "WEIGHT-LABEL", "65537"),
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:12]))
def test_a7_strange_names_are_names_and_nothing_else(file, name):
    source, tensors = read_all(file(raw({name: entry("U8", [2], 0, 2)}, b"\1\2")))
    assert list(source.tensors) == [name]
    assert tensors[name].tolist() == [1, 2]


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a7_names_that_are_no_text_are_refused(file, refused, kind):
    name, code, shown = IMPOSSIBLE[kind]
    path = file(raw({name: entry("U8", [2], 0, 2)}, b"\1\2"))
    with refused(code, 4, str(path), shown):
        read_all(path)


@pytest.mark.parametrize("shape", [[0, 2**62], [2**40, 0, 2], [2**31, 2**31, 0], [0, 2**62, 2**62]])
def test_a5_sizes_beside_a_zero_are_limited(file, refused, shape):
    path = file(raw({"bad.one": entry("F32", shape, 0, 0)}))
    with refused("ST-OFFSETS", 4, str(path), "bad.one", str(max(shape))):
        read_all(path)


@pytest.mark.parametrize("name", [*NAMES, "\ud800"], ids=lambda name: ascii(name[:12]))
def test_a7_strange_names_are_printed_escaped_and_cut(file, name):
    twice = json.dumps(name).encode()
    for data in (
        raw({name: entry("U8", [2], 0, 3)}, b"\1\2"),
        raw(b"{%b:1,%b:1}" % (twice, twice)),
        raw({name: entry("F4", [2], 0, 1)}, b"\1"),
        raw({f"{name}.lora_A.weight": entry("U8", [1], 0, 1)}, b"\1"),
    ):
        with pytest.raises(AnisoError) as caught:
            read_all(file(data))
        for text in (str(caught.value), json.dumps(caught.value.to_json(), ensure_ascii=False)):
            assert all(line.isprintable() for line in text.split("\n")), ascii(text)
            assert len(text) < 2500
        assert name[:3].isprintable() is False or name[:3] in str(caught.value)


def test_a7_asking_for_a_strange_name_is_escaped(file, refused):
    source = open_weights(file(good()))
    with refused("WEIGHT-NAME", 3, r"a\x1b[31m\nb") as refusal:
        source.read("a\x1b[31m\nb")
    assert "\x1b" not in str(refusal.error)


def test_a8_git_lfs_pointer_says_what_to_type(file, refused):
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 605\n"
    path = file(text)
    with refused("FILE-POINTER", 3, str(path), "git-LFS pointer", "git lfs pull"):
        read_all(path)


@pytest.mark.parametrize(
    "page",
    [
        b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        b"\n\n <HTML><head></head></HTML>",
        b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    ],
)
def test_a8_html_page_is_called_one(file, refused, page):
    path = file(page)
    with refused("FILE-PAGE", 3, str(path), "HTML page", "address"):
        read_all(path)


@pytest.mark.parametrize(
    "text",
    [
        b'{"error":"Repository not found"}',
        b'  {"error":"Invalid username or password."}',
        b'[{"error":"Entry not found"}]',
        b'{"code":{"value":404,"text":"Not Found"}}',
        b'{"err": {"message": "gated repository"}}',
    ],
)
def test_a8_json_error_is_called_one(file, refused, text):
    path = file(text)
    with refused("FILE-PAGE", 3, str(path), "JSON text", text.decode().strip()[:6]):
        read_all(path)


@pytest.mark.parametrize("length", [ord("{"), ord("["), ord("<"), 0x80, ord("("), ord("c")])
def test_a8_header_length_that_looks_like_text_is_not_taken_for_it(file, length):
    header = json.dumps({"w": entry("U8", [1], 0, 1)}).encode()
    padded = header.ljust(length + (256 if length < len(header) else 0))
    _, tensors = read_all(file(raw(padded, b"\7")))
    assert tensors["w"].tolist() == [7]


def test_a8_unknown_content_says_what_would_be_read(file, refused):
    path = file(b"GGUF" + bytes(100))
    with refused("FILE-FORMAT", 3, str(path), "GGUF", "safetensors"):
        read_all(path)


def test_a9_recorded_hash_is_the_hash_of_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    recorded = save_safetensors(path, WEIGHTS)
    source, tensors = read_all(path)
    assert recorded == source.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
    same(tensors, WEIGHTS)


def test_a9_one_flipped_bit_changes_the_hash(tmp_path):
    path = tmp_path / "model.safetensors"
    recorded = save_safetensors(path, WEIGHTS)
    data = path.read_bytes()
    seen = {recorded}
    for bit in range(8):
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1 << bit]))
        source, _ = read_all(path)
        seen.add(source.sha256())
    assert len(seen) == 9


@pytest.mark.parametrize(
    ("dtype", "bits"), [("F8_E4M3", 8), ("F8_E5M2", 8), ("F4", 4), ("F6_E2M3", 6), ("C64", 64)]
)
def test_a11_unsupported_dtype_is_listed_but_not_read(file, refused, dtype, bits):
    header = {"ok": entry("U8", [1], 0, 1), "visual.proj": entry(dtype, [4], 1, 1 + bits // 2)}
    path = file(raw(header, b"\5" + bytes(bits // 2)))
    source = open_weights(path)
    assert source.tensors["visual.proj"].dtype == dtype
    assert source.read("ok").tolist() == [5]
    with refused("WEIGHT-DTYPE", 3, str(path), "visual.proj", dtype, "convert it"):
        read_all(path)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32],
)
def test_a11_integers_are_read_as_they_are(file, dtype):
    whole = {"position_ids": torch.tensor([[0, 1], [1, 0]]).to(dtype)}
    source, tensors = read_all(file(safetensors.torch.save(whole)))
    same(tensors, whole)
    assert not source.tensors["position_ids"].is_float


def open_for_change(file):
    """An open source whose file was last written long ago."""
    path = file(good())
    os.utime(path, ns=(10**18, 10**18))
    return path, open_weights(path)


def test_a12_file_cut_while_open_is_an_error_not_a_signal(file, refused):
    path, source = open_for_change(file)
    os.truncate(path, 16)
    with refused("FILE-CHANGED", 3, str(path), "shorter", "16 bytes"):
        source.read("visual.proj")


@pytest.mark.parametrize("change", ["appended", "rewritten"])
def test_a12_file_changed_while_open_is_refused(file, refused, change):
    path, source = open_for_change(file)
    if change == "appended":
        with path.open("ab") as f:
            f.write(b"x")
    else:
        path.write_bytes(good()[::-1])
    with refused("FILE-CHANGED", 3, str(path), "changed while it was read"):
        source.read("visual.proj")
    with refused("FILE-CHANGED", 3, str(path)):
        source.sha256()


def test_a12_file_replaced_while_open_is_still_the_old_one(file):
    path, source = open_for_change(file)
    other = file(b"something else", "other")
    other.replace(path)
    same(
        {name: source.read(name) for name in source.tensors},
        WEIGHTS,
    )


def test_a13_pickle_called_safetensors_is_read_as_what_it_is(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save(WEIGHTS, path)
    source, tensors = read_all(path)
    assert source.info.format == "torch zip"
    same(tensors, WEIGHTS)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "model"])
def test_a13_safetensors_under_another_name_is_read_as_what_it_is(file, name):
    source, tensors = read_all(file(good(), name))
    assert isinstance(source, SafetensorsFile)
    same(tensors, safetensors.torch.load(good()))


def test_a13_hostile_pickle_called_safetensors_is_refused_as_a_pickle(file, refused, tmp_path):
    path = file(b"\x80\x02cposix\nsystem\nX\x0c\0\0\0touch marker\x85R.")
    with refused("PICKLE-CALL", 4, str(path), "posix.system"):
        read_all(path)


@pytest.fixture
def locked_folder(tmp_path, monkeypatch):
    """A working directory in which an ordinary user may look things up by relative paths."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for path in tmp_path.rglob("*"):
        path.chmod(0o700)


def test_a14_unreadable_file_gives_the_reason(locked_folder, refused):
    path = locked_folder / "closed.safetensors"
    path.write_bytes(good())
    path.chmod(0)
    with ordinary_user(), refused("FILE-ACCESS", 3, "closed.safetensors", "Permission denied"):
        open_weights("closed.safetensors")


@pytest.mark.parametrize("inside", ["closed", "closed/model.safetensors"])
def test_a14_unreadable_directory_gives_the_reason(locked_folder, refused, inside):
    closed = locked_folder / "closed"
    closed.mkdir()
    (closed / "model.safetensors").write_bytes(good())
    closed.chmod(0)
    with ordinary_user(), refused("FILE-ACCESS", 3, inside, "Permission denied"):
        open_weights(inside)


def test_a14_directory_without_weights_lists_what_it_holds(tmp_path, refused):
    folder = tmp_path / "model.safetensors"
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")
    with refused("DIR-EMPTY", 3, str(folder), "notes.txt"):
        read_all(folder)


def test_a14_missing_file_is_named(tmp_path, refused):
    with refused("FILE-MISSING", 3, str(tmp_path / "none.safetensors"), "does not exist"):
        read_all(tmp_path / "none.safetensors")


def test_a14_file_used_as_a_directory_is_missing(file, refused):
    path = file(good()) / "inside"
    with refused("FILE-MISSING", 3, str(path)):
        open_weights(path)


def test_a14_dangling_symlink_gives_the_reason(tmp_path, refused):
    path = tmp_path / "link.safetensors"
    path.symlink_to(tmp_path / "gone")
    with refused("FILE-MISSING", 3, str(path), "No such file"):
        read_all(path)


def test_a14_symlink_loop_gives_the_reason(tmp_path, refused):
    path = tmp_path / "link.safetensors"
    path.symlink_to(path)
    with refused("FILE-ACCESS", 3, str(path), "symbolic links"):
        read_all(path)


def test_a14_symlink_to_a_good_file_is_followed(file, tmp_path):
    path = tmp_path / "link.safetensors"
    path.symlink_to(file(good()))
    _, tensors = read_all(path)
    same(tensors, safetensors.torch.load(good()))


def test_a14_fifo_is_refused_without_waiting(tmp_path, refused):
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    with no_hang(), refused("FILE-KIND", 3, str(path), "not a regular file"):
        read_all(path)


def test_a14_endless_device_is_refused(tmp_path, refused):
    path = tmp_path / "zero.safetensors"
    path.symlink_to("/dev/zero")
    with no_hang(), refused("FILE-KIND", 3, str(path), "not a regular file"):
        read_all(path)


def test_a14_socket_is_refused(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.safetensors")
        with refused("FILE-ACCESS", 3, "s.safetensors"):
            open_weights("s.safetensors")


@pytest.mark.parametrize("name", ["n" * 300, "n/" * 3000], ids=["name", "path"])
def test_a14_path_that_is_too_long_is_an_input_error(tmp_path, name):
    with pytest.raises(AnisoError) as caught:
        open_weights(tmp_path / name)
    assert caught.value.exit_code == 3
    assert caught.value.code in ("FILE-ACCESS", "FILE-MISSING")


def test_a14_home_of_nobody_is_an_input_error(refused):
    with refused("FILE-MISSING", 3, "~no-such-user-here/model.safetensors"):
        open_weights("~no-such-user-here/model.safetensors")
