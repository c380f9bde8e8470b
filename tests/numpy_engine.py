"""A complete engine in plain numpy: a two-token MLP language model with AdamW, for tests of everything but models.

Logits of a position come from its token and the one before it (of the same document): ``tanh([E[x]; P[x-1]] W) U``.
It keeps every rule of ``core.engine`` and saves, loads and fingerprints real state, so that the loop, resume and
replay are tested in seconds without a framework, and the protocol is kept honest.

Shape legend: A micro-batches, B rows, T positions, V vocabulary, D width, N positions of a micro-batch (B x T).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from vorox.core.batch import IGNORED_LABEL, Batch, DataShard, Int32Array
from vorox.core.engine import Engine, EvalValues, NamedArray, NonfiniteOrigin, PartReport, StepValues
from vorox.core.errors import CheckpointError
from vorox.core.files.atomic import canonical_json
from vorox.core.files.staged_directory import StagedDirectory, StagedPart

Arrays = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class NumpyResult:
    values: StepValues

    def fetch(self) -> StepValues:
        return self.values


class NumpyDecoder:
    def __init__(self, engine: NumpyEngine, max_tokens: int) -> None:
        self._engine, self._left_tokens = engine, max_tokens
        self._last_B1: Int32Array | None = None

    def feed(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        self._left_tokens -= tokens_BT.shape[1]
        assert self._left_tokens >= 0, "more tokens than announced"
        seen = tokens_BT if self._last_B1 is None else np.concatenate([self._last_B1, tokens_BT], axis=1)
        self._last_B1 = tokens_BT[:, -1:]
        return self._engine.logits(seen)[:, -1]


@dataclass(frozen=True)
class NumpySnapshot:
    state: Arrays
    updates: int

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.state.values())

    def nonfinite_array(self) -> str:
        return next((name for name, array in self.state.items() if not np.isfinite(array).all()), "")

    def write_part(self, directory: StagedPart) -> PartReport:
        """Nothing: this engine runs in one process."""
        del directory
        return {}

    def write_metadata(self, directory: StagedDirectory, parts: Sequence[PartReport] = ()) -> None:
        del parts
        shapes = {name: array.shape for name, array in self.state.items()}
        directory.write("engine.json", canonical_json({"updates": self.updates, "shapes": shapes}))
        with directory.open("state.bin") as file:
            for array in self.state.values():
                file.write(array.tobytes())

    def fingerprint(self, parts: Sequence[PartReport] = ()) -> str:
        del parts
        digest = xxhash.xxh3_128(str(self.updates).encode())
        for name, array in self.state.items():
            digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()


class NumpyEngine(Engine):
    name = "numpy"

    def __init__(self, vocab_size: int, *, seed: int = 0, width: int = 8, clip_norm: float | None = 1.0) -> None:
        self.clip_norm, self.data_shard = clip_norm, DataShard()
        shapes = {"token": (vocab_size, width), "previous": (vocab_size + 1, width)}
        shapes |= {"hidden": (2 * width, 2 * width), "output": (2 * width, vocab_size)}
        self.parameters: Arrays = {
            name: _philox(seed, index).normal(0, 0.1, shape).astype(np.float32)
            for index, (name, shape) in enumerate(sorted(shapes.items()))
        }
        self._reset_optimizer()

    def _reset_optimizer(self) -> None:
        self.moments: dict[str, Arrays] = {
            kind: {name: np.zeros_like(array) for name, array in self.parameters.items()} for kind in ("m", "v")
        }
        self.updates = 0

    # -- model --------------------------------------------------------------------------------------------------------

    def _forward(self, tokens_BT: Int32Array, segments_BT: Int32Array | None) -> tuple[npt.NDArray[np.float32], ...]:
        start = self.parameters["previous"].shape[0] - 1
        previous_BT = np.full_like(tokens_BT, start)
        previous_BT[:, 1:] = tokens_BT[:, :-1]
        if segments_BT is not None:
            previous_BT[:, 1:][segments_BT[:, 1:] != segments_BT[:, :-1]] = start
        x = np.concatenate(
            [self.parameters["token"][tokens_BT.ravel()], self.parameters["previous"][previous_BT.ravel()]], axis=1
        )
        h = np.tanh(x @ self.parameters["hidden"])
        return h @ self.parameters["output"], h, x, previous_BT.ravel()

    @staticmethod
    def _loss(logits: npt.NDArray[np.float32], labels: Int32Array) -> tuple[float, npt.NDArray[np.float32], int]:
        """Summed cross entropy, its gradient in the logits, and the number of correct targets."""
        kept = labels != IGNORED_LABEL
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        index = np.where(kept, labels, 0)[:, None]
        loss = -float(np.where(kept, np.take_along_axis(log_p, index, 1)[:, 0], 0).sum(dtype=np.float64))
        gradient = np.exp(log_p)
        np.put_along_axis(gradient, index, np.take_along_axis(gradient, index, 1) - 1, 1)
        correct = int(((logits.argmax(axis=1) == labels) & kept).sum())
        return loss, gradient * kept[:, None], correct

    def _gradients(self, tokens: Int32Array, labels: Int32Array, segments: Int32Array | None, total: int):
        logits, h, x, previous = self._forward(tokens, segments)
        loss, d_logits, _ = self._loss(logits, labels.ravel())
        d_logits /= np.float32(total)
        d_hidden = (d_logits @ self.parameters["output"].T) * (1 - h * h)
        d_x = d_hidden @ self.parameters["hidden"].T
        gradients = {name: np.zeros_like(array) for name, array in self.parameters.items()}
        gradients["output"], gradients["hidden"] = h.T @ d_logits, x.T @ d_hidden
        width = d_x.shape[1] // 2
        np.add.at(gradients["token"], tokens.ravel(), d_x[:, :width])
        np.add.at(gradients["previous"], previous, d_x[:, width:])
        return loss, gradients

    # -- Engine -------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, *, lr: float, weight_decay: float, max_loss: float | None = None) -> NumpyResult:
        with np.errstate(all="ignore"):
            loss, gradients = self._accumulated(batch)
            squares = [float(np.square(gradients[name], dtype=np.float64).sum()) for name in sorted(gradients)]
        loss, norm = loss / max(1, batch.num_target_tokens), float(np.sqrt(sum(squares)))
        finite = bool(np.isfinite(loss) and np.isfinite(norm))
        if finite and (max_loss is None or loss <= max_loss):
            with np.errstate(all="ignore"):
                self._update(gradients, norm, lr, weight_decay)
        bits = xxhash.xxh64_intdigest(b"".join(gradients[name].tobytes() for name in sorted(gradients)))
        return NumpyResult(StepValues(loss, norm, finite, {}, (float(bits >> 32), float(bits & 0xFFFFFFFF))))

    def gradient_norms(self, batch: Batch) -> dict[str, float]:
        return {name: float(np.linalg.norm(gradient)) for name, gradient in self._accumulated(batch)[1].items()}

    def _accumulated(self, batch: Batch) -> tuple[float, Arrays]:
        """The summed loss of a batch, and its gradients."""
        total, loss = max(1, batch.num_target_tokens), 0.0
        gradients = {name: np.zeros_like(array) for name, array in self.parameters.items()}
        for index in range(batch.tokens_ABT.shape[0]):
            segments = None if batch.segment_ids_ABT is None else batch.segment_ids_ABT[index]
            part, own = self._gradients(batch.tokens_ABT[index], batch.labels_ABT[index], segments, total)
            loss += part
            for name, gradient in own.items():
                gradients[name] += gradient
        return loss, gradients

    def locate_nonfinite(self, batch: Batch) -> NonfiniteOrigin | None:
        total = max(1, batch.num_target_tokens)
        for index in range(batch.tokens_ABT.shape[0]):
            segments = None if batch.segment_ids_ABT is None else batch.segment_ids_ABT[index]
            with np.errstate(all="ignore"):
                loss, own = self._gradients(batch.tokens_ABT[index], batch.labels_ABT[index], segments, total)
            finite = {name: bool(np.isfinite(gradient).all()) for name, gradient in own.items()}
            found = NonfiniteOrigin.locate(index, loss / total, {}, finite)
            if found is not None:
                return found
        return None

    def _update(self, gradients: Arrays, norm: float, lr: float, weight_decay: float) -> None:
        self.updates += 1
        scale = np.float32(1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6)))
        for name, parameter in self.parameters.items():
            gradient, m, v = gradients[name] * scale, self.moments["m"][name], self.moments["v"][name]
            m += np.float32(0.1) * (gradient - m)
            v += np.float32(0.05) * (gradient * gradient - v)
            step = (m / np.float32(1 - 0.9**self.updates)) / (np.sqrt(v / np.float32(1 - 0.95**self.updates)) + 1e-8)
            parameter -= np.float32(lr) * (step + np.float32(weight_decay) * parameter)

    def eval_step(self, batch: Batch) -> EvalValues:
        loss, correct = 0.0, 0
        for index in range(batch.tokens_ABT.shape[0]):
            segments = None if batch.segment_ids_ABT is None else batch.segment_ids_ABT[index]
            logits = self._forward(batch.tokens_ABT[index], segments)[0]
            part, _, right = self._loss(logits, batch.labels_ABT[index].ravel())
            loss, correct = loss + part, correct + right
        return EvalValues(loss, batch.num_target_tokens, correct)

    def logits(self, tokens_BT: Int32Array) -> npt.NDArray[np.float32]:
        return self._forward(tokens_BT, None)[0].reshape(*tokens_BT.shape, -1)

    def decoder(self, batch_size: int, max_tokens: int) -> NumpyDecoder:
        return NumpyDecoder(self, max_tokens)

    def _state(self) -> Arrays:
        moments = {f"{kind}.{name}": array for kind, own in self.moments.items() for name, array in own.items()}
        return dict(sorted((self.parameters | moments).items()))

    def snapshot(self, *, detached: bool) -> NumpySnapshot:
        state = self._state()
        return NumpySnapshot({k: a.copy() for k, a in state.items()} if detached else state, self.updates)

    def load(self, directory: Path) -> None:
        description = json.loads((directory / "engine.json").read_bytes())
        state = self._state()
        if {name: list(array.shape) for name, array in state.items()} != description["shapes"]:
            raise CheckpointError("the state belongs to another architecture", where=str(directory))
        flat = np.frombuffer((directory / "state.bin").read_bytes(), dtype=np.float32)
        offset = 0
        for array in state.values():
            array[...] = flat[offset : offset + array.size].reshape(array.shape)
            offset += array.size
        self.updates = description["updates"]

    def export_weights(self) -> Iterator[NamedArray]:
        yield from ((name, array.copy()) for name, array in sorted(self.parameters.items()))

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        given = dict(weights)
        if {n: a.shape for n, a in given.items()} != {n: a.shape for n, a in self.parameters.items()}:
            raise CheckpointError("the weights belong to another architecture")
        self.parameters = {name: given[name].astype(np.float32).copy() for name in sorted(given)}
        self._reset_optimizer()

    def fingerprint(self, like: str = "") -> str:
        del like
        return self.snapshot(detached=False).fingerprint()

    def device_stats(self) -> Mapping[str, float]:
        return {}

    def environment(self) -> Mapping[str, str | int | bool]:
        return {"engine": self.name, "numpy": np.__version__, "determinism": "bitwise"}

    def adopt_environment(self, recorded: Mapping[str, object]) -> None:
        pass

    def matmul_seconds(self, m: int, k: int, n: int) -> float:
        left, right = _philox(m, k).standard_normal((m, k)), _philox(k, n).standard_normal((k, n))
        began = time.perf_counter()
        np.matmul(left, right)
        return time.perf_counter() - began

    def synchronize(self) -> None:
        pass


def _philox(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
