"""NEFTune noise (``train.embedding_noise``): against plain loops that draw the same noise, by the key of the docs.

Losses agree to 1e-5 (relative, fp32). What must not change (a resumed run, evaluation) is compared bit for bit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.nn import functional

import tiny_runs
from backends.torch_engine import transformers_models as hub
from backends.torch_engine.small_models import GPT2, LLAMA, LR, batch_of, make, random_rows
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.core.config import config_digest, load_config

pytestmark = [pytest.mark.torch]
STEPS, ALPHA = 5, 7.0


def noise(seed: int, step: int, micro_batch: int, shape_BTD: tuple[int, int, int], device: str = "cpu") -> torch.Tensor:
    """The oracle of the paper's formula and of the key."""
    key = xxhash.xxh3_64_intdigest(f'["dropout",1,{seed},{step},{micro_batch}]'.encode()) >> 1
    uniform = torch.rand(shape_BTD, generator=torch.Generator(device).manual_seed(key))
    return (2 * uniform - 1) * ALPHA / math.sqrt(shape_BTD[1] * shape_BTD[2])


def losses_of(engine: TorchEngine) -> list[float]:
    return [
        engine.train_step(batch_of(random_rows(8, step), step=step), lr=LR, weight_decay=0.1).fetch().loss
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("model", [GPT2, LLAMA | {"tie_embeddings": False}], ids=["gpt2", "llama"])
def test_the_decoder_equals_one_whose_embedding_adds_the_noise(model: dict[str, Any]) -> None:
    found, plain, expected = make(model, train__embedding_noise=ALPHA), make(model), make(model)
    micro_batches = iter(range(10**6))
    step = 0

    def hook(_: Any, __: Any, x_MD: torch.Tensor) -> torch.Tensor:
        batch = batch_of(random_rows(8, 0))
        shape_BTD = (*batch.tokens_ABT.shape[1:], x_MD.shape[-1])
        return x_MD + noise(expected_seed, step, next(micro_batches), shape_BTD).view_as(x_MD)

    expected_seed = expected._config.run.seed
    expected.model.embedding.register_forward_hook(hook)
    losses: list[float] = []
    for step in range(STEPS):
        micro_batches = iter(range(10**6))
        given = batch_of(random_rows(8, step), step=step)
        losses.append(expected.train_step(given, lr=LR, weight_decay=0.1).fetch().loss)
    with_noise = losses_of(found)
    assert with_noise == pytest.approx(losses, rel=1e-5)
    assert all(abs(a - b) > 1e-4 for a, b in zip(with_noise, losses_of(plain), strict=True))

    plain.import_weights(found.export_weights())
    held_out = batch_of(random_rows(8, 99))
    assert found.eval_step(held_out) == plain.eval_step(held_out)
    tokens_BT = held_out.tokens_ABT[0]
    assert np.array_equal(found.logits(tokens_BT), plain.logits(tokens_BT))


@pytest.mark.slow
def test_a_model_of_transformers_equals_a_plain_loop(tmp_path: Path) -> None:
    """Each document runs alone in the loop, with its part of the noise of the whole rows."""
    transformers = pytest.importorskip("transformers")
    directory = hub.write_model(tmp_path / "model", "llama")
    engine = hub.engine_of(directory, f"train.embedding_noise={ALPHA}")
    plain = hub.engine_of(directory)
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    width, seed = module.config.hidden_size, engine._config.run.seed
    for step in range(STEPS):
        batch = hub.batch_of(step)
        # The weights before every step are the engine's, so the update rule is not part of this test.
        module.load_state_dict({name: torch.from_numpy(array) for name, array in engine.export_weights()}, strict=False)
        noise_BTD = noise(seed, step, 0, (*batch.tokens_ABT.shape[1:], width))
        total = torch.zeros(())
        for row, lengths in enumerate(hub.DOCUMENTS):
            start = 0
            for length in lengths:
                ids = torch.from_numpy(batch.tokens_ABT[0, row, start : start + length]).long()[None]
                inputs = module.get_input_embeddings()(ids) + noise_BTD[row, start : start + length]
                logits = module(inputs_embeds=inputs, use_cache=False).logits[0, :-1].float()
                total = total + functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                start += length
        loss = total / batch.num_target_tokens
        optimizer.zero_grad()
        loss.backward()
        grad_norm = float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
        values = engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch()
        assert values.loss == pytest.approx(loss.item(), rel=1e-5)
        assert values.grad_norm == pytest.approx(grad_norm, rel=1e-4)
    plain.import_weights(engine.export_weights())
    held_out = hub.batch_of(99)
    assert engine.eval_step(held_out) == plain.eval_step(held_out)


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"train.embedding_noise={ALPHA}", "log.matmul_peak=false"]
    whole, resumed = tiny_runs.whole_and_resumed(tmp_path, monkeypatch, TorchEngine, overrides)
    assert {key: resumed[key] for key in ("fingerprint", "chain", "eval_losses")} == {
        key: whole[key] for key in ("fingerprint", "chain", "eval_losses")
    }


def test_it_is_part_of_the_digest_only_where_it_is_set() -> None:
    digests = {config_digest(load_config("quickstart", overrides)) for overrides in (
        [], ["train.embedding_noise=null"], ["train.embedding_noise=5"], ["train.embedding_noise=6"]
    )}  # fmt: skip
    assert len(digests) == 3
