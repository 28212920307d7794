"""Gradients of vectors that were looked at before: a file to which a line is added for each.

Hundreds of adapters are read once, whatever interrupts it; another budget asks nothing of them at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from aniso.errors import InputError, printable
from aniso.vectors import TaskVector

_FORMAT = "aniso gradients 1"


@final
class GradientCache:
    """Lines of JSON; the first says what the gradients are of."""

    def __init__(self, path: str | Path, what: Mapping[str, Any]) -> None:
        """``what`` decides the gradients: model, objective, seed. A file that says otherwise is refused."""
        self.path = Path(path)
        self._what = json.loads(json.dumps({"format": _FORMAT, **what}))
        self._known: dict[str, dict[str, float]] = {}
        if self.path.exists() and self.path.stat().st_size:
            self._read()

    def get(self, vector: TaskVector) -> dict[str, float] | None:
        found = self._known.get(_key(vector))
        return found if found is not None and found.keys() == {b.name for b in vector.blocks} else None

    def put(self, vector: TaskVector, gradients: Mapping[str, float]) -> None:
        """On disk before it returns. Vectors that come from no file cannot be known again."""
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
            said = dict(json.loads(rows[0]).items())
            found = [json.loads(row) for row in rows[1:]]
            for row in found:
                own = {str(block): float(x) for block, x in row["gradients"].items()}
                if not all(map(math.isfinite, own.values())):
                    raise ValueError(f"gradients of {row['vector']} are not finite")
                self._known[str(row["key"])] = own
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            raise InputError(
                "FILE-FORMAT",
                f"'{printable(self.path)}' holds no gradients that were written down here",
                reason=printable(e, 100),
                fix="name another file, or remove this one",
            ) from None
        if said != self._what:
            odd = sorted(k for k in {*said, *self._what} if said.get(k) != self._what.get(k))
            raise InputError(
                "RUN-CHANGED",
                f"'{printable(self.path)}' has gradients of something else",
                changed=printable(", ".join(odd)),
                fix="name another file, or remove this one",
            )
        if whole != text:  # a line that was cut off while it was written
            os.truncate(self.path, len(whole.encode()))


def _key(vector: TaskVector) -> str:
    """Content, formula and blocks; what packing lost tells one storage from another."""
    own = hashlib.sha256("\n".join(block.name for block in vector.blocks).encode()).hexdigest()[:16]
    return f"{vector.provenance.sha256} {vector.provenance.formula} {vector.relative_error:.6g} {own}"
