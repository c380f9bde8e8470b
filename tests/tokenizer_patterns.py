"""Patterns of known tokenizers, characters that tell patterns apart, and patterns made at random."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from vorox.data.tokenizers.word_pattern import GPT2_PATTERN

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|(?>\p{N}{1,3})| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
"""Groups of three digits, counted from the right: where a run is cut depends on where it ends."""
PATTERNS = {
    "gpt2": GPT2_PATTERN, "llama3": LLAMA3, "cl100k": CL100K, "o200k": O200K, "kimi": KIMI, "deepseek": DEEPSEEK,
    "from the right": FROM_THE_RIGHT,
}  # fmt: skip
AWKWARD = " \n\t\r\x0b\x1c\x85\xa0a's1!é中\u3000٣\u017f\u212a\u2028😀\u0300\x00\u01c5LlT"
ANY_TEXT = st.text(st.characters(codec="utf-8")) | st.text(AWKWARD) | st.text("ab \n<|endoftext|>é😀\0's")

CLASSES = (
    r"\p{L}", r"\p{N}", r"\p{P}", r"\p{M}", r"\p{Lm}", r"\p{Han}", r"\p{^Lu}", r"\P{L}", r"\w", r"\W", r"\s", r"\D",
    r"\p{Alpha}",
)  # fmt: skip
_LITERALS = (
    *"abs'1 -_,:=!<>/~`\"#%&@;", r"\n", r"\r", r"\t", r"\.", r"\-", r"\[", r"\]", r"\\", r"\$", r"\^", r"\ "
)  # fmt: skip
_IN_BRACKETS = (
    "a-z", "0-9", "!-/", "é-ü", "一-龥", "é", "½", "-", "&", "^", "$", ".", "|", "(", "{", "[:alpha:]", "[:^space:]"
)  # fmt: skip
_CASELESS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:'s)", "'(?i:[sdmt]|ll|ve|re)", "(?i:'k|'i)", "(?i:ss)", "(?i:s)")
_QUANTIFIERS = ("?", "*", "+", "+", "*?", "+?", "??", "++", "*+", "?+", "{1,3}", "{2}", "{2,}", "{0,2}", "{2}+")
_NASTY = (
    " \n\t\r\x0b\x0c\x1c\x85\xa0abstkIi's1-_!<|>é½²中\u3000٣ſK\u2028😀\u0300\0ßﬁǅ\u200d\u0345ªⅣ\u0378.,:=&^$[](){}/\\"
)


def random_pattern(draw: random.Random, depth: int = 0) -> str:
    """A pattern that may or may not make sense to any engine."""

    def bracket(nested: int) -> str:
        body = "".join(draw.choice(draw.choice((CLASSES, _LITERALS, _IN_BRACKETS))) for _ in range(draw.randint(1, 4)))
        joined = "&&" + bracket(nested + 1) if nested < 2 and draw.random() < 0.15 else ""
        return f"[{draw.choice(('', '', '^'))}{body}{joined}]"

    def atom() -> str:
        kind = draw.random()
        if kind < 0.5:
            return draw.choice(CLASSES) if kind < 0.3 else bracket(0)
        if kind < 0.8 or depth > 2:
            return draw.choice(_LITERALS)
        if kind < 0.84:
            return draw.choice(_CASELESS)
        return f"{draw.choice(('(?:', '(?:', '(?>', '(?=', '(?!'))}{random_pattern(draw, depth + 1)})"

    def item() -> str:
        return atom() + (draw.choice(_QUANTIFIERS) if draw.random() < 0.5 else "")

    def sequence() -> str:
        return "".join(item() for _ in range(draw.randint(1, 3))) + (r"\z" if draw.random() < 0.05 else "")

    return "|".join(sequence() for _ in range(draw.randint(1, 3 if depth else 5)))


def nasty_text(draw: random.Random) -> str:
    """Characters that patterns tell apart, many of them or few of them often."""
    letters = _NASTY if draw.random() < 0.4 else draw.sample(_NASTY, draw.randint(1, 4))
    return "".join(draw.choice(letters) for _ in range(draw.randint(0, 60)))
