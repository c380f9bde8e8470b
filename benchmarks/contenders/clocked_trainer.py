"""transformers.Trainer on given batches, with a clock of its steps: clocked_trainer.py REPORT SETTINGS_AS_JSON.

Reads ``batches.npz`` (``tokens`` and ``labels``, shape [step, row, position]; labels are the next tokens) and the model
in ``model``. The last line printed has the losses of the logged steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from step_clock import StepClock
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """The rows of all steps, in order. Labels are the next tokens, and the model does not shift them."""

    def __init__(self, path: Path) -> None:
        arrays = np.load(path)
        self._tokens, self._labels = (
            torch.from_numpy(arrays[name].reshape(-1, arrays[name].shape[-1]).astype(np.int64))
            for name in ("tokens", "labels")
        )

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


class InOrder(Trainer):
    """A Trainer that reads rows in order and predicts every next token, the last one of a row included."""

    def _get_train_sampler(self, train_dataset: object = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**inputs, shift_labels=labels, num_items_in_batch=(labels != -100).sum())
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.steps = StepClock.from_environment()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.steps.mark()


def main() -> None:
    report, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder = report.parent
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=settings["steps"], logging_steps=settings["log_every"],
        per_device_train_batch_size=settings["rows"], learning_rate=settings["lr"], weight_decay=0.0, adam_beta2=0.95,
        lr_scheduler_type="constant", max_grad_norm=1.0, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=settings["device"] == "cpu", bf16=settings["dtype"] == "bf16", seed=0,
    )  # fmt: skip
    clock = Clock()
    trainer = InOrder(model=model, args=arguments, train_dataset=Rows(folder / "batches.npz"), callbacks=[clock])
    trainer.train()
    clock.steps.write(report)
    print(json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]))


if __name__ == "__main__":
    main()
