"""One self-contained HTML file of some runs: the page of the dashboard with its answers inside.

The page's styles and modules and the answers of the server for each run go in; a file that opens from disk, without
any request, comes out. The modules are concatenated in the order of their imports; their names are distinct.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parents[1] / "static"
_IMPORT = re.compile(r'^import\s.*?from\s+"(\./[^"]+|\.\./[^"]+)";\n', re.MULTILINE | re.DOTALL)
_CHARTS = STATIC / "vendor" / "uplot" / "uPlot.iife.min.js"
_STYLES = (STATIC / "vendor" / "uplot" / "uPlot.min.css", STATIC / "style.css")


def page(answers: Mapping[str, Any]) -> str:
    """Return the self-contained page.

    Args:
        answers: The server's answer by request path, as the page requests it.
    """
    styles = "\n".join(path.read_text(encoding="utf-8") for path in _STYLES)
    charts, program = _CHARTS.read_text(encoding="utf-8"), joined_modules()
    scripts = " ".join(_hash(text) for text in (charts, program))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(styles)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    data = json.dumps(answers, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    shell = (STATIC / "index.html").read_text(encoding="utf-8")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>'
    shell = re.sub(r"<link rel=\"stylesheet\"[^>]*>\n?", "", shell)
    shell = re.sub(r"<script [^>]*></script>\n?", "", shell)
    body = (
        f'<script type="application/json" id="snapshot">{data}</script>\n'
        f'<script>{charts}</script>\n<script type="module">{program}</script>\n</body>'
    )
    return shell.replace("</head>", head + "\n</head>").replace("</body>", body)


def joined_modules() -> str:
    """Return all modules of the page as one, in the order of their imports."""
    done: dict[Path, str] = {}

    def add(path: Path) -> None:
        if path in done:
            return
        text = path.read_text(encoding="utf-8")
        for name in _IMPORT.findall(text):
            add((path.parent / name).resolve())
        done[path] = re.sub(
            r"^export (?=function|const|let|class|async)", "", _IMPORT.sub("", text), flags=re.MULTILINE
        )

    add((STATIC / "main.js").resolve())
    return "\n".join(done.values())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
