"""Addresses of adapters: directories, and the remote stores that aniso reads; and shards of what is there."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from aniso.errors import InputError, UsageError, printable

PROTOCOLS = ("s3", "gs", "hf", "https", "http", "memory")


def is_remote(address: str) -> bool:
    """True if an address names a protocol; anything else is a path."""
    return re.match(r"[A-Za-z0-9.+-]+(://|::)", address) is not None


def require_address(address: str) -> None:
    """Raise for an address with an unknown protocol, or a directory that does not exist."""
    if is_remote(address):
        protocol, _, rest = address.partition("://")
        if protocol not in PROTOCOLS or "::" in address or not rest.strip("/"):
            known = [f"{name}://" for name in PROTOCOLS if name != "memory"]
            raise UsageError(
                "REMOTE-URI",
                f"'{printable(address)}' is not an address that aniso reads",
                expected=f"{', '.join(known)}, or a directory",
                fix="s3://BUCKET/PREFIX",
            )
    elif not Path(address).expanduser().is_dir():
        raise InputError(
            "FILE-MISSING",
            f"there is no directory '{printable(address)}'",
            fix="name a directory of adapters, or an address such as s3://BUCKET/PREFIX",
        )


def root_of(address: str) -> str:
    """Return an address in the form that catalogues record."""
    return address.rstrip("/") if is_remote(address) else str(Path(address).expanduser().absolute())


@final
@dataclass(frozen=True)
class Shard:
    """One of several parts of a set of things with ids; ``Shard(2, 8)`` is the second of eight.

    What belongs to it depends on ids alone, so a shard stays the same when things are added.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the shard of a text such as "2/8"."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise UsageError(
                "USAGE",
                f"--shard '{printable(text)}' is not a shard",
                expected="i/N with i from 1 to N, such as 2/8",
                fix="give each of N workers its own i",
            )
        return cls(int(number), int(count))

    def has(self, key: str) -> bool:
        """True if the thing with this hexadecimal id belongs to the shard."""
        return int(key[:15], 16) % self.count == self.number - 1

    def has_name(self, name: str) -> bool:
        """True if the thing with this name, of any form, belongs to the shard."""
        return self.has(hashlib.sha256(name.encode()).hexdigest())
