"""DPO: losses are those of a plain loop with transformers, and a killed run ends as the straight one.

The oracle computes each conversation alone: log-probabilities of its answer under the model and under a frozen copy of
its first weights, then ``-log sigmoid(beta (chosen - rejected))`` averaged over the pairs of a step. Over 20 steps,
losses of fp32 agree to 1e-5 (relative) and rewards to 1e-4 with an oracle in float64: log-probabilities are sums of up
to a thousand, and a small loss is what remains of their differences.
"""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
import tiny_runs
from small_configurations import SMOOTH_EPS
from vorox.api.model import load_model
from vorox.cli import main
from vorox.core.files.json_lines import read_lines
from vorox.data.provenance.queries import RunDataIndex, where
from vorox.data.tokenizers.loading import load
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import read_chain

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.hf,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft calls it
]
BETA, LR, END = 0.3, 1e-3, 256
NATIVE = ("model={}", "--from-weights", "base")
HUGGINGFACE = ("model={kind: huggingface, name_or_path: base}",)


def write_pairs(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Two sources: pairs of conversations, some of several turns, and pairs of texts; the first of each is too long."""
    chooser = random.Random()
    records: dict[str, list[dict[str, Any]]] = {"talks": [], "texts": []}
    for number in range(31):
        longer = " and on" * 40 * (number == 0)
        answers = [f"{word}{chats.text(chooser, 2)}{longer}" for word in ("good", "bad")]
        asked = [{"role": "user", "content": chats.text(chooser, 1)}]  # short enough for a row, whatever is drawn
        if number % 3 == 0:
            asked += [{"role": "assistant", "content": chats.text(chooser, 1)}, *asked]
        messages = [[{"role": "assistant", "content": answer}] for answer in answers]
        records["talks"].append({"prompt": asked, "chosen": messages[0], "rejected": messages[1]})
        prompt = chats.text(chooser, 3)
        records["texts"].append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    for name, pairs in records.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return records


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """A directory with a model, preference pairs and ``tiny.yaml``."""
    from backends.torch_engine.transformers_models import write_model  # imports torch

    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base", "llama", vocab_size=264, max_position_embeddings=256)
    tiny_runs.configuration(tmp_path)
    settings = json.loads((tmp_path / "tiny.yaml").read_text())
    fields = {"format": "jsonl", "chat_fields": ["prompt", "chosen", "rejected"], "preference_pairs": True}
    fields["bad_record_fraction"] = 0.1
    settings["data"]["sources"] = [{"name": name, "paths": [f"{name}.jsonl"], **fields} for name in ("talks", "texts")]
    settings["data"]["sequence_length_tokens"] = 256
    settings |= {"model": {}, "loss": {"name": "dpo", "dpo_beta": BETA}}
    settings["tokenizer"] = {"kind": "byte", "special_tokens": ["<|im_start|>", "<|im_end|>"]}
    settings["optimizer"] = {"lr": LR, "weight_decay": 0.0, "eps": SMOOTH_EPS}
    settings["schedule"] = {"name": "constant", "warmup_steps": 0}
    settings["log"] = {"every_steps": 1, "matmul_peak": False}
    (tmp_path / "tiny.yaml").write_text(json.dumps(settings))
    return write_pairs(tmp_path)


def train(name: str, *overrides: str) -> Path:
    assert main(["train", "tiny.yaml", "backend=torch", f"run.name={name}", *overrides]) == 0
    return next(Path("runs").glob(f"{name}-*"))


class Oracle:
    """Ids and targets of the conversations of a record, by transformers."""

    def __init__(self, run: Path, pairs: dict[str, list[dict[str, Any]]]) -> None:
        ours = load(run / "tokenizer")
        self._chat = chats.Oracle(Path("theirs"), ours, chats.MARKED)
        self._tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained("theirs")
        self._pairs = pairs

    def __call__(self, source: str, ordinal: int) -> list[tuple[list[int], np.ndarray]]:
        pair = self._pairs[source][ordinal]
        return [self._conversation(pair["prompt"], pair[name]) for name in ("chosen", "rejected")]

    def _conversation(self, prompt: Any, answer: Any) -> tuple[list[int], np.ndarray]:
        if isinstance(prompt, str):
            found = self._tokenizer(prompt + answer, return_offsets_mapping=True, add_special_tokens=False)
            ends = [end for _, end in found["offset_mapping"]]
            return [*found["input_ids"], END], np.array([*(end > len(prompt) for end in ends), True])
        ids, mask = self._chat([*prompt, *answer])
        mask = mask.copy()
        mask[: np.flatnonzero(np.diff(mask.astype(int)) == 1)[-1] + 1] = False  # only the last answer
        return ids, mask


def log_prob(module: Any, ids: list[int], targets: np.ndarray) -> Any:
    import torch

    tokens = torch.tensor(ids)
    logits = module(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    found = torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None])[:, 0]
    return found[torch.from_numpy(targets[1:])].sum()


def rewards_of(run: Path, oracle: Oracle, step: int, policy: Any, reference: Any) -> Any:
    """The rewards of the chosen and rejected answers of a step's pairs, ``[pairs, 2]``."""
    import torch

    rows = []
    with RunDataIndex.open(run) as run_data:
        for row in where(run_data, step):
            for chosen, rejected in zip(row.documents[::2], row.documents[1::2], strict=True):
                assert (chosen.ordinal, chosen.first_token) == (rejected.ordinal, 0)
                halves = oracle(row.source, chosen.ordinal)
                assert [len(ids) for ids, _ in halves] == [chosen.num_tokens, rejected.num_tokens]
                assert rejected.first_token == chosen.num_tokens
                with torch.no_grad():
                    before = [log_prob(reference, *half) for half in halves]
                rows.append([BETA * (log_prob(policy, *half) - old) for half, old in zip(halves, before, strict=True)])
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("model", [HUGGINGFACE, NATIVE], ids=["huggingface", "native"])
def test_twenty_steps_equal_a_plain_loop(model: tuple[str, ...], pairs: dict[str, list[dict[str, Any]]]) -> None:
    import torch

    run = train("dpo", "train.num_steps=20", "eval.every_steps=10", "checkpoint.every_steps=20", *model)
    oracle = Oracle(run, pairs)
    policy: Any = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float64).train()
    reference = copy.deepcopy(policy).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), eps=SMOOTH_EPS, weight_decay=0)
    metrics = read_metrics(run)
    for step in range(1, 21):
        rewards = rewards_of(run, oracle, step, policy, reference)
        margins = rewards[:, 0] - rewards[:, 1]
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        found = metrics[step]
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["rewards/margin"] == pytest.approx(margins.mean().item(), abs=1e-4)
        assert found["rewards/chosen"] == pytest.approx(rewards[:, 0].mean().item(), abs=1e-4)
        assert found["rewards/accuracy"] == pytest.approx((margins > 0).float().mean().item(), abs=1 / 64)
        assert "perplexity" not in found
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    assert metrics[1]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics[20]["loss"] < 0.5
    assert metrics[20]["eval/pairs"] > 0
    assert metrics[20]["eval/loss"] < metrics[10]["eval/loss"] < np.log(2)
    reasons = [line["reason"] for path in Path("cache").rglob("quarantine/*.jsonl") for line in read_lines(path)]
    assert len(reasons) == 2, "the two pairs that fit no row"
    assert all("more than the 257 of a row" in reason for reason in reasons)


def test_a_killed_run_ends_as_the_straight_one_and_another_reference_is_refused(
    pairs: dict[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vorox.backends.torch_engine.engine import TorchEngine

    settings = ["train.num_steps=6", "checkpoint.every_steps=3", *NATIVE]
    whole = train("whole", *settings)
    original = TorchEngine.train_step

    def train_step(self: Any, batch: Any, **kwargs: float) -> Any:
        if batch.step == 4:
            tiny_runs.kill()
        return original(self, batch, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(TorchEngine, "train_step", train_step)
        with pytest.raises(tiny_runs.Killed):
            train("killed", *settings)
    killed = train("killed", *settings)
    chains = [[entry.chain for entry in read_chain(run).values()] for run in (whole, killed)]
    assert len(chains[0]) == 6
    assert chains[0] == chains[1]
    assert main(["replay", "killed", "--from", "3", "--to", "6"]) == 0

    manifest = json.loads((killed / "checkpoints" / "step-00000006" / "MANIFEST.json").read_bytes())["metadata"]
    weights = Path("base/model.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    shutil.move(weights, "kept")
    weights.write_bytes(damaged)
    capsys.readouterr()
    for command in (["train", "--resume", "killed", "train.num_steps=8"], ["replay", "killed", "--from", "3"]):
        assert main(command) != 0
        message = capsys.readouterr().err
        assert f"Reference model has changed: the run started from weights {manifest['reference'][:16]}" in message
    assert load_model("killed").logits(np.zeros((1, 4), np.int32)).shape == (1, 4, 264), "it needs no reference"
    shutil.move("kept", weights)
    assert main(["train", "--resume", "killed", "train.num_steps=8"]) == 0


def test_a_reference_outlives_the_retention_and_the_removal_of_its_run(
    pairs: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = train("first", "train.num_steps=4", "checkpoint.every_steps=4", "checkpoint.keep_last=1", *NATIVE)
    second = train("second", "train.num_steps=4", "model={}", "--from-weights", str(first))
    assert main(["train", "--resume", "first", "train.num_steps=12"]) == 0
    kept = {path.name for path in (first / "checkpoints").iterdir()}
    assert kept == {"step-00000004", "step-00000012"}, "one for the run itself, one for the other"
    assert main(["train", "--resume", "second", "train.num_steps=8"]) == 0, "from the reference that it began with"
    assert main(["replay", "second"]) == 0
    capsys.readouterr()
    for command in (["runs", "remove", "first", "--yes"], ["checkpoints", "remove", "first", "4", "--yes"]):
        assert main(command) != 0
        assert f"is the base or the reference of {second.absolute()}" in capsys.readouterr().err
    assert main(["checkpoints", "remove", "first", "12", "--yes"]) == 0
    assert main(["runs", "remove", "second", "--yes"]) == 0
    assert main(["runs", "remove", "first", "--yes"]) == 0


def test_the_reference_of_an_adapter_is_its_base(pairs: dict[str, list[dict[str, Any]]]) -> None:
    """Each loss follows from the model of the checkpoint before it and from the base without an adapter."""
    import torch

    pytest.importorskip("peft")
    run = train("mine", "adapter.kind=lora", "train.num_steps=6", "checkpoint.every_steps=5", *HUGGINGFACE)
    oracle = Oracle(run, pairs)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32).eval()
    trained = load_model("mine", step=5)

    class Policy:
        def __call__(self, input_ids: Any, use_cache: bool) -> Any:
            return type("Output", (), {"logits": torch.from_numpy(trained.logits(input_ids.numpy().astype(np.int32)))})

    margins = [rewards_of(run, oracle, step, policy, base) for step, policy in ((1, base), (6, Policy()))]
    losses = [-torch.nn.functional.logsigmoid(found[:, 0] - found[:, 1]).mean().item() for found in margins]
    found = read_metrics(run)
    assert [found[1]["loss"], found[6]["loss"]] == pytest.approx(losses, rel=1e-5)
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[1] < 0.69, "the adapter has moved"


def test_a_model_that_mixes_the_answers_is_refused_before_step_1(
    pairs: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    from backends.torch_engine.transformers_models import write_model

    shutil.rmtree("base")
    write_model(Path("base"), "bloom", vocab_size=264, max_position_embeddings=256)
    assert main(["train", "tiny.yaml", "backend=torch", "train.num_steps=2", *HUGGINGFACE]) == 2
    assert "BloomForCausalLM carries state between the documents of a row" in capsys.readouterr().err
    assert not list(Path("runs").glob("*/chain.jsonl"))


def test_two_processes_equal_one(pairs: dict[str, list[dict[str, Any]]]) -> None:
    """From a run with dropout, which DPO does not adopt: the first loss is exactly ln 2."""
    model = "model={num_layers: 1, hidden_size: 16, num_heads: 2, dropout_fraction: 0.1}"
    text = (
        "data.sources=[{name: text, format: jsonl, paths: [texts.jsonl], text_field: prompt, "
        "ignored_fields: [chosen, rejected]}]"
    )
    base = train("start", "train.num_steps=2", model, text, "loss.name=cross_entropy")
    runs = [train(f"of-{n}", f"train.from_weights={base}", "train.num_steps=6", "--nproc", f"{n}") for n in (1, 2)]
    metrics = [read_metrics(run) for run in runs]
    assert metrics[0][1]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    for step in range(1, 7):
        for name in ("loss", "rewards/margin", "grad_norm"):
            assert metrics[1][step][name] == pytest.approx(metrics[0][step][name], rel=1e-4, abs=1e-6), (step, name)
    assert abs(metrics[0][6]["rewards/margin"]) > 1e-4, "the comparison would be trivial"
