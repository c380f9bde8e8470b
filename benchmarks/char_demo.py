"""nanoGPT's published CPU demo, whole, on one text: 2,000 iterations of each, and their validation losses.

    char_demo.py [--text input.txt]

Without a text, a megabyte of Python's own library stands in for Shakespeare's plays. The last tenth is held out by
both. Both losses are measured here, by one procedure for both models: the mean over the whole held-out text in windows
of 64 characters, since nanoGPT's own figure is an average over 20 random batches.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from vorox import load_model

ROOT = Path(__file__).parents[1]
NANOGPT = ROOT / "benchmarks" / ".peers" / "nanoGPT"
BLOCK = 64
NUM_ITERATIONS = 2000
TEXT_CHARACTERS = 1_115_394  # as many as the published demo's text has

Losses = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float32]]


def standard_library_text() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    texts = (path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))
    return "".join(texts)[:TEXT_CHARACTERS]


def mean_loss(ids: npt.NDArray[np.int64], losses: Losses) -> float:
    """Mean cross entropy in nats over all whole windows of the held-out text."""
    num_windows = (len(ids) - 1) // BLOCK
    inputs = ids[: num_windows * BLOCK].reshape(-1, BLOCK)
    targets = ids[1 : num_windows * BLOCK + 1].reshape(-1, BLOCK)
    parts = [losses(inputs[i : i + 256], targets[i : i + 256]) for i in range(0, num_windows, 256)]
    return float(np.concatenate(parts).mean())


def run_vorox(folder: Path, text_path: Path, held_out: str) -> float:
    """The loss, through the command line, as a user would."""
    command = [
        sys.executable, "-m", "vorox", "train", str(ROOT / "configs" / "char_demo.yaml"),
        f"data.sources.0.paths=[{text_path}]", f"run.directory={folder}/runs", f"data.cache.directory={folder}/cache",
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
    (directory,) = (folder / "runs").iterdir()
    model = load_model(directory, step=NUM_ITERATIONS)
    ids = model.tokenizer.encode_batch([held_out])[0].astype(np.int64)

    def losses(inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        logits = torch.from_numpy(model.logits(inputs))
        return cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="none").numpy()

    return mean_loss(ids, losses)


def run_nanogpt(folder: Path, text: str, held_out: str) -> float:
    """The loss, with the flags that its README gives for this demo."""
    characters = sorted(set(text))
    codes = {character: index for index, character in enumerate(characters)}
    data = NANOGPT / "data" / "char_demo"
    data.mkdir(exist_ok=True)
    split = len(text) - len(held_out)
    for name, part in (("train", text[:split]), ("val", text[split:])):
        np.array([codes[character] for character in part], np.uint16).tofile(data / f"{name}.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": codes}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    flags = {
        "dataset": "char_demo", "device": "cpu", "compile": False, "eval_iters": 20, "log_interval": 100,
        "block_size": BLOCK, "batch_size": 12, "n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.0,
        "max_iters": NUM_ITERATIONS, "lr_decay_iters": NUM_ITERATIONS, "out_dir": f"{folder}/nanogpt",
        "always_save_checkpoint": True,
    }  # fmt: skip
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py"]
    subprocess.run(
        [*command, *(f"--{key}={value}" for key, value in flags.items())], check=True, cwd=NANOGPT,
        stdout=sys.stderr,
    )  # fmt: skip
    sys.path.insert(0, str(NANOGPT))
    from model import GPT, GPTConfig

    checkpoint = torch.load(folder / "nanogpt" / "ckpt.pt", map_location="cpu", weights_only=False)
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    model.eval()

    def losses(inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            goal = torch.from_numpy(targets)
            logits, _ = model(torch.from_numpy(inputs), goal)  # with targets it gives the logits of all positions
            found = cross_entropy(logits.flatten(0, 1), goal.flatten(), reduction="none")
        return found.numpy()

    return mean_loss(np.array([codes[character] for character in held_out]), losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, help="Any text file.")
    given = parser.parse_args().text
    text = given.read_text(encoding="utf-8") if given is not None else standard_library_text()
    held_out = text[int(len(text) * 0.9) :]
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_path = folder / "input.txt"
        text_path.write_text(text, encoding="utf-8")
        for contender, run in (
            ("vorox", lambda: run_vorox(folder, text_path, held_out)),
            ("nanoGPT", lambda: run_nanogpt(folder, text, held_out)),
        ):
            results[contender] = round(run(), 4)
            print(f"{contender}: validation loss {results[contender]} after {NUM_ITERATIONS:,} iterations")
    output = ROOT / "benchmarks" / "results"
    output.mkdir(exist_ok=True)
    (output / "char_demo.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
