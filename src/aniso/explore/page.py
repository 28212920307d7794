"""The page of the desk: one document with its style and module inside."""

from __future__ import annotations

import html

from aniso.errors import printable
from aniso.report.html_page import STYLE
from aniso.report.page_module import desk_style, hash_source, module_source

_BOOT = "\nstartDesk(document.getElementById('desk'));\n"


def desk_page(title: str) -> tuple[str, str]:
    """Return the page, and the content security policy that allows its own style and module alone."""
    style, script = STYLE + desk_style(), module_source() + _BOOT
    policy = (
        f"default-src 'none'; img-src data:; connect-src 'self'; style-src {hash_source(style)}; "
        f"script-src {hash_source(script)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    name = html.escape(printable(title, 200))
    return (
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: aniso explore</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div class="frame">
<main id="desk" class="desk"><h1>{name}</h1><noscript>This page needs JavaScript.</noscript></main>
</div>
<script type="module">{script}</script>
</body>
</html>
""",
        policy,
    )
