"""Fine-tuning on conversations: losses are those of a plain loop over the answers, on both engines, also after a kill.

The oracle is transformers: its chat template gives ids and masks, and its model a loss with labels of -100 outside of
answers, one document after the other. Losses agree to 1e-5 (relative, fp32) over 10 steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from tiny_runs import Killed, at_step, configuration, kill, result, run, use_numpy_engine
from vorox.core.schema import RunConfig
from vorox.data.provenance.queries import RunDataIndex, where
from vorox.data.tokenizers.loading import load
from vorox.experiments.tracking import read_metrics

STEPS, LENGTH, LR = 10, 48, 1e-3
CHATS = chats.conversations(60, seed=11)


def chat_configuration(directory: Path, *overrides: str) -> RunConfig:
    source = {"name": "chats", "format": "jsonl", "paths": [str(directory / "a.jsonl")], "chat_fields": ["messages"]}
    chats.write_jsonl(directory / "a.jsonl", CHATS)
    return configuration(
        directory,
        [
            f"data.sources={json.dumps([source])}", f"data.sequence_length_tokens={LENGTH}",
            'tokenizer.special_tokens=["<|im_start|>","<|im_end|>"]', f"train.num_steps={STEPS}", "log.every_steps=1",
            f"optimizer.lr={LR}", "schedule.name=constant", "schedule.warmup_steps=0", *overrides,
        ],
    )  # fmt: skip


def losses_of(directory: Path) -> list[float]:
    return [values["loss"] for values in read_metrics(directory).values() if "loss" in values]


@pytest.mark.torch
@pytest.mark.hf
def test_ten_steps_equal_a_plain_loop_over_the_answers(tmp_path: Path) -> None:
    import torch

    from backends.torch_engine.transformers_models import write_model

    transformers = pytest.importorskip("transformers")
    model = write_model(tmp_path / "model", "llama", vocab_size=264)
    outcome = run(
        chat_configuration(
            tmp_path, "model={kind: huggingface}", f"model.name_or_path={model}", "optimizer.weight_decay=0",
            "optimizer.clip_norm=1.0", "optimizer.beta2=0.95", "runtime.compile=false",
        )
    )  # fmt: skip
    oracle = chats.Oracle(tmp_path / "theirs", load(outcome.run_directory / "tokenizer"), chats.MARKED)
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    expected: list[float] = []
    with RunDataIndex.open(outcome.run_directory) as run_data:
        for step in range(1, STEPS + 1):
            total, count = torch.zeros(()), 0
            for document in (document for row in where(run_data, step) for document in row.documents):
                ids, mask = oracle(CHATS[document.ordinal])
                part = slice(document.first_token, document.first_token + document.num_tokens)
                inputs = torch.tensor([*ids, 256])[part]
                labels = torch.where(torch.from_numpy(np.append(mask, False)[part]), inputs, -100)
                labels[0] = -100
                if (labels != -100).any():
                    found = module(input_ids=inputs[None], labels=labels[None], use_cache=False)
                    total = total + found.loss * (labels != -100).sum()
                    count += int((labels != -100).sum())
            optimizer.zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            expected.append((total / count).item())
    assert losses_of(outcome.run_directory) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.jax
def test_both_engines_train_on_the_same_answers(tmp_path: Path) -> None:
    found = [
        losses_of(run(chat_configuration(tmp_path, f"backend={name}", *threads)).run_directory)
        for name, threads in (("torch", []), ("jax", ["runtime.num_threads=null"]))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(found[0]) == STEPS
    assert found[0][-1] < found[0][0]


def test_an_interrupted_run_ends_as_the_straight_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    straight = result(run(chat_configuration(tmp_path, "run.name=straight")))
    at_step(monkeypatch, 7, kill)
    config = chat_configuration(tmp_path, "run.name=killed")
    with pytest.raises(Killed):
        run(config)
    assert result(run(config)) == straight
