"""What is no directory of transformers is refused with the command that makes it one, and the command works."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vorox
from pretrained_models import write_tokenizer
from vorox.cli import main
from vorox.core.errors import ConfigError, DataError
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.store import load_untrained
from vorox.training.origin.configuration import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.torch
@pytest.mark.hf
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_is_converted_by_the_command_of_the_error(bias: bool, tmp_path: Path) -> None:
    import torch

    sizes: dict[str, Any] = {
        "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "vocab_size": 300, "dropout": 0.0, "bias": bias,
    }  # fmt: skip
    torch.manual_seed(3)
    state = nanogpt_state(sizes)
    file = tmp_path / "ckpt.pt"
    torch.save({"model": {f"_orig_mod.{name}": array for name, array in state.items()}, "model_args": sizes}, file)
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", [f"train.from_weights={file}"])
    with pytest.raises(ConfigError) as refused:
        vorox.load_model(file)
    assert "nanogpt_to_transformers" in refused.value.hint
    words = shlex.split(caught.value.hint.split("`")[1])
    assert words[1] == "examples/nanogpt_to_transformers.py"
    assert words[2] == str(file)
    spec = importlib.util.spec_from_file_location("converter", ROOT / words[1])
    assert spec is not None
    assert spec.loader is not None
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    converter.convert(words[2], str(tmp_path / words[3]))
    write_tokenizer(tmp_path / words[3])
    ids = np.random.default_rng(1).integers(0, 300, 20).astype(np.int32)
    ours = vorox.load_model(tmp_path / words[3], device="cpu").logits(ids)
    assert np.abs(ours - nanogpt_logits(state, sizes, ids)).max() < 1e-4


def nanogpt_state(sizes: dict[str, Any]) -> dict[str, Any]:
    """Random weights under nanoGPT's names: a plain Linear is [out, in]."""
    import torch

    width, state = sizes["n_embd"], {}
    shapes = {"transformer.wte.weight": (sizes["vocab_size"], width), "transformer.wpe.weight": (32, width)}
    for layer in range(sizes["n_layer"]):
        block = f"transformer.h.{layer}"
        for name, shape in (
            ("ln_1", (width,)), ("attn.c_attn", (3 * width, width)), ("attn.c_proj", (width, width)),
            ("ln_2", (width,)), ("mlp.c_fc", (4 * width, width)), ("mlp.c_proj", (width, 4 * width)),
        ):  # fmt: skip
            shapes[f"{block}.{name}.weight"] = shape
            if sizes["bias"]:
                shapes[f"{block}.{name}.bias"] = shape[:1]
    shapes["transformer.ln_f.weight"] = (width,)
    if sizes["bias"]:
        shapes["transformer.ln_f.bias"] = (width,)
    state = {name: torch.randn(shape) * 0.3 + (1.0 if "ln_" in name else 0.0) for name, shape in shapes.items()}
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


def nanogpt_logits(state: dict[str, Any], sizes: dict[str, Any], ids: Any) -> Any:
    """nanoGPT's forward pass, written from its model.py with torch.nn.functional."""
    import torch
    from torch.nn import functional

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state.get(f"{name}.bias"), 1e-5)

    heads, width = sizes["n_head"], sizes["n_embd"]
    x = state["transformer.wte.weight"][torch.from_numpy(ids).long()] + state["transformer.wpe.weight"][: len(ids)]
    for layer in range(sizes["n_layer"]):
        block = f"transformer.h.{layer}"
        parts = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(width, dim=-1)
        q, k, v = (part.view(len(ids), heads, width // heads).transpose(0, 1) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(0, 1).reshape(len(ids), width)
        x = x + linear(mixed, f"{block}.attn.c_proj")
        hidden = functional.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"))
        x = x + linear(hidden, f"{block}.mlp.c_proj")
    return functional.linear(norm(x, "transformer.ln_f"), state["lm_head.weight"]).numpy()


@pytest.mark.parametrize("kind", ["file", "huggingface"])
def test_a_model_of_sentencepiece_is_refused_with_its_conversion(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "my words.model"
    file.write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\xf0")
    with pytest.raises((ConfigError, DataError)) as caught:
        load_untrained(TokenizerConfig.model_validate({"kind": kind, "path": str(file)}))
    words = shlex.split(caught.value.hint.partition("convert it: ")[2])
    assert words[:6] == ["mkdir", "tok", "&&", "cp", str(file), "tok/tokenizer.model"]
    assert "tokenizer.kind=huggingface tokenizer.path=tok" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "typed"), [("owner/name", "hf://owner/name"), ("weights/model.safetensors", "weights")]
)
def test_a_name_that_is_nearly_one_is_corrected(
    name: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    Path("weights/model.safetensors").write_bytes(b"")
    assert main(["train", "quickstart", "--from-weights", name, "--dry-run"]) == 2
    assert typed in capsys.readouterr().err.rpartition("do  ")[2]
