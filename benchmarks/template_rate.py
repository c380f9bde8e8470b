"""Build rate of a chat corpus: a template of others, which runs in a child process, against the same one in-process.

    python benchmarks/template_rate.py --conversations 20000 --rounds 5

Both build caches of the same text, in turns. The ratios of the medians are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from vorox.core.config import load_config
from vorox.data.chat.template import BUILT_IN, ChatTemplate
from vorox.data.chat.template_process import template_process
from vorox.data.corpus.corpus import prepare

WORDS = ["step", "run", "plan", "function", "of", "its", "what", "was", "lost", "can", "be", "computed", "again", "and"]
TEMPLATE = BUILT_IN["chatml"].replace("for message in messages", "for message in messages ")


def write_corpus(directory: Path, conversations: int) -> int:
    chooser = random.Random(0)
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": role, "content": " ".join(chooser.choices(WORDS, k=chooser.randint(10, 120)))}
                    for role in ("user", "assistant") * chooser.randint(1, 3)
                ]
            }
        )
        for _ in range(conversations)
    ]
    return (directory / "chats.jsonl").write_text("\n".join(lines) + "\n")


def build(directory: Path, row_tokens: int) -> tuple[float, float]:
    """Build a cache; return the seconds of wall clock, and of processor time with that of the child."""
    path = str(directory / "chats.jsonl")
    settings = {
        "data": {
            "sources": [{"name": "chats", "format": "jsonl", "paths": [path], "chat_fields": ["messages"]}],
            "cache": {"directory": str(directory / "cache")}, "sequence_length_tokens": row_tokens,
            "validation": {"held_out_fraction": 0},
        },
        "tokenizer": {
            "vocab_size": 2048, "chat_template": str(directory / "t.jinja"),
            "special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        "train": {"num_steps": 1},
    }  # fmt: skip
    (directory / "c.yaml").write_text(json.dumps(settings))
    start, before = time.perf_counter(), processor_seconds()
    prepare(load_config(directory / "c.yaml")).close()
    seconds = time.perf_counter() - start
    template_process().stop()
    return seconds, processor_seconds() - before


def processor_seconds() -> float:
    parts = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {"in-process": [], "child": []}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        size_bytes = write_corpus(directory, given.conversations)
        (directory / "t.jinja").write_text(TEMPLATE)
        build(directory, 1000)  # trains the tokenizer, which the others find
        row_tokens = 1000
        for round_ in range(given.rounds):
            for kind in seconds if round_ % 2 else reversed(seconds):
                row_tokens += 1
                with mock.patch.object(ChatTemplate, "is_own", kind == "in-process"):
                    seconds[kind].append(build(directory, row_tokens))
    wall, processor = (
        {kind: statistics.median(time[part] for time in times) for kind, times in seconds.items()} for part in (0, 1)
    )
    for kind in seconds:
        rate = size_bytes / wall[kind] / 1e6
        print(f"{kind:10} {wall[kind]:6.2f} s, {processor[kind]:6.2f} s of processor time, {rate:6.2f} MB/s")
    print(f"rate of the child against in-process: {wall['in-process'] / wall['child']:.2f}")
    print(f"processor time of the child against in-process: {processor['child'] / processor['in-process']:.2f}")


if __name__ == "__main__":
    main()
