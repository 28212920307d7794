"""The index of a tar archive: headers are read, nothing is unpacked."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aniso.errors import InputError, UnsafeError, printable

if TYPE_CHECKING:
    from aniso.weights.files import RawFile

_BLOCK = tarfile.BLOCKSIZE
_LARGEST_EXTENSION = 64 << 10  # a name, or a handful of attributes
_LARGEST_PADDING = 1 << 20
_RECORD = re.compile(rb"([0-9]{1,6}) ([^=\n]+)=")
_LONG_NAME, _LONG_LINK = tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK
_PAX, _PAX_GLOBAL = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE), tarfile.XGLTYPE
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZ": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}


@dataclass(frozen=True)
class Member:
    """A regular file in the archive, by the position of its bytes."""

    name: str
    offset: int
    size: int


def members(file: RawFile) -> Iterator[Member]:
    """Yield every regular file in order; links, devices and paths out of the archive raise an error.

    Only single headers are parsed by ``tarfile``: its own iteration reads extensions of any size, follows
    them by recursion, goes backwards over negative sizes, and ends silently at damage.
    """
    _require_plain(file)
    offset, name, size = 0, None, None
    while (header := _header(file, offset)) is not None:
        data = offset + _BLOCK
        if header.type in (_LONG_NAME, _LONG_LINK, _PAX_GLOBAL, *_PAX):
            text = _extension(file, header, data)
            if header.type == _LONG_NAME:
                name = _decoded(file, text.split(b"\0", 1)[0])
            elif header.type != _LONG_LINK:
                name, size = _attributes(file, header.type == _PAX_GLOBAL, text, name, size)
            offset = data + _blocks(header.size)
            continue
        member = Member(header.name if name is None else name, data, header.size if size is None else size)
        _require_harmless(file, header.type, member)
        if header.type != tarfile.DIRTYPE:
            yield member
            data += _blocks(member.size)
        offset, name, size = data, None, None


def _header(file: RawFile, offset: int) -> tarfile.TarInfo | None:
    """Return the header at an offset, or None at the end of the archive."""
    if offset == file.size:  # some writers leave the closing zeros out
        return None
    if offset + _BLOCK > file.size:
        raise _damaged(file, offset, "the file ends amid a header")
    block = file.read(offset, _BLOCK)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        _require_padding(file, offset)
        return None
    except (tarfile.HeaderError, ValueError, IndexError):
        raise _damaged(file, offset, "not a tar header") from None


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _extension(file: RawFile, header: tarfile.TarInfo, offset: int) -> bytes:
    if not 0 <= header.size <= _LARGEST_EXTENSION:
        raise _refused(file, header.name, f"an extension of {header.size:,} bytes")
    if offset + header.size > file.size:
        raise _damaged(file, offset, "the file ends amid an extension")
    return file.read(offset, header.size)


def _attributes(
    file: RawFile, is_global: bool, text: bytes, name: str | None, size: int | None
) -> tuple[str | None, int | None]:
    """Return name and size, replaced by those of a pax extension."""
    fields = dict(_records(file, text))
    if any(key.startswith(b"GNU.sparse") for key in fields):
        raise _refused(file, name or "", "a sparse file")
    if is_global:
        if {b"path", b"size"} & fields.keys():
            raise _refused(file, "", "one name or size for all members")
        return name, size
    if b"path" in fields:
        name = _decoded(file, fields[b"path"])
    if b"size" in fields:
        if not re.fullmatch(rb"[0-9]{1,18}", fields[b"size"]):
            raise _refused(file, name or "", f"a size of {printable(fields[b'size'])}")
        size = int(fields[b"size"])
    return name, size


def _records(file: RawFile, text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of lines "length key=value", where length is that of the line."""
    at = 0
    while at < len(text) and text[at]:
        match = _RECORD.match(text, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(text) or text[end - 1 : end] != b"\n":
            raise _damaged(file, at, "a malformed extension")
        yield match[2], text[match.end() : end - 1]
        at = end


def _decoded(file: RawFile, name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _require_harmless(file: RawFile, kind: bytes, member: Member) -> None:
    if kind not in _REGULAR and kind != tarfile.DIRTYPE:
        raise _refused(file, member.name, _KINDS.get(kind, f"an entry of unknown kind {kind!r}"))
    if member.size < 0:
        raise _refused(file, member.name, f"a size of {member.size:,}")
    steps = re.split(r"[/\\]", member.name)
    if member.name.startswith(("/", "\\")) or ".." in steps or re.match("[A-Za-z]:[/\\\\]", member.name):
        raise _refused(file, member.name, "a path out of the archive")
    if "\0" in member.name:
        raise _refused(file, member.name, "a name with a zero byte")
    if kind != tarfile.DIRTYPE and member.offset + member.size > file.size:
        raise _damaged(file, member.offset, f"the file ends amid '{printable(member.name)}'")


def _require_plain(file: RawFile) -> None:
    head = file.head(8)
    for magic, tool in _COMPRESSED.items():
        if head.startswith(magic):
            raise UnsafeError(
                "DATA-TAR",
                f"'{file.label}' is compressed, so images cannot be read from its middle",
                expected="a plain .tar; images are compressed already",
                fix=f"{tool} '{file.label}'",
            )
    if not file.size:
        raise _damaged(file, 0, "an empty file")


def _require_padding(file: RawFile, offset: int) -> None:
    """Raise unless only zeros follow the end: no second archive that other readers would find."""
    rest = file.size - offset
    if rest > _LARGEST_PADDING or file.read(offset, rest).count(0) != rest:
        raise UnsafeError(
            "DATA-TAR",
            f"'{file.label}' has data after its end",
            found=f"{rest:,} bytes after the closing zeros begin",
            fix="write the archive again; several joined by cat are no archive",
        )


def _damaged(file: RawFile, offset: int, found: str) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{file.label}' is damaged at byte {offset:,}",
        found=found,
        fix="download it again",
    )


def _refused(file: RawFile, name: str, found: str) -> UnsafeError:
    return UnsafeError(
        "DATA-TAR",
        f"'{file.label}' holds a member that no archive of images needs",
        member=printable(name),
        found=found,
        expected="regular files below the archive's root",
        fix="write the archive again from the images",
    )
