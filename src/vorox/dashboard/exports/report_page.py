"""A run as one HTML page for print: results, curves, data, samples, checkpoints, settings.

A run directory and its metrics go in; a page without scripts, links or requests comes out, the same for the same files.
What a run can contain, such as samples, is escaped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vorox.core.errors import VoroxError
from vorox.dashboard.exports.plotting import draw_runs
from vorox.dashboard.metrics.series import MetricSeries
from vorox.dashboard.pages import run_pages
from vorox.dashboard.pages.data_pages import DataPages
from vorox.dashboard.runs.run_index import environment_of
from vorox.experiments.artifacts import RunSummary, inspect_run
from vorox.experiments.comparison import COMMON_METRICS

_UNKNOWN = "-"
_WRITTEN_UNITS = ("1", "bytes", "fraction")
"""Units without an entry in the column of units: they are written beside the number, or there is none."""
_MAX_SAMPLES = 4
"""Samples of each prompt, evenly distributed over the run."""
_FACTS = (
    "backend", "model.kind", "model.family", "model.name_or_path", "model.num_layers", "model.hidden_size",
    "tokenizer.kind", "data.sequence_length_tokens", "train.num_steps", "train.global_batch_sequences",
    "optimizer.name", "optimizer.lr", "schedule.name", "precision.dtype", "parallel.kind", "run.seed",
)  # fmt: skip
"""Settings at the top of the page."""
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; break-after: avoid }
p { margin: .3rem 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e8e8e8 }
th { font-weight: 600; white-space: nowrap }
tr, svg { break-inside: avoid }
td { overflow-wrap: anywhere }
pre, code { font: 12px/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
pre { margin: 0 }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .1rem 1.5rem; margin: 0 }
.facts div { display: flex; justify-content: space-between; gap: 1rem; border-bottom: 1px solid #e8e8e8 }
.facts dt { color: #555 }
.facts dd { margin: 0; text-align: right; overflow-wrap: anywhere }
.settings { columns: 3 15rem }
svg { width: 100%; height: auto }
.curves { overflow-x: auto }
@media screen and (max-width: 40rem) { table { display: block; overflow-x: auto } .curves svg { width: 40rem } }
@page { margin: 15mm }
@media print { body { font-size: 10pt; margin: 0; max-width: none; padding: 0 } }
"""
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""


def page(directory: Path, series: MetricSeries, *, smoothing: float | None = None) -> str:
    """Return the page of a run. It works on damaged, unfinished and running runs.

    Args:
        directory: The run directory.
        series: The metrics of the run.
        smoothing: Weight of the moving average of loss and throughput; ``None`` chooses it by the number of points.
    """
    overview, summary = run_pages.overview(directory), inspect_run(directory)
    config = overview["config"]
    parts = [_header(summary, overview["attempts"], series)]
    if summary.failure is not None and summary.state != "running":
        parts.append(_section("Failure", _facts({key: summary.failure.get(key) for key in ("what", "where", "hint")})))
    parts.append(_section("Main settings", _facts(_main_settings(config)) or _text(overview["config_problem"])))
    parts.append(_section("Curves", _curves(summary.run_id, series, smoothing)))
    parts.append(_section("Results", _results(series)))
    parts.append(_section("Data", _data(directory, series.last_step)))
    parts.append(_section("Samples", _samples(directory)))
    parts.append(_section("Checkpoints", _checkpoints(directory)))
    parts.append(_section("Environment", _facts(environment_of(directory))))
    parts.append(_section("Attempts", _attempts(overview["attempts"])))
    if config is not None:
        settings = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        parts.append(_section("All settings", f'<pre class="settings">{escape(settings)}</pre>'))
    head = _HEAD.format(title=escape(summary.run_id), style=_STYLE)
    return f"{head}{''.join(parts)}</body>\n</html>\n"


def _header(summary: RunSummary, attempts: Sequence[Mapping[str, Any]], series: MetricSeries) -> str:
    tokens = series.tokens_at(np.array([series.last_step]))[0]
    total = _UNKNOWN if summary.total_steps is None else f"{summary.total_steps:,}"
    line = f"{summary.state}, step {summary.step:,} of {total}" + (f", {tokens:,.0f} tokens" if tokens > 0 else "")
    commands = "".join(f"<p><code>{escape(' '.join(map(str, one['argv'] or ())))}</code></p>" for one in attempts[-1:])
    return f"<h1>{escape(summary.run_id)}</h1>\n{_text(line)}\n{commands}\n"


def _main_settings(config: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in _FACTS if config is not None else ():
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        found[key] = value
    return found


def _curves(run_id: str, series: MetricSeries, smoothing: float | None) -> str:
    if not series.names:
        return _text("No metrics are recorded.")
    svg = draw_runs({run_id: series}, "svg", smoothing=smoothing).decode()
    return f'<div class="curves">{svg[svg.index("<svg") :]}</div>'


def _results(series: MetricSeries) -> str:
    rows: list[list[str]] = []
    for name in COMMON_METRICS:
        steps, values = series.points(name)
        finite = np.flatnonzero(np.isfinite(values))
        if not finite.size:
            continue
        known = run_pages.definition(name)
        best = {"lower": np.argmin, "higher": np.argmax}.get(known["better"] or "")
        at = [finite[-1]] + ([] if best is None else [finite[best(values[finite])]])
        unit = str(known["unit"])
        cells = [f"{_in_unit(float(values[index]), unit)} (step {steps[index]:,})" for index in at]
        rows.append([name, "" if unit in _WRITTEN_UNITS else unit, *cells, *([""] * (2 - len(cells)))])
    return _table(["metric", "unit", "last", "best"], rows)


def _data(directory: Path, step: int) -> str:
    data = DataPages()
    try:
        sources = data.mixture(directory, step)["sources"]
    except (VoroxError, OSError) as error:
        return _text(str(error))
    finally:
        data.close()
    titles = ["source", "requested", "sampled", "epochs", "rows sampled", "rows", "not padding"]
    rows = [
        [
            source["name"],
            _percent(source["requested_fraction"]),
            _percent(source["sampled_fraction"]),
            _UNKNOWN if source["epochs"] is None else f"{source['epochs']:.3g}",
            f"{source['rows_sampled']:,}",
            f"{source['rows']:,}" + ("" if source["is_complete"] else " so far"),
            _percent(source["packed_fraction"]),
        ]
        for source in sources
    ]
    return _table(titles, rows)


def _samples(directory: Path) -> str:
    found = run_pages.samples(directory)
    steps: list[int] = found["steps"]
    last = len(steps) - 1
    spread = sorted({round(index * last / (_MAX_SAMPLES - 1)) for index in range(_MAX_SAMPLES)}) if steps else []
    rows = [
        [prompt["prompt"], f"{steps[index]:,}", prompt["texts"][index]]
        for prompt in found["prompts"]
        for index in spread
        if prompt["texts"][index] is not None
    ]
    return _table(["prompt", "step", "completion"], rows, preformatted=(0, 2))


def _checkpoints(directory: Path) -> str:
    rows = [
        [
            f"{entry['step']:,}",
            entry["state"],
            _UNKNOWN if entry["eval_loss"] is None else f"{entry['eval_loss']:.4f}",
            f"{entry['size_bytes'] / 1e6:,.1f} MB",
            entry["fingerprint"],
        ]
        for entry in run_pages.checkpoints(directory)["checkpoints"]
    ]
    return _table(["step", "state", "validation loss", "size", "fingerprint"], rows)


def _attempts(attempts: Iterable[Mapping[str, Any]]) -> str:
    rows: list[list[str]] = []
    for attempt in attempts:
        code = attempt["code"] or {}
        commit = f"{str(code.get('commit') or _UNKNOWN)[:10]}{' with changes' if code.get('dirty') else ''}"
        times = [str(attempt[key] or _UNKNOWN) for key in ("started_at", "ended_at")]
        rows.append([str(attempt["attempt"]), *times, str(attempt["outcome"] or _UNKNOWN), commit])
    return _table(["attempt", "started", "ended", "outcome", "commit"], rows)


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body or _text('None.')}\n</section>\n"


def _text(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _facts(values: Mapping[str, Any]) -> str:
    rows = [
        f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in values.items()
        if value is not None
    ]
    return f'<dl class="facts">{"".join(rows)}</dl>' if rows else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, preformatted: Collection[int] = ()) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = [
        "".join(
            f"<td><pre>\n{escape(cell)}</pre></td>" if column in preformatted else f"<td>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        )
        for row in rows
    ]
    return "\n".join([f"<table><tr>{head}</tr>", *(f"<tr>{line}</tr>" for line in lines), "</table>"])


def _in_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return _percent(value) if unit == "fraction" else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.5g}"


def _percent(fraction: float | None) -> str:
    return _UNKNOWN if fraction is None else f"{fraction:.1%}"
