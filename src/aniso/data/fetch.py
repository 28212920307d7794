"""Getting data: by torchvision's own downloaders, or from the hub."""

from __future__ import annotations

from pathlib import Path

from aniso.data.card import known_card, known_tasks
from aniso.data.readers import fetch
from aniso.errors import UsageError, printable
from aniso.weights.hub import fetch_dataset, looks_like_hub_id


def fetch_task(name: str, root: Path) -> str:
    """Download a known task, or a data set's tables by its hub id; returns what to load it by."""
    if name not in known_tasks():
        if not looks_like_hub_id(name):
            raise UsageError(
                "DATA-MISSING",
                f"'{printable(name)}' is neither a known task nor a data set's hub id",
                fix="aniso task ls, or owner/name",
            )
        return str(fetch_dataset(name, root / name.partition("@")[0].rpartition("/")[2]))
    card = known_card(name)
    by_hand = card.reader.get("fetch")
    if card.kind != "torchvision" or by_hand:
        raise UsageError(
            "DATA-MISSING",
            f"{card.title} cannot be downloaded by a program",
            homepage=card.homepage,
            fix=str(by_hand or f"download it from its home page into {root / name}"),
        )
    root.mkdir(parents=True, exist_ok=True)
    fetch(card.kind, root, card.settings)
    return name
