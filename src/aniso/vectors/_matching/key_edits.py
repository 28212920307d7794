"""Keys of a checkpoint to skip or rename, as the user requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from aniso.errors import UsageError, printable
from aniso.weights import PeftAdapter, Renamed, WeightSource


@dataclass(frozen=True)
class KeyEdits:
    """Keys of a checkpoint to skip (shell patterns) or to rename (old name to new).

    For example ``KeyEdits(skip=("text_model.*",), rename={"head.w": "head.weight"})``.
    """

    skip: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)

    def skips(self, *names: str) -> bool:
        """True if one of the names matches a pattern to skip."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.skip)

    def applied(self, source: WeightSource) -> WeightSource:
        """Return the source with these edits."""
        kept = [key for key in source.tensors if not self.skips(key)]
        if len(kept) == len(source.tensors) and not set(self.rename) & set(kept):
            return source
        names: dict[str, str] = {}
        for key in kept:
            new = self.rename.get(key, key)
            if new in names:
                raise UsageError(
                    "CKPT-KEYS",
                    f"'{source.label}' would have two tensors called '{printable(new)}'",
                    found=[names[new], key],
                    fix=f"add --skip-key '{printable(new)}' to leave the other one out",
                )
            names[new] = key
        info = replace(source.info, notes=(*source.info.notes, *self._notes(source, kept)))
        if isinstance(source, PeftAdapter):
            return source.under(names, info)
        return Renamed(source, names, info)

    def require_used(self, sources: Iterable[WeightSource]) -> None:
        """Raise if an edit matches no key of any source, which is a spelling mistake."""
        opened = list(sources)
        keys = {key for source in opened for key in source.tensors}
        unused = [f"--rename {old}={new}" for old, new in self.rename.items() if old not in keys]
        unused += [f"--skip-key {p}" for p in self.skip if not any(fnmatchcase(key, p) for key in keys)]
        if unused:
            where = ", ".join(f"'{source.label}'" for source in opened[:3]) or "vectors made before"
            raise UsageError(
                "CKPT-KEYS",
                f"there is no such key in {where}",
                found=", ".join(unused),
                fix=f"aniso inspect --keys {where.split(', ')[0]}",
            )

    def _notes(self, source: WeightSource, kept: list[str]) -> list[str]:
        left_out = sorted(set(source.tensors) - set(kept))
        notes = [
            f"key renamed: {printable(old)} -> {printable(new)}"
            for old, new in self.rename.items()
            if old in kept
        ]
        if left_out:
            notes.append(f"{len(left_out)} keys left out on request: {printable(', '.join(left_out))}")
        return notes
