"""The desk in a notebook: the same module and the same requests, as messages of a widget."""

from __future__ import annotations

import json
import threading
from typing import Any

from aniso.errors import AnisoError, UsageError
from aniso.explore.desk import Desk
from aniso.explore.requests import REQUESTS, InvalidRequestError
from aniso.json_value import JsonObject, as_object
from aniso.report.html_page import COLOURS
from aniso.report.page_module import desk_style, module_source

_FRAME = """
.desk { color: var(--ink); background: var(--ground); border-radius: 10px;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.desk, .desk * { box-sizing: border-box; }
"""


def widget_style() -> str:
    """Return the style of the desk for its own element alone, whatever the notebook's page looks like."""
    return (COLOURS + desk_style()).replace(":root", ".desk") + _FRAME


def desk_widget(desk: Desk) -> Any:
    """Return a widget that shows a desk in Jupyter, Colab, VS Code or marimo; needs ``aniso[notebook]``::

    desk_widget(open_desk(DeskOptions("mini", task="photos/")))
    """
    try:
        import anywidget
    except ImportError:
        raise UsageError(
            "MODEL-LIBRARY",
            "the widget needs anywidget, which is not installed",
            fix="pip install 'aniso[notebook]'",
        ) from None
    kind = type("DeskWidget", (anywidget.AnyWidget,), {"_esm": module_source(), "_css": widget_style()})
    widget = kind()
    threading.Thread(target=desk.compute_geometry, name="aniso-geometry", daemon=True).start()
    widget.on_msg(lambda _, message, buffers: widget.send(*reply(desk, message)))
    return widget


def reply(desk: Desk, message: object) -> tuple[JsonObject, list[bytes]]:
    """Return the answer to a message of the page, and a file if it asked for one."""
    request = as_object(message)
    number, kind = request.get("id"), REQUESTS.get(str(request.get("path")))
    try:
        if kind is None:
            raise InvalidRequestError("there is no such request")
        found = kind.run(desk, json.dumps(request.get("body")).encode())
    except InvalidRequestError as e:
        return {"id": number, "problem": str(e)}, []
    except AnisoError as e:
        return {"id": number, "problem": f"{e.message}: {e.fix}"}, []
    if isinstance(found, bytes):
        return {"id": number}, [found]
    return {"id": number, "answer": found}, []
