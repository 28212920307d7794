"""A cache of vectors' gradients on disk: a JSON Lines file with a line for each vector.

Hundreds of adapters are read once, even if interrupted; selecting with another budget reads none of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self, final

from aniso.data import TextDataset, content_hash
from aniso.errors import InputError, printable
from aniso.learn.objectives import Objective
from aniso.models import Encoder, Wrapped
from aniso.records import JsonValue
from aniso.vectors import TaskVector

_FORMAT = "aniso gradients 1"


@final
class GradientCache:
    """Gradients of task vectors by block; the file's first line says what they depend on."""

    def __init__(self, path: str | Path, what: Mapping[str, JsonValue]) -> None:
        """``what`` is everything gradients depend on: model, objective, seed. Another file's is an error."""
        self.path = Path(path)
        self._what = json.loads(json.dumps({"format": _FORMAT, **what}))
        self._known: dict[str, dict[str, float]] = {}
        if self.path.exists() and self.path.stat().st_size:
            self._read()

    @classmethod
    def of(cls, path: str | Path, model: Wrapped, objective: Objective, seed: int) -> Self:
        """Return the cache in a file for everything that gradients depend on, the items included."""
        return cls(path, gradient_identity(model, objective, seed))

    def get(self, vector: TaskVector) -> dict[str, float] | None:
        """Return the gradient of each of a vector's blocks, or None."""
        found = self._known.get(_key(vector))
        return found if found is not None and found.keys() == {b.name for b in vector.blocks} else None

    def put(self, vector: TaskVector, gradients: Mapping[str, float]) -> None:
        """Write a vector's gradients to disk; vectors that come from no file cannot be cached."""
        if not vector.provenance.sha256:
            return
        fresh = not self.path.exists() or not self.path.stat().st_size
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            if fresh:
                out.write(self._header)
            row = {"vector": vector.name, "key": _key(vector), "gradients": dict(gradients)}
            out.write(json.dumps(row, sort_keys=True) + "\n")
            out.flush()
            os.fsync(out.fileno())
        self._known[_key(vector)] = dict(gradients)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def _header(self) -> str:
        return json.dumps(self._what, sort_keys=True) + "\n"

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        rows = whole.splitlines()
        if not rows and self._header.startswith(text):  # cut off while the very first line was written
            os.truncate(self.path, 0)
            return
        try:
            header = dict(json.loads(rows[0]).items())
            found = [json.loads(row) for row in rows[1:]]
            for row in found:
                own = {str(block): float(x) for block, x in row["gradients"].items()}
                if not all(map(math.isfinite, own.values())):
                    raise ValueError(f"gradients of {row['vector']} are not finite")
                self._known[str(row["key"])] = own
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            raise InputError(
                "FILE-FORMAT",
                f"'{printable(self.path)}' is not a gradient cache",
                reason=printable(e, 100),
                fix="name another file, or remove this one",
            ) from None
        if header != self._what:
            odd = sorted(k for k in {*header, *self._what} if header.get(k) != self._what.get(k))
            raise InputError(
                "RUN-CHANGED",
                f"'{printable(self.path)}' has gradients of another model, objective or seed",
                changed=printable(", ".join(odd)),
                fix="name another file, or remove this one",
            )
        if whole != text:  # the last line was cut off while it was written
            os.truncate(self.path, len(whole.encode()))


def gradient_identity(model: Wrapped, objective: Objective, seed: int) -> dict[str, JsonValue]:
    """Return everything that gradients depend on: model, objective, seed and the items' content."""
    what: dict[str, JsonValue] = {**model.identity(), "seed": seed, "objective": [*objective.identity()]}
    if isinstance(model, Encoder):
        what["config"] = model.config_words
    hashes = [content_hash(t.split) for _, t in objective.data_terms if not isinstance(t.split, TextDataset)]
    return {**what, **({"pictures": " ".join(hashes)} if hashes else {})}


def _key(vector: TaskVector) -> str:
    """Key of a vector: content, formula and blocks; the packing error tells one storage from another."""
    own = hashlib.sha256("\n".join(block.name for block in vector.blocks).encode()).hexdigest()[:16]
    return f"{vector.provenance.sha256} {vector.provenance.formula} {vector.relative_error:.6g} {own}"
