"""What a run was trained on, as Markdown in the EU's template of a public summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOT_STATED = "not stated"
KINDS = {
    "public": "2.1 Publicly available datasets",
    "private": "2.2 Private datasets obtained from third parties",
    "crawled": "2.3 Data crawled and scraped from online sources",
    "user": "2.4 User data",
    "synthetic": "2.5 Synthetic data",
    "other": "2.6 Other sources",
    None: "Sources of a kind that is not stated",
}
_MOST_FILES = 20


def markdown(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    return "\n".join(
        [
            f"# Training content of {escaped(record['general']['model'] or record['run'])}",
            "",
            f"Run {code(record['run'])} up to step {record['step']:,}. Numbers are counted from the run; the rest is "
            f"stated by the provider, or *{NOT_STATED}*.",
            *_general(record),
            "",
            "## 2. Data sources",
            *_shares(record, "kind"),
            *_shares(record, "licence"),
            *(line for kind, title in KINDS.items() for line in _kind(record, kind, title)),
            *_processing(record),
            *_proof(record),
        ]
    )


def escaped(text: str) -> str:
    """Return a text of any origin as one line of Markdown that shows it: no markup, HTML, formulas or control codes."""
    line = "".join(character if character.isprintable() else "\ufffd" for character in re.sub(r"\s+", " ", text))
    return re.sub(r"[\\`*\[\]<>|&~$]|(?<!\w)_|_(?!\w)", r"\\\g<0>", line)


def code(text: str) -> str:
    """Return a text of any origin in Markdown, as code if nothing in it could end the code."""
    return f"`{text}`" if re.fullmatch(r"[\w .:/+=@-]+", text) else escaped(text)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table of Markdown; cells are ``escaped``, unless they are known to be harmless."""
    return ["", *(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))]


def _stated(value: object) -> str:
    return escaped(str(value)) if value else NOT_STATED


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _general(record: Mapping[str, Any]) -> list[str]:
    general, steps = record["general"], record["steps"]
    unknown = steps["not_known_to_be_finite"]
    rows = [
        ["Provider", _stated(general["provider"])],
        ["Model", _stated(general["model"])],
        ["Initial weights", escaped(general["initial_weights"] or "none: trained from scratch")],
        ["Modalities", ", ".join(general["modalities"])],
        ["Size of the training data", general["size_range"]],
        ["Distinct tokens", f"{general['distinct_tokens']:,}"],
        ["Tokens with repetitions", f"{general['tokens']:,}"],
        ["Documents", f"{general['documents']:,}"],
        ["Languages", _stated(", ".join(general["languages"]))],
        ["Run started", _stated(general["run_started_at"])],
        ["Run ended", _stated(general["run_ended_at"])],
        [
            "Steps",
            f"{steps['applied']:,} applied, {steps['loss_spikes_skipped']:,} skipped as loss spikes, "
            f"{steps['not_finite']:,} not finite"
            + (f", {unknown:,} applied ones not known to be finite: they are not in the chain" if unknown else ""),
        ],
    ]
    lines = ["", "## 1. General information", *table(["", ""], rows)]
    if general["initial_weights"]:
        lines += ["", "The training content of the initial weights is not part of this record."]
    return lines


def _shares(record: Mapping[str, Any], key: str) -> list[str]:
    rows = [[_stated(entry[key]), f"{entry['tokens']:,}", _percent(entry["share"])] for entry in record["shares"][key]]
    return table([key.capitalize(), "Tokens", "Share"], rows)


def _kind(record: Mapping[str, Any], kind: str | None, title: str) -> Iterator[str]:
    sources = [source for source in record["sources"] if source["kind"] == kind]
    if sources or kind is not None:
        yield from ("", f"### {title}")
        yield from () if sources else ("", "No source is stated to be of this kind.")
    for source in sources:
        yield from _source(source)


def _source(source: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"#### {escaped(source['name'])}")
    location = source["location"]
    rows = [
        ["Description", _stated(source["description"])],
        ["Licence", _stated(source["licence"])],
        ["Acquired", _stated(source["acquired"])],
        ["Location", "not in a recorded configuration" if location is None else escaped(_pairs(location))],
        ["Share of tokens", _percent(source["share"])],
        ["Tokens with repetitions", f"{source['tokens']:,}"],
        ["Distinct tokens", f"{source['distinct_tokens']:,}"],
        ["Documents", f"{source['documents']:,}"],
        ["Epochs", f"{source['epochs']:.2f}"],
        ["Files read", f"{len(source['files']):,} of {source['num_source_files']:,}"],
        ["Hash of the files read", f"`{source['files_sha256']}` (SHA-256)"],
        ["Hash of the rows", f"`{source['content_sha256']}` (SHA-256)" if source["content_sha256"] else "cache grows"],
        ["Unreadable records", f"{source['quarantined_records']:,}"],
        ["Held out of training", escaped(_pairs({k: v for k, v in source["held_out"].items() if k != "name"}))],
    ]
    if source["hosts"]:
        hosts = ", ".join(f"{host} {count:,}" for host, count in source["hosts"].items())
        rows.append(["Hosts by tokens", escaped(hosts)])
    yield from table(["", ""], rows)
    files = sorted(source["files"], key=lambda file: -file["tokens"])
    yield from table(
        ["File", "Documents", "Tokens", "Version"],
        [
            [escaped(file["uri"]), f"{file['documents']:,}", f"{file['tokens']:,}", code(file["version"])]
            for file in files[:_MOST_FILES]
        ],
    )
    if len(files) > _MOST_FILES:
        yield from ("", f"And {len(files) - _MOST_FILES:,} more files, listed with `--json`.")


def _pairs(values: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in values.items()
    )


def _processing(record: Mapping[str, Any]) -> list[str]:
    processing = record["processing"]
    rows = [
        [escaped(source["name"]), f"{index}. {escaped(transform['name'])}", *_counts(transform["counts"])]
        for source in record["sources"]
        for index, transform in enumerate(source["transforms"], 1)
    ]
    applied = table(["Source", "Transform", "Documents in", "Removed", "Added"], rows) if rows else ["", "None."]
    return [
        "",
        "## 3. Data processing",
        *table(
            ["", ""],
            [
                ["Opt-outs and other rights", _stated(processing["copyright"])],
                ["Removal of illegal content", _stated(processing["illegal_content"])],
                ["Other", _stated(processing["other"])],
            ],
        ),
        "",
        "Filters, deduplication and other transforms of the whole sources:",
        *applied,
        *_contamination(record["contamination"]),
    ]


def _contamination(found: Sequence[Mapping[str, Any]]) -> list[str]:
    if not found:
        return []
    rows = [
        [
            escaped(one["evaluation_set"]),
            *(f"{one[key]:,}" for key in ("records", "short_records", "contaminated", "mostly_contaminated")),
        ]
        for one in found
    ]
    ngram = f"{found[0]['ngram_tokens']} tokens or more in sequence"
    titles = ["Evaluation set", "Records", "Too short", "Share tokens", "Share most tokens"]
    return ["", f"Records of evaluation sets that share {ngram} with a row:", *table(titles, rows)]


def _counts(counts: Mapping[str, int] | None) -> list[str]:
    return ["not counted"] * 3 if counts is None else [f"{counts[key]:,}" for key in ("inputs", "removed", "added")]


def _proof(record: Mapping[str, Any]) -> list[str]:
    proof, run = record["proof"], record["run"]
    rows = [
        ["Plan of the data", f"`{proof['plan_sha256']}` (SHA-256, {proof['plan_events']:,} events)"],
        ["Replay chain", f"`{proof['chain_head']}`" if proof["chain_head"] else "not recorded"],
        ["Damage of the chain", escaped(proof["chain_damage"] or "none")],
        ["Checkpoint", proof["checkpoint"] or "none at this step"],
        ["Fingerprint of the checkpoint", f"`{proof['checkpoint_fingerprint']}`" if proof["checkpoint"] else "none"],
    ]
    command = code(f"vorox replay {run} --to {record['step']}")
    verify = f"{command} repeats the steps and compares every link of the chain."
    return ["", "## Proof", *table(["", ""], rows), "", verify]
