"""One of two processes with two host devices each, which write one Orbax state together; started by ``test_orbax.py``.

Arguments: port, index of the process, directory that both share. Both make the engine of the same seed over a mesh of
all four devices and write their parts; the main one joins and commits them when both have written. Prints how many
bytes of arrays it had to write, and how many there are in all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax
from jax.experimental import multihost_utils

from backends.jax_engine.test_sharding import DIVISIBLE, MESHES, on
from vorox.core.files.staged_directory import StagedDirectory, StagedPart


def main() -> None:
    port, index, shared = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    engine = on(MESHES["data 2, fsdp 2"] if sys.argv[4] == "data" else MESHES["fsdp 4"], DIVISIBLE["qwen3"],
                optimizer__name="muon", checkpoint__format="orbax", run__seed=21)  # fmt: skip
    snapshot = engine.snapshot(detached=True)
    arrays = [array for tree in snapshot.trees.values() for array in tree.values()]  # type: ignore[attr-defined]
    written = sum(part.data.nbytes for array in arrays for part in array.addressable_shards if part.replica_id == 0)
    if index == 0:
        with StagedDirectory(shared / "saved") as directory:
            (shared / "name").write_text(str(directory.path))
            multihost_utils.sync_global_devices("begun")
            snapshot.write_part(directory)
            multihost_utils.sync_global_devices("written")
            snapshot.write_metadata(directory, [])
            directory.commit({})
    else:
        multihost_utils.sync_global_devices("begun")
        snapshot.write_part(StagedPart(Path((shared / "name").read_text())))
        multihost_utils.sync_global_devices("written")
    print(written, snapshot.size_bytes, flush=True)
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
    main()
