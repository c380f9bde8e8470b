"""Convert a checkpoint of nanoGPT to a directory of transformers.

python examples/nanogpt_to_transformers.py ckpt.pt converted
vorox train my.yaml --from-weights converted tokenizer.kind=tiktoken tokenizer.path=gpt2

nanoGPT's Linear stores [out, in], GPT-2 in transformers [in, out]; biases that nanoGPT leaves out are zeros there. The
file is read as tensors and plain values only, so it cannot run code.
"""

from __future__ import annotations

import sys

import torch
import transformers

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def convert(checkpoint: str, directory: str) -> None:
    """Write the model of ``checkpoint`` to ``directory``."""
    stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
    sizes = stored["model_args"]
    config = transformers.GPT2Config(
        n_layer=sizes["n_layer"], n_head=sizes["n_head"], n_embd=sizes["n_embd"], n_positions=sizes["block_size"],
        vocab_size=sizes["vocab_size"], activation_function="gelu", resid_pdrop=sizes["dropout"],
        embd_pdrop=sizes["dropout"], attn_pdrop=sizes["dropout"],
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    wanted = model.state_dict()
    weights = {name.removeprefix("_orig_mod."): array for name, array in stored["model"].items()}
    weights = {name: array.t() if name.endswith(TRANSPOSED) else array for name, array in weights.items()}
    missing = {name: torch.zeros_like(array) for name, array in wanted.items() if name.endswith(".bias")}
    model.load_state_dict({**missing, **{name: array for name, array in weights.items() if name in wanted}})
    model.save_pretrained(directory)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
