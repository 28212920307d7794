"""Who may still need what is in a buffer."""

from __future__ import annotations

from typing import final


@final
class Lease:
    """Held by a graph that may still go backward through what is in a slab's buffer."""

    done = False
