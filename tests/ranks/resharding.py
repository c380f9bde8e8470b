"""One rank of PyTorch that loads and saves checkpoints in its layout, started by ``test_sharded_checkpoints.py``.

Arguments: replicas, ranks per replica, then ``reshard SOURCE TARGET ...`` or ``measure DIRECTORY``. The rank is in the
environment, as for every command. Rank 0 prints what it measured as JSON.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from conformance.engines import POSITIONS, VOCAB, torch_config
from vorox import backends
from vorox.core.engine import Engine
from vorox.core.files.staged_directory import StagedDirectory, read_manifest
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.training.checkpoints.store import write_shards, write_state

LARGE: dict[str, Any] = {"num_layers": 8, "hidden_size": 320, "num_heads": 4}


def config_of(**sections: dict[str, Any]) -> RunConfig:
    return torch_config(seed=5, **{"optimizer": {"name": "muon"}, **sections})


def save(engine: Engine, target: Path, dist: DistributedContext) -> None:
    """Save as a run does: from a copy, in a background thread, while the state changes."""
    snapshot, saved = engine.snapshot(detached=True), engine.fingerprint()
    for tensors in engine.parameters.values.values():  # type: ignore[attr-defined]
        for tensor in tensors:
            tensor.fill_(float("nan"))

    def write() -> None:
        assert snapshot.nonfinite_array() == ""
        if not dist.is_main:
            write_shards(snapshot, dist)
            return
        with StagedDirectory(target) as directory:
            fingerprint = write_state(snapshot, directory, dist)
            assert fingerprint == saved
            directory.commit({"fingerprint": fingerprint})

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write).result()


def reshard(engine: Engine, dist: DistributedContext, paths: list[Path]) -> None:
    for source, target in zip(paths[::2], paths[1::2], strict=True):
        recorded = read_manifest(source)["metadata"]["fingerprint"]
        engine.load(source)
        assert engine.fingerprint() == recorded
        save(engine, target, dist)
        dist.barrier("saved")


def memory_bytes(name: str) -> int:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name)]
    return int(line.split()[1]) * 1024


def measure(engine: Engine, dist: DistributedContext, directory: Path) -> None:
    """Print by how much the memory of each rank grows during a save and a load."""
    grown: list[int] = []
    for action in (lambda: save(engine, directory, dist), lambda: engine.load(directory)):
        dist.barrier("before")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory_bytes("VmRSS")
        action()
        grown.append(memory_bytes("VmHWM") - before)
        dist.barrier("after")
    by_rank: list[list[int]] = []
    dist.agree("grown", grown, by_rank.extend)
    if dist.is_main:
        print(json.dumps({"grown_bytes": by_rank, "state_bytes": engine.snapshot(detached=False).size_bytes}))


def main() -> None:
    data, fsdp, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    paths = [Path(word) for word in sys.argv[4:]]
    parallel = {"data_parallel_size": data, "fsdp_size": fsdp}
    shape = {"model": LARGE, "optimizer": {"name": "adamw"}} if action == "measure" else {}
    config = config_of(parallel=parallel, train={"num_steps": 10, "global_batch_sequences": 8,
                       "micro_batch_sequences": 1}, **shape)  # fmt: skip
    dist = backends.load("torch").connect(config)
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
    engine = backends.load("torch").create(config, spec, dist)
    if action == "measure":
        measure(engine, dist, paths[0])
    else:
        reshard(engine, dist, paths)
    dist.barrier("end")


if __name__ == "__main__":
    main()
