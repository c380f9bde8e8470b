"""The mirror of a run: checkpoints and run files in an object store, uploaded in the background."""

from vorox.training.mirror.contents import Contents, MirroredCheckpoint, list_mirror
from vorox.training.mirror.restore import download, restore_checkpoint, restore_run
from vorox.training.mirror.run_mirror import (
    Mirror,
    mirror_uri,
    open_mirror,
    preview_from_store,
    remove_mirror,
    restore_newer,
    resume_from_store,
)

__all__ = [
    "Contents",
    "Mirror",
    "MirroredCheckpoint",
    "download",
    "list_mirror",
    "mirror_uri",
    "open_mirror",
    "preview_from_store",
    "remove_mirror",
    "restore_checkpoint",
    "restore_newer",
    "restore_run",
    "resume_from_store",
]
