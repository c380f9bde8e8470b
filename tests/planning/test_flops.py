"""FLOPs per token against torch's own counter on the real forward and backward pass, and against published figures."""

from __future__ import annotations

import numpy as np
import pytest

from vorox.core.config import load_config
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.planning.flops import causal_flops_per_token, flops_per_token


def spec_of(overrides: list[str], *, vocab_size: int, length: int) -> DecoderSpec:
    config = load_config("quickstart", overrides)
    return decoder_spec(config.model, tokenizer_vocab_size=vocab_size, sequence_length_tokens=length)


def test_gpt2_124m_is_the_published_figure() -> None:
    """124M without position embeddings is N = 123.65M; 0.86 GFLOP per token at T = 1,024 is the figure in use."""
    spec = spec_of(["model.preset=gpt2-124m"], vocab_size=50257, length=1024)
    assert spec.num_matmul_weights == 12 * 12 * 768 * 768 + 50257 * 768
    assert flops_per_token(spec, 1024) == pytest.approx(0.855e9, rel=0.01)
    assert causal_flops_per_token(spec, 1024) < flops_per_token(spec, 1024)


@pytest.mark.parametrize("window", [1, 7, 63, 64, 100])
def test_layers_with_a_window_attend_to_less(window: int) -> None:
    """Counted pair by pair: half of the layers have the window."""
    length, shape = 64, ["model.num_layers=4", "model.hidden_size=96", "model.num_heads=4", "model.head_dim=null"]
    overrides = [
        *shape, f"model.sliding_window_tokens={window}", "model.layer_types=[full_attention, sliding_attention]"
    ]  # fmt: skip
    spec = spec_of(overrides, vocab_size=256, length=length)
    pairs = [(query, key) for query in range(length) for key in range(query + 1)]
    near = sum(query - key < window for query, key in pairs)
    visible = 2 * (len(pairs) + near) * 12 * 96 / length
    matmuls = 6.0 * spec.num_matmul_weights
    assert causal_flops_per_token(spec, length) == pytest.approx(matmuls + visible)
    assert flops_per_token(spec, length) == pytest.approx(matmuls + 12 * 96 * 2 * (length + min(window, length)))


@pytest.mark.torch
@pytest.mark.parametrize("products", ["onednn", "blas"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_against_the_counter_of_torch(family: str, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference attention multiplies whole T x T matrices, which is what the convention counts."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from vorox import backends
    from vorox.backends.torch_engine.device import devices
    from vorox.core.batch import Batch, DataCursor
    from vorox.core.ranks.distributed_context import DistributedContext

    if products == "onednn" and not devices.has_onednn_linear():
        pytest.skip("this build of PyTorch has no oneDNN product")
    monkeypatch.setattr(devices, "_select_products", lambda device: products)  # whatever this processor would choose
    rows, length, vocab_size = 2, 64, 256
    overrides = [
        f"model.family={family}", "model.num_layers=3", "model.hidden_size=96", "model.num_heads=4",
        "model.num_kv_heads=null", "model.head_dim=null", "model.intermediate_size=160",
        "model.attention_kernel=reference", "optimizer.name=adamw", f"data.sequence_length_tokens={length}",
    ]  # fmt: skip
    config = load_config("quickstart", overrides)
    spec = spec_of(overrides, vocab_size=vocab_size, length=length)
    engine = backends.load("torch").create(config, spec, DistributedContext())
    tokens = np.random.default_rng().integers(0, vocab_size, (1, rows, length), dtype=np.int32)
    batch = Batch(
        step=0,
        tokens_ABT=tokens,
        labels_ABT=np.roll(tokens, -1, axis=-1),
        segment_ids_ABT=None,
        position_ids_ABT=None,
        row_digests_AB=np.zeros((1, rows), np.uint64),
        num_target_tokens=rows * length,
        cursor_after=DataCursor("", 0, 1, rows, 0),
    )

    def product_flops(left: tuple[int, int], right: tuple[int, int], *_: object, **__: object) -> int:
        return 2 * left[0] * left[1] * right[0]

    def added_product_flops(_: object, left: tuple[int, int], right: tuple[int, int], **__: object) -> int:
        return 2 * left[0] * left[1] * right[1]

    # Neither oneDNN's product nor a product added in place is one of the operations that the counter knows.
    known = {torch.ops.aten.addmm_: added_product_flops}
    if products == "onednn":
        known[torch.ops.mkldnn._linear_pointwise] = product_flops
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        engine.train_step(batch, lr=1e-3, weight_decay=0.0).fetch()
    assert counter.get_total_flops() == pytest.approx(rows * length * flops_per_token(spec, length), rel=0.01)
