"""transformers.Trainer on a GPT-2 of a given size: the script that its user would write, with the Trainer's defaults.

    transformers_trainer.py SIZE_AS_JSON FOLDER

Reads ``train.bin`` and ``val.bin``, saves the model at the end, and prints the seconds of every step as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """A stream of ids cut into rows."""

    def __init__(self, path: Path, row_tokens: int) -> None:
        ids = np.fromfile(path, np.uint16)
        self._rows = torch.from_numpy(ids[: len(ids) // row_tokens * row_tokens].astype(np.int64)).view(-1, row_tokens)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Clock(TrainerCallback):
    """Remembers when steps ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.marks.append(time.perf_counter())


def main() -> None:
    size, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=json.loads((folder / "meta.json").read_text())["vocab_size"], n_positions=size["row_tokens"],
            n_embd=size["hidden_size"], n_layer=size["num_layers"], n_head=size["num_heads"], resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=size["steps"], per_device_train_batch_size=size["batch_rows"],
        per_device_eval_batch_size=size["batch_rows"], learning_rate=1e-3, weight_decay=0.1, adam_beta2=0.99,
        warmup_steps=size["steps"] // 20, lr_scheduler_type="cosine", save_strategy="no", report_to=[],
        logging_steps=10, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    clock, validation = Clock(), Rows(folder / "val.bin", size["row_tokens"])
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(folder / "train.bin", size["row_tokens"]),
        eval_dataset=torch.utils.data.Subset(validation, range(size["batch_rows"])), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    print(json.dumps({"step_seconds": np.diff(clock.marks).tolist()}))


if __name__ == "__main__":
    main()
