"""Small files that ask for much: reading takes time and memory in proportion to the file's size.

Bounds are generous, several times what is needed; what they guard against took ten times as much or more.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from aniso.data.decode import decode
from aniso.weights import open_weights, save_safetensors
from fuzz.limits import measured

FOUR = torch.tensor([1.0, 2.0, 3.0, 4.0])
PRIME = 2**61 - 1
"""Python hashes an integer by its remainder by this, so all multiples of it fall into one slot."""


def text(value):
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def pairs(*entries):
    return b"}(" + b"".join(text(key) + value for key, value in entries) + b"u"


def tensor(shape=(4,), stride=(1,)):
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4tQ"
    sizes, steps = (b"(" + b"".join(map(number, values)) + b"t" for values in (shape, stride))
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + sizes + steps + b"\x89" + hooks + b"tR"
    )


def save(path, body):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2" + body + b".")
        archive.writestr("archive/data/0", FOUR.numpy().tobytes())
    return path


def beside(value):
    """A state dict of one tensor, with this value beside it."""
    return pairs(("w", tensor()), ("x", value))


def shared(inner, times):
    """One value under very many names."""
    return inner + b"q\x010" + pairs(*((f"s{i}", b"h\1") for i in range(times)), ("w", tensor()))


def wide(times, value=b"N"):
    return pairs(*((f"k{i}", value) for i in range(times)))


def module(times):
    """A module without parameters that is reached on very many paths, with a long list in it."""
    empty = b"}(" + b"".join(b"G" + struct.pack(">d", i) + b"N" for i in range(times)) + b"u"
    body = b"cm\nModule\n)\x81" + pairs(("_parameters", empty), ("_modules", b"}")) + b"b"
    for _ in range(18):
        both = pairs(("a", b"h\2"), ("b", b"h\2"))
        body += b"q\x020cm\nModule\n)\x81" + pairs(("_parameters", b"}"), ("_modules", both)) + b"b"
    top = pairs(("_parameters", pairs(("w", tensor()))), ("_modules", pairs(("a", body))))
    return b"cm\nModule\n)\x81" + top + b"b"


def names(count):
    """Few texts that combine to very many names of classes."""
    words = b"".join(text(f"m{i}" + "x" * 400) + b"r" + struct.pack("<I", i) + b"0" for i in range(count))
    ways = ((i, j) for i in range(count) for j in range(count))
    return words + b"".join(struct.pack("<cIcI", b"j", i, b"j", j) + b"\x930" for i, j in ways) + b"N"


def colliding_strides(count):
    """Views of one element whose strides differ by multiples of the prime, so that their hashes are equal."""
    strides = ([((i >> (2 * k)) & 3) * PRIME for k in range(8)] for i in range(count))
    return pairs(*((f"t{i}", tensor((1,) * 8, stride)) for i, stride in enumerate(strides)))


def inside(times):
    """One file inside of the pickle that is read again and again."""
    inner = io.BytesIO()
    torch.save({"a": list(range(2000))}, inner, _use_new_zipfile_serialization=False)
    data = inner.getvalue()
    kept = b"B" + struct.pack("<I", len(data)) + data + b"\x85q\x010ctorch.storage\n_load_from_bytes\nq\x020"
    return kept + beside(b"h\2h\1R0" * times + b"N")


def keyed(keys):
    """A dictionary with these keys, beside a tensor."""
    return beside(b"}(" + b"".join(key + b"N" for key in keys) + b"u")


def many_candidates(count):
    """A tree that holds no tensors, in each of very many entries that may hold the weights."""
    entries = ((f"s{i}", b"}" + text("a") + b"h\1s") for i in range(count))
    return wide(count) + b"q\x010" + pairs(*entries, ("model", pairs(("w", tensor()))))


def many_states(count):
    """One dictionary as the state of very many objects."""
    entries = ((f"s{i}", b"cargparse\nNamespace\n)\x81h\1b") for i in range(count))
    return wide(count) + b"q\x010" + pairs(*entries, ("w", tensor()))


def made(opcode, count):
    """Very many values of one byte each, in lists of less than a million."""
    return beside(b"(" + (b"(" + opcode * 900_000 + b"l") * (count // 900_000) + b"l")


def inside_itself(count):
    """An object that is an entry of itself, among very many others, and hides its tensor."""
    junk = ((f"j{i}", b"N") for i in range(count))
    state = pairs(("t", b"N"), ("b", b"h\0"), *junk)
    return b"ccollections\nCounter\n)\x81q\0" + text("t") + tensor() + b"s" + state + b"b"


PICKLES = {
    "integers that collide": lambda: keyed(number(i * PRIME) for i in range(1, 90_000)),
    "memo numbers that collide": lambda: beside(
        b"N" + b"".join(b"p%d\n" % (i * PRIME) for i in range(50_000))
    ),
    "strides that collide": lambda: colliding_strides(20_000),
    "one dictionary under many names": lambda: shared(wide(12_000), 12_000),
    "one tree under many names": lambda: shared(wide(12_000, b"}"), 12_000),
    "one tree in many candidates": lambda: many_candidates(12_000),
    "one state of many objects": lambda: many_states(12_000),
    "a module on many paths": lambda: module(20_000),
    "a file inside read often": lambda: inside(20_000),
    "names that multiply": lambda: beside(names(700)),
    "a prefix repeated": lambda: pairs(*(("module." * 9000 + str(i), tensor()) for i in range(200))),
    "sets": lambda: made(b"\x8f", 3_600_000),
    "dictionaries": lambda: made(b"}", 3_600_000),
    "remembered values": lambda: beside(b"N" + b"\x94" * 3_900_000),
}


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_take_time_and_memory_in_proportion_to_their_size(tmp_path, kind):
    path = save(tmp_path / "model.pt", PICKLES[kind]())
    assert path.stat().st_size < 16 << 20
    cost = measured(lambda: open_weights(path).aliases, seconds=30)
    assert cost.outcome in ("ok", "PICKLE-LIMIT"), cost
    assert cost.seconds < 12 and cost.megabytes < 400, cost
    if cost.outcome != "ok":
        assert cost.exit_code == 4 and str(path) in cost.message


def test_entries_are_looked_at_few_times(tmp_path):
    """This took 20 seconds when each of 64 turns looked at all entries without a limit."""
    path = save(tmp_path / "model.pt", inside_itself(200_000))
    cost = measured(lambda: open_weights(path), seconds=30)
    assert (cost.outcome, cost.exit_code) == ("PICKLE-LIMIT", 4), cost
    assert cost.seconds < 8, cost


@pytest.mark.parametrize(
    "program",
    [
        b"cm\n" + b"a" * 490 + b"." + b"b" * 490 + b"\nq\0" + b"h\0)R0" * 400_000,
        b"cm\nB" + b"b" * 900 + b"\n)\x81" + b"Nb" * 800_000 + b"0",
    ],
    ids=["calls", "states"],
)
def test_a_call_made_very_often_is_recorded_once(tmp_path, program):
    """The machine's own work, against the same number of operations that record nothing."""
    idle = save(tmp_path / "idle.pt", beside(b"NN00" * 400_000 + b"N"))
    path = save(tmp_path / "model.pt", program + b"}")
    cost = measured(lambda: open_weights(path), seconds=30)
    assert (cost.outcome, cost.exit_code) == ("PICKLE-CALL", 4), cost
    assert cost.seconds < 3 * measured(lambda: open_weights(idle), seconds=30).seconds, cost


def test_a_state_dict_of_very_many_tensors_is_read(tmp_path):
    """What the limits leave room for: more tensors in one pickle than any model has in one file."""
    path = tmp_path / "model.pt"
    torch.save({f"model.layers.{i}.mlp.experts.down_proj.weight": FOUR for i in range(60_000)}, path)
    cost = measured(lambda: len(open_weights(path).tensors))
    assert cost.outcome == "ok" and cost.megabytes < 400, cost


def test_the_directory_of_an_archive_is_limited(tmp_path):
    count = 400_000
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *(0,) * 4, 0, 0, 0, *(0,) * 5, 0, 0)
    directory = entry * count
    start = b"PK\3\4" + bytes(26)
    sizes = count, count, len(directory), len(start)
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *sizes)
    end += struct.pack("<4sLQL", b"PK\6\7", 0, len(start) + len(directory), 1)
    end += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path = tmp_path / "model.pt"
    path.write_bytes(start + directory + end)
    cost = measured(lambda: open_weights(path))
    assert (cost.outcome, cost.exit_code) == ("PICKLE-LIMIT", 4), cost
    assert cost.seconds < 1 and cost.megabytes < 50, cost


# safetensors


def raw(header, data=b"", room=0):
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()).ljust(room)
    return struct.pack("<Q", len(text)) + text + data


HEADERS = {
    "empty objects": lambda: b'{"a":[' + b"{}," * 7_000_000 + b"{}]}",
    "small objects": lambda: b'{"a":[' + b'{"b":1},' * 3_000_000 + b"0]}",
    "empty lists": lambda: b'{"a":[' + b"[]," * 7_000_000 + b"[]]}",
    "tensors": lambda: b"{" + b",".join(b'"%d":{"dtype":"U8"}' % i for i in range(1_000_000)) + b"}",
    "numbers": lambda: b'{"a":[' + b"1.5," * 7_000_000 + b"0]}",
    "63 megabytes": lambda: b'{"a":[' + b"{}," * 21_000_000 + b"{}]}",
    "metadata": lambda: b'{"__metadata__":{"a":"' + b"x" * (63 << 20) + b'"}}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_take_memory_in_proportion_to_their_tensors(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(HEADERS[kind]()))
    cost = measured(lambda: open_weights(path))
    assert (cost.outcome, cost.exit_code) == ("ST-HEADER", 4), cost
    assert str(path) in cost.message and cost.seconds < 5 and cost.megabytes < 250, cost


def test_a_header_of_very_many_tensors_is_read(tmp_path):
    """What the limits leave room for: 120,000 tensors, and the room that banks keep for their headers."""
    entries = {
        f"model.layers.{i // 900}.mlp.experts.{i % 900}.down_proj.weight": {
            "dtype": "U8",
            "shape": [1, 1],
            "data_offsets": [i, i + 1],
        }
        for i in range(120_000)
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw(entries, bytes(120_000), room=60 << 20))
    cost = measured(lambda: len(open_weights(path).tensors))
    assert cost.outcome == "ok" and cost.megabytes < 500, cost


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_configurations_take_memory_in_proportion_to_their_values(tmp_path, name):
    save_safetensors(tmp_path / "model.safetensors", {"w": FOUR})
    if "index" in name:
        (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    (tmp_path / name).write_bytes(b'{"a":[' + b'{"b":1},' * 1_900_000 + b"0]}")
    cost = measured(lambda: open_weights(tmp_path))
    assert (cost.outcome, cost.exit_code) == ("DIR-CONFIG", 3), cost
    assert name in cost.message and cost.megabytes < 250, cost


@pytest.mark.parametrize(
    "value", [b"[" * 900 + b"]" * 900, b"1e999", b"9" * 5000, b'"\\ud800"', b'{"\\udc00":1}']
)
def test_configurations_that_cannot_be_shown_are_refused(tmp_path, refused, value):
    save_safetensors(tmp_path / "model.safetensors", {"w": FOUR})
    (tmp_path / "config.json").write_bytes(b'{"model_type":"clip","vision_config":{"x":' + value + b"}}")
    with refused("DIR-CONFIG", 3, "config.json"):
        open_weights(tmp_path)


# adapters


def test_patterns_of_an_adapter_take_time_in_proportion_to_its_size(tmp_path):
    """Ranks are given by regular expressions, each of which is tried on each module."""
    module = ".".join("a" * 60)
    tensors = {f"{module}.{i}.lora_{part}.weight": torch.ones(1, 1) for i in range(200) for part in "AB"}
    save_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    patterns = {rf".*a.*{i}b": 1 for i in range(400)}
    config = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 1,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    cost = measured(lambda: open_weights(tmp_path), seconds=30)
    assert cost.outcome in ("ok", "LORA-CONFIG") and cost.seconds < 10, cost


# images


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def flat(width, height, bits, colour):
    """A PNG of one colour."""
    channels = {0: 1, 2: 3, 6: 4}[colour]
    row = (width * bits * channels + 7) // 8 + 1
    packer, data = zlib.compressobj(9), b""
    for _ in range(height // 100):
        data += packer.compress(bytes(row * 100))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", data + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("bits", "colour"), [(1, 0), (8, 0), (16, 0), (8, 6)], ids=["1", "grey", "deep", "rgba"]
)
def test_small_files_of_large_images_are_refused_before_they_are_decoded(bits, colour):
    side = 13_000 if bits * (colour + 1) < 16 else 12_000
    data = flat(side, side, bits, colour)
    cost = measured(lambda: decode(data, "flat.png"))
    assert (cost.outcome, cost.exit_code) == ("IMAGE-BOMB", 4), cost
    assert "flat.png" in cost.message and cost.seconds < 1 and cost.megabytes < 50, cost


def test_deep_greys_are_converted_in_strips():
    side = 6_000
    rows = (np.arange(side * side, dtype=np.uint32) % 65_521).astype(">u2")
    data = b"P5 %d %d 65535\n" % (side, side) + rows.tobytes()
    cost = measured(lambda: decode(data, "deep.pgm"))
    assert cost.outcome == "ok" and cost.megabytes < 12 * side * side / 2**20, cost


def test_large_images_are_not_copied():
    side = 6_000
    data = b"P6 %d %d 255\n" % (side, side) + bytes(3 * side * side)
    cost = measured(lambda: decode(data, "large.ppm"))
    assert cost.outcome == "ok" and cost.megabytes < 6 * side * side / 2**20, cost


def test_a_jpeg_of_very_many_scans_is_refused():
    out = io.BytesIO()
    Image.new("L", (8_000, 8_000)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    many = data[:-2] + scan * 3000 + data[-2:]
    cost = measured(lambda: decode(many, "scans.jpg"))
    assert (cost.outcome, cost.exit_code) == ("IMAGE-BOMB", 4), cost
    assert "scans" in cost.message and cost.seconds < 2, cost


def tiled(side, tile):
    """A TIFF in one tile, which may be larger than the image."""
    data = zlib.compress(bytes(tile * tile), 9)
    tags = {
        256: side,
        257: side,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: tile,
        323: tile,
        324: 8,
        325: len(data),
    }
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(data))
        + data
        + struct.pack("<H", len(tags))
        + directory
        + bytes(4)
    )


def test_tiles_larger_than_the_image_are_refused():
    assert decode(tiled(64, 128), "small.tif").size == (64, 64)
    data = tiled(64, 20_000)
    cost = measured(lambda: decode(data, "tiles.tif"))
    assert (cost.outcome, cost.exit_code) == ("IMAGE-BOMB", 4), cost
    assert "tiles.tif" in cost.message and cost.megabytes < 50, cost
