"""A whole model by import path, against the same module in a plain PyTorch loop.

Each document runs alone in the plain loop, so equal losses also prove that no document of a packed row sees another.
Losses agree to 1e-5 (relative, fp32) over 8 steps.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import tiny_runs
import vorox
import vorox.run
from backends.torch_engine.test_checkpoint import save
from backends.torch_engine.transformers_models import DOCUMENTS, LENGTH, VOCAB, batch_of, plain_adamw
from training_device import DEVICE
from vorox import backends
from vorox.backends.torch_engine.engine import TorchEngine, create
from vorox.backends.torch_engine.networks.user_model import UserNetwork, resolve
from vorox.core.config import load_config
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.module_spec import UserSpec
from vorox.models.stored.spec import spec_from_json
from vorox.records.log import RunLog
from vorox.training.export.checkpoint import export
from vorox.training.replay import replay
from vorox.training.steps.workload import Workload

pytestmark = pytest.mark.torch
STEPS, LR = 8, 1e-3
MODEL = '''
import torch
from torch import nn
import torch.nn.functional as F


class Recurrent(nn.Module):
    """Carries state over the whole row, so every document needs a row of its own."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            nn.GRU(config.hidden_size, config.hidden_size, batch_first=True) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.norm(x))


class Attentive(nn.Module):
    """Separates documents by their positions, and has an auxiliary loss and a constant in its state."""

    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.max_positions_tokens, width)
        self.layers = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(config.num_layers))
        self.head = nn.Linear(width, config.vocab_size)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
        document = (position_ids == 0).cumsum(1)
        mask = (document[:, None] == document[..., None]).tril()
        x = self.embedding(tokens) + self.places(position_ids)
        for layer in self.layers:
            query, key, value, gate = layer(x).chunk(4, -1)
            x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask) * gate.sigmoid() * self.scale
        return self.head(x), 0.01 * self.head.weight.square().sum()


class Leaking(Attentive):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens.flip(1))[0].flip(1)


class Narrow(Attentive):
    def forward(self, tokens, position_ids=None):
        return super().forward(tokens)[0][..., 1:]


def number(config):
    return 7


def broken(config):
    raise KeyError("missing")
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(MODEL, encoding="utf-8")
    return tmp_path / "own.py"


def engine_of(source: Path, name: str, *overrides: str) -> TorchEngine:
    config = load_config(
        "quickstart",
        [
            f"model.kind={source}:{name}", "model.hidden_size=16", "model.num_layers=2", f"model.vocab_size={VOCAB}",
            "data.document_mask=true", f"data.sequence_length_tokens={LENGTH}", "train.global_batch_sequences=3",
            "train.micro_batch_sequences=3", f"runtime.device={DEVICE}", "eval.prompts=[]", "optimizer.name=adamw",
            "optimizer.weight_decay=0.1", "optimizer.clip_norm=1.0", "optimizer.beta2=0.95",
            "optimizer.decay_embeddings=false", *overrides,
        ],
    )  # fmt: skip
    return create(config, resolve(config, tokenizer_vocab_size=VOCAB), DistributedContext())


def train(engine: TorchEngine, steps: int, *, start: int = 0) -> list[float]:
    found = range(start, start + steps)
    return [engine.train_step(batch_of(step), lr=LR, weight_decay=0.1).fetch().loss for step in found]


def plain_module(source: Path, name: str, engine: TorchEngine) -> nn.Module:
    specification = importlib.util.spec_from_file_location("plain", source)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    found: nn.Module = getattr(module, name)(engine._network._sized)
    found.load_state_dict({name: torch.from_numpy(array) for name, array in engine.export_weights()}, strict=False)
    return found


def plain_losses(module: nn.Module) -> list[float]:
    named = dict(module.named_parameters())
    embeddings = {"embedding.weight", "places.weight"}
    decayed = {name for name, value in named.items() if value.ndim > 1} - embeddings
    optimizer = plain_adamw(module, decayed, LR)
    losses: list[float] = []
    for step in range(STEPS):
        batch, total, auxiliary = batch_of(step), torch.zeros(()), torch.zeros(())
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for length in lengths:
                ids = torch.from_numpy(batch.tokens_ABT[0, row, start : start + length]).long()[None]
                output: Any = module(ids)
                logits = output[0] if isinstance(output, tuple) else output
                total = total + functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
                if isinstance(output, tuple):
                    auxiliary = output[1]
                start += length
        loss = total / batch.num_target_tokens
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["Recurrent", "Attentive"])
def test_training_equals_a_plain_loop(name: str, source: Path, tmp_path: Path) -> None:
    engine = engine_of(source, name)
    assert isinstance(engine._network, UserNetwork)
    assert engine._network.separates_documents == (name == "Attentive")
    plain = plain_module(source, name, engine)
    again, save_at = engine_of(source, name, "run.seed=5"), 3
    assert again.fingerprint() != engine.fingerprint(), "another seed, other weights"
    losses = train(engine, save_at)
    again.load(save(engine, tmp_path / "checkpoint"))
    losses += train(engine, STEPS - save_at, start=save_at)
    assert losses == pytest.approx(plain_losses(plain), rel=1e-5)
    assert train(again, STEPS - save_at, start=save_at) == losses[save_at:], "a resumed run is bit for bit equal"
    assert again.fingerprint() == engine.fingerprint()

    tokens = np.random.default_rng(5).integers(0, VOCAB, (2, LENGTH), np.int32)
    with torch.no_grad():
        output: Any = plain(torch.from_numpy(tokens).long())
    logits = (output[0] if isinstance(output, tuple) else output).numpy()
    np.testing.assert_allclose(engine.logits(tokens), logits, rtol=1e-4, atol=1e-4)
    decoder = engine.decoder(2, LENGTH)
    decoder.feed(tokens[:, :7])
    np.testing.assert_allclose(decoder.feed(tokens[:, 7:9]), logits[:, 8], rtol=1e-4, atol=1e-4)


def test_weights_are_those_of_the_model_and_a_function_of_the_seed(source: Path) -> None:
    first, second = (dict(engine_of(source, "Attentive").export_weights()) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["scale"] == 1
    assert first["embedding.weight"].std() == pytest.approx(1, rel=0.1), "as nn.Embedding initialises"
    assert np.abs(first["layers.0.weight"]).max() <= 0.25, "as nn.Linear initialises"


def test_recomputed_blocks_change_no_number(source: Path) -> None:
    losses = train(engine_of(source, "Attentive"), 2)
    assert train(engine_of(source, "Attentive", "train.activation_checkpointing=block"), 2) == losses


def test_the_spec_survives_json_and_names_what_differs(source: Path) -> None:
    spec = engine_of(source, "Attentive")._spec
    assert isinstance(spec, UserSpec)
    stored = json.loads(json.dumps(spec.to_json()))
    assert spec_from_json(stored).to_json() == spec.to_json()
    assert spec.differences(stored) == []
    wider = engine_of(source, "Attentive", "model.hidden_size=24")._spec.differences(stored)
    assert wider[0] == "hidden_size = 16 (here 24)"
    assert "parameter layers.1.weight" in wider
    kinds = {row.name: (row.kind, row.decay, row.trainable) for row in spec.rows}
    assert kinds["head.weight"] == ("head", True, True)
    assert kinds["layers.0.weight"] == ("matrix", True, True)
    assert kinds["scale"][1:] == (False, False)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("Leaking", [], "Leaking is not causal"),
        ("Narrow", [], r"Narrow returns \[1, \d+, \d+\] for tokens \[1, \d+\], not logits"),
        ("number", [], "returned int, not a torch.nn.Module"),
        ("broken", [], "failed with KeyError: 'missing'"),
        ("Attentive", ["model.vocab_size=3"], "model.vocab_size = 3, but the data needs"),
    ],
)
def test_what_does_not_work_is_refused(name: str, overrides: list[str], message: str, source: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(source, name, *overrides)


def test_jax_is_refused(source: Path) -> None:
    config = load_config("quickstart", ["backend=jax", f"model.kind={source}:Attentive"])
    with pytest.raises(ConfigError, match="needs backend=torch"):
        backends.model_spec(config, None, revision=None, tokenizer_vocab_size=2)


def test_a_run_is_resumed_replayed_and_sampled(source: Path, tmp_path: Path) -> None:
    shared = [f"model.kind={source}:Recurrent", "backend=torch", "schedule.name=constant"]
    whole = tiny_runs.run(tiny_runs.configuration(tmp_path, [*shared, "train.num_steps=8"]))
    half = tiny_runs.run(tiny_runs.configuration(tmp_path, [*shared, "train.num_steps=4"])).run_directory
    longer = tiny_runs.configuration(tmp_path, [*shared, "train.num_steps=8"])
    resumed = tiny_runs.run(longer, resume_from=half)
    assert resumed.run_directory == half != whole.run_directory
    assert resumed.fingerprint == whole.fingerprint

    def make_workload(config: RunConfig) -> Workload:
        return vorox.run.make_workload(config, DistributedContext(), RunLog(None), None, build=False)

    assert replay(whole.run_directory, make_workload, last_step=8).difference is None
    texts = [
        vorox.load_model(outcome.run_directory).generate("the ", num_tokens=8, temperature=0)
        for outcome in (whole, resumed)
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="No transformers architecture"):
        export(whole.run_directory, tmp_path / "export")
    changed = source.read_text(encoding="utf-8").replace("self.head.weight = self.embedding.weight", "pass")
    source.write_text(changed, encoding="utf-8")
    with pytest.raises(VoroxError, match=r"parameter head\.weight"):
        tiny_runs.run(tiny_runs.configuration(tmp_path, [*shared, "train.num_steps=9"]), resume_from=half)
