"""The mirror of a run: checkpoints and run files in an object store, uploaded in the background."""

from vorox.training.mirror.contents import Contents, MirroredCheckpoint, list_mirror
from vorox.training.mirror.restore import download, restore_run
from vorox.training.mirror.run_mirror import Mirror, mirror_uri, open_mirror, remove_mirror, resume_from_store

__all__ = [
    "Contents",
    "Mirror",
    "MirroredCheckpoint",
    "download",
    "list_mirror",
    "mirror_uri",
    "open_mirror",
    "remove_mirror",
    "restore_run",
    "resume_from_store",
]
