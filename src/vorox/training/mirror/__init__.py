"""The mirror of a run: its checkpoints and its record, copied to a store in the background and brought back from it."""

from vorox.training.mirror.contents import Contents, MirroredCheckpoint, contents_of
from vorox.training.mirror.opening import Mirror, mirror_of, open_mirror, remove_mirror, resume_from_store
from vorox.training.mirror.restore import download, restore_run

__all__ = [
    "Contents",
    "Mirror",
    "MirroredCheckpoint",
    "contents_of",
    "download",
    "mirror_of",
    "open_mirror",
    "remove_mirror",
    "restore_run",
    "resume_from_store",
]
