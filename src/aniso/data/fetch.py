"""Download of datasets, by torchvision or from the hub."""

from __future__ import annotations

from pathlib import Path

from aniso.data.card import known_card, known_tasks
from aniso.data.readers import fetch
from aniso.errors import UsageError, printable
from aniso.weights.hub import fetch_dataset, looks_like_hub_id


def fetch_task(name: str, root: Path) -> str:
    """Download a known task, or the tables of a dataset on the hub; returns the argument for load_task."""
    if name not in known_tasks():
        if not looks_like_hub_id(name):
            raise UsageError(
                "DATA-MISSING",
                f"'{printable(name)}' is neither a known task nor a dataset's hub id",
                fix="aniso task ls, or owner/name",
            )
        return str(fetch_dataset(name, root / name.partition("@")[0].rpartition("/")[2]))
    card = known_card(name)
    by_hand = card.reader.get("fetch")
    if card.kind != "torchvision" or by_hand:
        raise UsageError(
            "DATA-MISSING",
            f"{card.title} cannot be downloaded automatically",
            homepage=card.homepage,
            fix=str(by_hand or f"download it from its home page into {root / name}"),
        )
    root.mkdir(parents=True, exist_ok=True)
    fetch(card.kind, root, card.settings)
    return name
