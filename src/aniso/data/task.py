"""A task: classes, prompts and disjoint splits, from a card, a directory or a known name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Literal, final

from aniso.classes import TEXT_PROMPTS, ClassList
from aniso.data.card import Card, Carve, SplitRules, known_card, known_tasks, read_card
from aniso.data.part import Part, Reading
from aniso.data.readers import read, recognise
from aniso.data.splits import Labelled, joined
from aniso.errors import InputError, UnsafeError, UsageError, printable
from aniso.progress import ProgressCallback

ROLES = ("train", "val", "test")
_HOLDOUT = Carve(share=0.1, most=5000)
_THIRD = Carve(share=0.2)

OnBadImage = Literal["error", "skip"] | int
"""Images that cannot be read: raise an error, skip them, or skip at most this number."""


@final
@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """A classification problem: classes, prompts, and the splits train, val and test.

    It does not depend on a model: models make class weights and inputs.
    """

    name: str
    classes: ClassList
    train: Labelled | None = None
    val: Labelled | None = None
    test: Labelled | None = None
    card: Card = field(default_factory=Card)
    notes: tuple[str, ...] = ()
    """Sentences on what was left out or assumed while reading."""

    @property
    def splits(self) -> dict[str, Labelled]:
        """The splits that the task has, by role."""
        splits = {role: getattr(self, role) for role in ROLES}
        return {role: split for role, split in splits.items() if split is not None}

    def split(self, role: str) -> Labelled:
        """Return the split train, val or test; raises if the task does not have it."""
        if role not in self.splits:
            raise UsageError(
                "DATA-SPLIT",
                f"{self.name} has no split '{printable(role)}'",
                found=", ".join(self.splits) or "none",
                fix=f"--split {next(iter(self.splits), 'test')}",
            )
        return self.splits[role]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(split)} {role}" for role, split in self.splits.items())
        return f"Task({self.name}: {len(self.classes)} classes, {sizes})"


def load_task(
    ref: str | Path,
    root: str | Path | None = None,
    *,
    prompts: Sequence[str] = (),
    seed: int = 0,
    on_bad_image: OnBadImage = "error",
    progress: ProgressCallback | None = None,
) -> Task:
    """Load a task by its name (``eurosat``), from a directory or table, or from a card ``FILE.toml``.

    ``root`` is the directory of datasets (default: ``$ANISO_DATA``, or ``data``). ``prompts`` replace the
    card's. ``seed`` draws splits that the dataset does not have. Images are decoded when they are used; with
    ``on_bad_image="skip"`` or a number, all are decoded now and unreadable ones left out::

        task = load_task("photos/")           # a folder per class
        task.train.shots(4), task.test
    """
    _require_policy(on_bad_image)
    name, card, place = _locate(str(ref), root)
    kind = card.kind or recognise(place)
    if kind is None:
        raise _no_reader(place)
    card = card.model_copy(update={"reader": {"kind": kind, **card.reader}})
    reading = _read(name, card, place)
    classes = _classes(card, reading, tuple(prompts))
    parts = {part: _aligned(f"{name} {part}", found, card, classes) for part, found in reading.parts.items()}
    rules = card.splits or _default_rules(reading.parts)
    splits = _split(name, parts, rules, seed)
    notes = [*reading.notes, *_rule_notes(card, rules, reading.parts)]
    if len(classes) == 1:
        notes.append("warning: there is only one class, so every prediction is correct")
    if on_bad_image != "error":
        splits = {role: readable(split, on_bad_image, notes, progress) for role, split in splits.items()}
    return Task(name, classes, **splits, card=card, notes=tuple(notes))


def _read(name: str, card: Card, place: Path) -> Reading:
    try:
        return read(str(card.reader["kind"]), place, card.settings)
    except InputError as e:
        if e.code == "DATA-MISSING" and name in known_tasks():
            e.fix = str(card.reader.get("fetch") or f"aniso task fetch {name} --data '{printable(place)}'")
            e.facts.setdefault("homepage", card.homepage)
        raise


def _require_policy(policy: object) -> None:
    number = isinstance(policy, int) and not isinstance(policy, bool) and policy >= 0
    if policy not in ("error", "skip") and not number:
        raise UsageError(
            "USAGE",
            f"invalid value {printable(policy)!r} for on_bad_image",
            expected="error, skip, or the number that may be skipped",
            fix="on_bad_image='skip'",
        )


def data_root(root: str | Path | None) -> Path:
    """Return the directory of datasets."""
    return Path(root or os.environ.get("ANISO_DATA") or "data").expanduser()


def _locate(ref: str, root: str | Path | None) -> tuple[str, Card, Path]:
    """Return the task's name, its card, and the path to read it from."""
    data = data_root(root)
    if ref in known_tasks():  # a folder of that name is ./NAME
        card = known_card(ref)
        # torchvision makes its own directories below the root, often of the same name
        below = card.kind != "torchvision" and (data / ref).is_dir()
        return ref, card, data / ref if below else data
    path = _path(ref)
    if path.suffix == ".toml" and path.is_file():
        return path.stem, read_card(path), data if root else path.parent
    if path.exists():
        own = path / "task.toml"
        name = path.stem if path.is_file() else path.resolve().name
        return name, read_card(own) if own.is_file() else Card(), path
    near = difflib.get_close_matches(ref, known_tasks(), 3)
    raise InputError(
        "DATA-MISSING",
        f"'{printable(ref)}' is neither a known task nor a directory",
        likely=f"you meant {' or '.join(near)}" if near else "",
        fix="aniso task ls",
    )


def _path(ref: str) -> Path:
    try:
        path = Path(ref).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:  # too long, in the home of nobody, with a zero byte
        raise InputError(
            "DATA-MISSING",
            f"'{printable(ref)}' is not a task",
            reason=getattr(e, "strerror", None) or printable(e),
            fix="aniso task ls",
        ) from None
    if not ref:
        raise UsageError("DATA-MISSING", "the task has no name", fix="aniso task ls, or a directory")
    return path


def _no_reader(place: Path) -> InputError:
    return InputError(
        "DATA-FORMAT",
        f"'{printable(place)}' is in no layout of datasets that aniso reads",
        expected="a folder per class, *.parquet, *.csv, *.jsonl or *.tar; for texts also CLASS.txt files",
        fix="see docs/howto/tasks.md for the layouts that are read",
    )


# classes, by name


def _classes(card: Card, reading: Reading, prompts: tuple[str, ...]) -> ClassList:
    default = TEXT_PROMPTS if _kind(reading) == "texts" else card.prompts
    own = card.prompts if "prompts" in card.model_fields_set else reading.prompts
    prompts = prompts or own or default
    if card.classes:
        return ClassList(tuple(card.classes.values()), prompts)
    on_disk = dict.fromkeys(name for part in reading.parts.values() for name in part.classes)
    return ClassList(tuple(_as_words(name) for name in on_disk), prompts, reading.descriptions)


def _kind(reading: Reading) -> str:
    """What the items of a task are."""
    return next((part.items.kind for part in reading.parts.values()), "images")


def _as_words(name: str) -> str:
    """Return a folder's name as words."""
    return " ".join(name.replace("_", " ").split()) or name


def _aligned(name: str, part: Part, card: Card, classes: ClassList) -> Labelled:
    """Return a part as a split, with labels in the task's order of classes, matched by name."""
    order = list(card.classes) if card.classes else None
    if order is None:
        return Labelled(name, classes, part.items, part.codes)
    place = {on_disk: i for i, on_disk in enumerate(order)}
    used = {part.classes[code] for code in set(part.codes)}
    unknown = sorted(used - place.keys())
    if unknown:
        raise InputError(
            "DATA-CLASS",
            f"{name} has {len(unknown)} classes that its card does not list",
            found=printable(", ".join(unknown[:8])),
            expected=printable(", ".join(order[:8])) + (" …" if len(order) > 8 else ""),
            fix="add them to [classes] in the card, or use the dataset the card was written for",
        )
    return Labelled(name, classes, part.items, tuple(place[part.classes[code]] for code in part.codes))


# splits


def _default_rules(parts: Mapping[str, Part]) -> SplitRules:
    """Return the rules for data without any: its own splits, and a tenth of train as val if it has none."""
    if "train" not in parts and len(parts) == 1:
        (only,) = parts
        return (
            SplitRules(test=only)
            if only in ("val", "test")
            else SplitRules(train=only, val=_HOLDOUT, test=_THIRD)
        )
    present = {role: role for role in ROLES if role in parts}
    val = present.get("val") or (_HOLDOUT if "train" in present and len(parts["train"].codes) else None)
    return SplitRules(train=present.get("train"), val=val, test=present.get("test"))


def _split(name: str, parts: Mapping[str, Labelled], rules: SplitRules, seed: int) -> dict[str, Labelled]:
    wanted = (rules.train,) if isinstance(rules.train, str) else rules.train or ()
    made: dict[str, Labelled] = {}
    rest = joined(f"{name} train", [_part(name, parts, part) for part in wanted]) if wanted else None
    for role in ("test", "val"):  # test first, so that it does not depend on the rule for val
        rule = getattr(rules, role)
        if isinstance(rule, Carve) and rest is not None:
            cut, rest = rest.carve(role, seed, **rule.model_dump())
            made[role] = replace(cut, name=f"{name} {role}", role=role)
        elif isinstance(rule, str):
            made[role] = replace(_part(name, parts, rule), name=f"{name} {role}", role=role)
    if rest is not None:
        made["train"] = replace(rest, name=f"{name} train", role="train")
    _require_rules_work(name, rules, made)
    _require_disjoint(name, made)
    return {role: _filled(made[role]) for role in ROLES if role in made and len(made[role])}


def _require_rules_work(name: str, rules: SplitRules, made: Mapping[str, Labelled]) -> None:
    """Raise if the card's rules leave nothing of train, or need a train split that is missing."""
    carved = [role for role in ("val", "test") if isinstance(getattr(rules, role), Carve)]
    if carved and (not rules.train or not len(made["train"])):
        raise InputError(
            "DATA-SPLIT",
            f"{name}: {' and '.join(carved)} cannot be cut out of train",
            found=f"0 items left in train, {', '.join(f'{len(made[r])} {r}' for r in carved if r in made)}"
            if rules.train
            else "no train in [splits]",
            fix="correct [splits] in the card: smaller share, most or per_class",
        )


def _require_disjoint(name: str, made: Mapping[str, Labelled]) -> None:
    for a, b in combinations(made, 2):
        shared = sorted(set(made[a].ids) & set(made[b].ids))
        if shared:
            raise InputError(
                "DATA-SPLIT",
                f"{len(shared):,} {made[a].item_kind} of {name} are in both {a} and {b}",
                found=[printable(image) for image in shared[:5]],
                fix="correct [splits] in the card, or the lists of the dataset",
            )


def _part(name: str, parts: Mapping[str, Labelled], part: str) -> Labelled:
    if part not in parts:
        raise InputError(
            "DATA-SPLIT",
            f"{name} has no part '{printable(part)}'",
            found=", ".join(parts),
            fix="correct [splits] in the card, or complete the dataset",
        )
    return parts[part]


def _filled(split: Labelled) -> Labelled:
    ids = split.ids
    if len(set(ids)) != len(ids):
        seen: set[str] = set()
        twice = next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError(
            "DATA-FORMAT",
            f"{split.name} lists an item twice",
            found=printable(twice),
            fix="names and keys must be unique within a task",
        )
    return split


def _rule_notes(card: Card, rules: SplitRules, parts: Mapping[str, Part]) -> list[str]:
    if card.splits is not None:
        return []
    used = {rules.val, rules.test, *((rules.train,) if isinstance(rules.train, str) else rules.train or ())}
    unused = [
        f"{name} ({len(part.codes)} {part.items.kind})" for name, part in parts.items() if name not in used
    ]
    carved = {role: rule for role in ("test", "val") if isinstance(rule := getattr(rules, role), Carve)}
    notes = [
        f"{role}: {rule.share:.0%} of train, selected by seed" for role, rule in carved.items() if rule.share
    ]
    return [*notes, f"not used: {', '.join(unused)}"] if unused else notes


# unreadable images


def readable(
    split: Labelled, policy: OnBadImage, notes: list[str], progress: ProgressCallback | None
) -> Labelled:
    """Return the split without images that cannot be decoded; adds a note, raises if there are too many."""
    bad: list[int] = []
    first = ""
    for i in range(len(split)):
        try:
            split.open(i)
        except (InputError, UnsafeError) as e:
            bad.append(i)
            first = first or e.message
            if isinstance(policy, int) and len(bad) > policy:
                raise InputError(
                    "IMAGE-READ",
                    f"more than {policy} images of {split.name} cannot be read",
                    found=[split.items.describe(j) for j in bad[:10]],
                    fix="replace them, or raise --on-bad-image",
                ) from None
        if progress:
            progress(f"decoding {split.name}", i + 1, len(split))
    if bad:
        notes.append(f"{split.name}: left out {len(bad)} unreadable images, first: {first}")
    return split.without(bad) if bad else split
