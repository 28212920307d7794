"""``aniso push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aniso.cli import checks, show


def push(
    directory: Annotated[Path, typer.Argument(help="A directory that aniso bake wrote.")],
    repo: Annotated[str, typer.Argument(help="The repository on the hub: OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be uploaded; open no connection.")
    ] = False,
    json: show.Json = False,
) -> None:
    """Upload an exported model, with its card, to the Hugging Face Hub."""
    checks.hub_id("REPO", repo)
    checks.existing_file(directory)
    from aniso.compose.hub_push import plan_push
    from aniso.compose.hub_push import push as upload

    plan = plan_push(directory, repo, private=private)
    address = None if dry_run else upload(directory, plan)
    if json:
        show.as_json({"repo": repo, "private": private, "url": address, "files": plan.files})
        return
    show.table(("file", "size"), [(name, show.size(size)) for name, size in plan.files.items()])
    total = f"{len(plan.files)} files, {show.size(sum(plan.files.values()))}"
    show.line(f"would upload {total} to {repo}" if address is None else f"wrote {address}: {total}")
