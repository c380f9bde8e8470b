"""``litgpt pretrain`` on a model of a given size, called as its command line calls it; it compiles the model.

    litgpt_pretrain.py SIZE_AS_JSON FOLDER

Reads ``train.bin`` and ``val.bin``. litgpt itself prints the time of every iteration and saves at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt.args import EvalArgs, LogArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader, TensorDataset


class Bins(DataModule):
    """Files of uint16 ids, cut into rows of one more id than the model has positions."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def connect(
        self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None, **_: object
    ) -> None:
        self._batch_rows, self._row_ids = batch_size, (max_seq_length or 0) + 1

    def _loader(self, name: str, *, shuffle: bool) -> DataLoader[Any]:
        ids = np.fromfile(self._folder / name, np.uint16)
        rows = ids[: len(ids) // self._row_ids * self._row_ids].astype(np.int64).reshape(-1, self._row_ids)
        return DataLoader(_First(torch.from_numpy(rows)), self._batch_rows, shuffle=shuffle, drop_last=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("train.bin", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("val.bin", shuffle=False)


class _First(TensorDataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)[0]


def main() -> None:
    size, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    vocab_size = json.loads((folder / "meta.json").read_text())["vocab_size"]
    config = Config(
        name="benchmark", block_size=size["row_tokens"], vocab_size=vocab_size, padded_vocab_size=vocab_size,
        n_layer=size["num_layers"], n_head=size["num_heads"], n_embd=size["hidden_size"], bias=False,
        rotary_percentage=1.0,
    )  # fmt: skip
    sys.argv = ["litgpt", "pretrain", "benchmark"]  # which it records beside the checkpoint
    tokens = size["steps"] * size["batch_rows"] * size["row_tokens"]
    setup(
        "benchmark", model_config=config, out_dir=folder / "out", precision="32-true", data=Bins(folder),
        train=TrainArgs(
            save_interval=None, log_interval=1, global_batch_size=size["batch_rows"],
            micro_batch_size=size["batch_rows"], max_tokens=tokens, max_norm=1.0, min_lr=1e-4,
            lr_warmup_steps=max(1, size["steps"] // 20), max_seq_length=size["row_tokens"], tie_embeddings=True,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=True),
        optimizer={"class_path": "torch.optim.AdamW",
                   "init_args": {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}},
        log=LogArgs(), devices=1, logger_name="csv",
    )  # fmt: skip


if __name__ == "__main__":
    main()
