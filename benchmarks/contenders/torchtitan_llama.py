"""Trains a Llama with torchtitan's own program: ``torchtitan_llama.py SIZE_JSON CHECKOUT FOLDER``.

SIZE_JSON has layers, width, heads, mlp, tokens, rows, steps and vocabulary; CHECKOUT is torchtitan's repository, whose
test data and tokenizer it reads. The size is registered beside torchtitan's own ones. Tested with torchtitan 0.2.2.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path

FIRST_MULTIPLE = 64


def register(size: dict[str, int]) -> None:
    """Add the size; torchtitan rounds two thirds of four times the width up to a multiple that is found here."""
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    least, multiple = int(8 * size["width"] / 3), FIRST_MULTIPLE
    while multiple * -(-least // multiple) < size["mlp"]:
        multiple *= 2
    if multiple * -(-least // multiple) != size["mlp"]:
        raise SystemExit(f"torchtitan cannot have an MLP of {size['mlp']} at width {size['width']}")
    llama3_args["benchmark"] = TransformerModelArgs(
        dim=size["width"], n_layers=size["layers"], n_heads=size["heads"], vocab_size=size["vocabulary"],
        multiple_of=multiple, rope_theta=500_000,
    )  # fmt: skip


def main() -> None:
    size, checkout, folder = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]).resolve()
    os.chdir(checkout)  # its test data has relative paths
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        HF_DATASETS_OFFLINE="1", PYTORCH_ALLOC_CONF="expandable_segments:True",  # as torchtitan's run_train.sh
    )  # fmt: skip
    sys.argv = [  # read when torchtitan is imported
        "torchtitan.train", "--model.name", "llama3", "--model.flavor", "benchmark",
        "--model.hf_assets_path", "./tests/assets/tokenizer", "--training.dataset", "c4_test",
        "--training.local_batch_size", str(size["rows"]), "--training.seq_len", str(size["tokens"]),
        "--training.steps", str(size["steps"]), "--optimizer.implementation", "fused", "--optimizer.lr", "3e-4",
        "--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "5", "--metrics.disable_color_printing",
        "--activation_checkpoint.mode", "none", "--compile.enable", "--job.dump_folder", str(folder),
    ]  # fmt: skip
    register(size)
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
