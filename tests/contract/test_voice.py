"""Phrases that read as translated occur neither in the package, its help and messages nor in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src/vorox", "docs", "configs", "examples")
PAGES = [
    *sorted(
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".yaml"}
    ),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
PHRASES = (
    r"\bwhoever\b|\bwhatever\b|\bwherever\b",
    r"\bas the case may be\b",
    r"\bfor ever\b",
    r"\bin the same breath\b",
    r"\bthe talk of\b|\bits talk with\b",
    r"\bcomes? to (?:nothing|the|a|an|be)\b|\bwhat \w+(?: \w+){0,3} comes? to\b",
    r"\bbr(?:ings?|ought|inging) back\b",
    r"\b(?:is|are|was|were|be|been) told\b|\btold (?:of|to|by|that|what|how|the|it|them)\b",
    r"\btells? (?:it|them|the|of|a|an|what|which|whether|how)\b",
    r"\b(?:is|are|was|were|be) (?:said|asked)\b|\bsaid (?:aloud|so|to|by|in|once|here|before|on|with)\b",
    r"\btaken (?:as|for)\b|\btakes? (?:it|them) (?:as|for)\b",
    r"\b(?:put|set) aside\b",
    r"\bg(?:oes|one|oing|o|ent) on (?:with|as|without|from|until|where)\b",
    r"\bwhat (?:becomes|became) of\b",
    r"\bstands? (?:in|for|on|at|there|here|alone|where|under|beside|before|after|twice|once)\b|\bstood in\b",
    r"\bwhere a run stands\b|\bstands still\b",
    r"\b(?:is|are|was|were) (?:another|no) \w+ (?:one )?(?:than|as) (?:before|the)\b|\banother (?:one )?than\b",
    r"\bmade anew\b|\banew\b",
    r"\bdid not answer rightly\b|\brightly\b",
    r"\bone after the other\b|\bone after another\b",
    r"\bby heart\b|\bnobody\b|\bno ?body (?:else|asks|waits|reads|wants)\b",
    r"\bsomebody\b|\bsomeone\b",
    r"\beverybody\b",
    r"\bof its own accord\b|\bof itself\b",
    r"\bat the door\b|\bthe house\b|\bin the house\b",
    r"\blest\b|\bhence\b|\bthereof\b|\btherein\b|\bwhereof\b|\bthereby\b",
    r"\bgives? up on\b",
    r"\bbelongs? together\b",
    r"\bkeeps? (?:its|their) promise",
    r"\bhanded (?:out|on|over|to|in)\b|\bhands? (?:it|them) (?:on|over|out|to)\b",
    r"\bdrawn from\b",
    r"\bbe(?:gun|gan|gins?) (?:again|anew)\b",
    r"\bcuts? (?:into|off|up)\b",
    r"\bthat which\b|\bthose which\b",
    r"\bno more than what\b",
    r"\bthis is no \w+",
    r"\bthere is no such\b",
    r"\bis no (?:address|file|folder|directory|path|number|text|word|name|key|verdict|error|fault)\b",
    r"\bis no (?:run|checkpoint|cache|source|row|step|unit|record|list|mapping)\b",
    r"\bmay not be (?:had|read)\b|\bto be had\b",
    r"\bmade of it\b|\bmade out of\b",
    r"\bcalled for\b|\basked for\b",
    r"\bnot yet there\b|\bis there (?:already|yet)\b",
    r"\blies? (?:in|there|here|under|on|beside|at)\b|\blay in\b|\blying in\b",
    r"\bsays? (?:so|it|where|what|which|how|why|that|when|whether)\b",
    r"\bwaits? for it to\b",
    r"\bat hand\b|\bby hand of\b",
    r"\bof (?:old|before)\b",
    r"\bupon\b|\bamong(?:st)? them(?:selves)?\b",
    r"\bthe one that (?:was|is) before\b",
    r"\bmend(?:s|ed|ing)?\b",
    r"\bgrown(?:-up)?\b(?! (?:cache|source|run|corpus|mixture))",
    r"\bwritten down\b|\bnoted down\b",
    r"\bleft (?:over|behind)\b",
    r"\bfrom then on\b|\bfrom here on\b|\bfrom now on\b",
    r"\b(?:is|are) (?:therefore )?(?:that|those) of\b",
    r"\b(?:models?|architectures?) of transformers\b",
    r"\bno case\b|\btold apart\b|\bis begun\b",
    r"\bgo(?:es)? on\b(?! after \{counts)",  # a text that data plans record, byte for byte
    r"\bin vain\b|\bfor good\b|\bat once\b",
)
RULED_OUT = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES), re.IGNORECASE)


def test_prose_is_plain() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: [{match[0]}] {line.strip()}"
        for path in PAGES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in RULED_OUT.finditer(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "sentence",
    ["Whoever asks is told.", "It goes on from step 5.", "what a unit comes to", "kept for ever", "this is no address"],
)
def test_phrases_are_found(sentence: str) -> None:
    assert RULED_OUT.search(sentence)
