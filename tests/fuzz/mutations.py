"""Changes to valid files that keep enough of their structure to get past the first check."""

from __future__ import annotations

import copy
import json
import pickletools
import random
import struct
from typing import Any

MARKER = "fuzz-marker"
"""A file in the current directory that appears if a file is executed."""
HOSTILE_NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 69, 71, 255, 256, 65_536, 10**6, 2**31 - 1, 2**31, 2**53, 2**62, 2**63, 2**64),
    *(-(2**31), -(2**63), 10**30, 10**400, 0.0, -0.5, 1.5, 1e-320, 1e308, -1e308),
]
HOSTILE_TEXTS = [
    *("", "x", "0", "-1", "nan", "inf", "1e999", "null", "true", "a.b", "../../x", "/etc/passwd", "C:\\x"),
    *("\x00", "\n", "\x1b[31m", "\ud800", "\udfff", "\u202e", "é", "😀", "__class__", "__metadata__"),
    *("a" * 300, "n" * 70_000, "module." * 50, "%s%n", "{}", "${x}", "os.system", "file:///etc/passwd"),
]
HOSTILE: list[Any] = [
    *HOSTILE_NUMBERS,
    *HOSTILE_TEXTS,
    *(None, True, False, [], {}, [[]], {"": None}, [None] * 20, list(range(2000)), {"a": {"b": {"c": 1}}}),
]
_TOKENS = [
    b"NaN",
    b"Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 2000 + b"]" * 2000,
    b'"\\ud800"',
    b"\xff",
    b"{}",
]


# Bytes


def flipped(rng: random.Random, data: bytes) -> bytes:
    """The data with one to three bytes changed."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if out:
            out[rng.randrange(len(out))] ^= rng.randint(1, 255)
    return bytes(out)


def cut(rng: random.Random, data: bytes) -> bytes:
    """The data without its end."""
    return data[: rng.randrange(len(data) + 1)]


def spliced(rng: random.Random, data: bytes, other: bytes | None = None) -> bytes:
    """The data with a piece of itself or of another file in place of a piece of it."""
    other = data if other is None else other
    begin, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    start = rng.randrange(len(other) + 1)
    return (
        data[:begin] + other[start : start + rng.randrange(64)] + data[min(end, begin + rng.randrange(64)) :]
    )


def number_edited(rng: random.Random, data: bytes) -> bytes:
    """The data with a length or offset somewhere in it replaced."""
    form = rng.choice(["<H", "<I", "<Q", ">I", ">H"])
    size = struct.calcsize(form)
    if len(data) < size:
        return data
    at = rng.randrange(len(data) - size + 1)
    value = rng.choice([0, 1, 2, 255, len(data), len(data) + 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1])
    return data[:at] + struct.pack(form, value % 2 ** (8 * size)) + data[at + size :]


def any_bytes(rng: random.Random, data: bytes) -> bytes:
    """One of the changes above."""
    return rng.choice([flipped, cut, spliced, number_edited])(rng, data)


# JSON


def json_edited(rng: random.Random, value: Any) -> Any:
    """A copy of plain data with one to three places changed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _edit(rng, value)
    return value


def _edit(rng: random.Random, value: Any) -> Any:
    places = _places(value)
    if not places:
        return _hostile(rng)
    parent, key = rng.choice(places)
    how = rng.random()
    if how < 0.55:
        parent[key] = _hostile(rng)
    elif how < 0.65:
        del parent[key]
    elif how < 0.75:
        parent[key] = copy.deepcopy(rng.choice(places)[0])
    elif how < 0.85 and isinstance(parent, dict):
        parent[rng.choice([*HOSTILE_TEXTS, str(key) + "x"])] = parent.pop(key)
    elif how < 0.95 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] += rng.choice([-1, 1, 0.5, 10**6])
    elif isinstance(parent, list):
        parent.insert(key, copy.deepcopy(rng.choice(parent)))
    else:
        parent[rng.choice(HOSTILE_TEXTS)] = _hostile(rng)
    return value


def _hostile(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(HOSTILE))  # further edits must not change the list itself


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in it, as deep as it goes."""
    out: list[tuple[Any, Any]] = []
    open_values = [value]
    while open_values:
        node = open_values.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        out += [(node, key) for key in keys]
        open_values += [node[key] for key in keys]
    return out


def json_bytes(rng: random.Random, value: Any) -> bytes:
    """Plain data as JSON, now and then with a token in it that is none."""
    data = json.dumps(value).encode()
    how = rng.random()
    if how < 0.04:
        at = rng.randrange(len(data))
        return data[:at] + rng.choice(_TOKENS) + data[at + rng.randrange(3) :]
    if how < 0.07 and data.startswith(b"{") and len(data) > 2:
        return b"{" + data[1:-1] + b"," + data[1:]  # every key twice
    return any_bytes(rng, data) if how < 0.1 else data


# Pickles


def opcodes(data: bytes) -> list[bytes]:
    """A pickle as the bytes of each of its operations."""
    starts = [at for _, _, at in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def _hostile_opcodes() -> list[bytes]:
    """Operations that call, name, repeat, allocate or leave the stack in disorder."""
    touch = text(f"touch {MARKER}")
    return [
        b"cposix\nsystem\n" + touch + b"\x85R",
        b"(" + touch + b"ios\nsystem\n",
        text("torch.utils.data") + text("_utils.subprocess.Popen") + b"\x93" + touch + b"\x85R",
        b"cpsutil\nPopen\n)\x81}" + text("a") + touch + b"sb",
        b"cbuiltins\neval\n" + text(f"open({MARKER!r}, 'w')") + b"\x85R",
        b"cbuiltins\ngetattr\ncposix\nsystem\n" + text("__call__") + b"\x86R",
        b"ccopyreg\n_reconstructor\n(clib\nC\ncsubprocess\nPopen\n" + touch + b"tR",
        b"ctorch.storage\n_load_from_bytes\nC\x10\x80\x02cposix\nsystem\n.\x85R",
        *(number(2**62), number(-1), number(1 << 20_000), number(2**61 - 1), b"K\0", b"K\1", b"G" + bytes(8)),
        *(
            text(s)
            for s in ("", "w", "\ud800", "storage", "cpu", "0", "_modules", "_parameters", "n" * 70_000)
        ),
        *(b"N", b"(", b")", b"]", b"}", b"\x8f", b"0", b"1", b"2", b"t", b"l", b"d", b"e", b"u", b"s", b"a"),
        *(b"b", b"R", b"\x81", b"\x92", b"\x93", b"\x94", b"\x85", b"\x86", b"\x87", b"\x90", b"\x91", b"Q"),
        *(b"h\0", b"h\1", b"h\2", b"q\0", b"q\1", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"."),
        *(b"\x82\1", b"\x84\xff\xff\xff\x7f", b"\x95" + bytes(8), b"\x97", b"\x98", b"Pabc\n", b"I01\n"),
        *(b"\x8d" + struct.pack("<Q", 2**62), b"\x8b" + struct.pack("<i", -5), b"B" + b"\xff" * 4, b"\xff"),
        *(b"ctorch\nSize\n", b"ccollections\nOrderedDict\n)R", b"ctorch\nFloatStorage\n", b"clib\nC\n)\x81"),
    ]


_HOSTILE_OPCODES = _hostile_opcodes()


def pickle_edited(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A pickle with operations added, left out, repeated, exchanged or taken from another."""
    parts = opcodes(data)
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        at = rng.randrange(len(parts) + 1)
        how = rng.random()
        if how < 0.25:
            parts[at:at] = [rng.choice(_HOSTILE_OPCODES), b"0"]  # most leave one value, which is dropped
        elif how < 0.4:
            parts.insert(at, rng.choice(_HOSTILE_OPCODES))
        elif how < 0.55:
            parts[at : at + 1] = [rng.choice(_HOSTILE_OPCODES)]
        elif how < 0.7:
            del parts[at : at + rng.randint(1, 4)]
        elif how < 0.8:
            begin = rng.randrange(len(parts) + 1)
            parts[at:at] = parts[begin : begin + rng.randint(1, 40)]
        elif how < 0.9:
            theirs = opcodes(other)
            begin = rng.randrange(len(theirs))
            parts[at : at + rng.randrange(20)] = theirs[begin : begin + rng.randint(1, 40)]
        elif parts:
            parts[at : at + 2] = parts[at : at + 2][::-1]
    out = b"".join(parts)
    return any_bytes(rng, out) if rng.random() < 0.1 else out


# Text


def lines_edited(rng: random.Random, data: bytes) -> bytes:
    """A text with lines exchanged, repeated, indented otherwise, or with other values."""
    lines = data.decode().split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        lines[at : at + 1] = _line_edited(rng, lines[at], rng.choice(lines))
        lines = lines or [""]
    out = "\n".join(lines).encode("utf-8", "surrogatepass")
    return any_bytes(rng, out) if rng.random() < 0.15 else out


def _line_edited(rng: random.Random, line: str, other: str) -> list[str]:
    key, colon, _ = line.partition(":")
    word = rng.choice([*map(str, HOSTILE_NUMBERS[:-1]), *map(repr, HOSTILE_TEXTS[:20]), *_YAML])
    indented = " " * rng.randrange(5) + line.lstrip()
    return rng.choice([[f"{key}{colon} {word}"], [line, line], [], [indented], [line, other], [word]])


_YAML = [
    *(
        "!!python/object/apply:os.system ['true']",
        "&a [*a]",
        "*a",
        "no",
        "010",
        "1e-3",
        "2024-01-01",
        "~",
        "|",
    ),
    *(
        "{a: 1, a: 2}",
        "? [x]",
        "<<: {}",
        "[" * 300,
        "{" * 300,
        "- " * 200,
        "\t",
        "\ufeff",
        "'",
        '"',
        "%YAML 1.1",
    ),
]
