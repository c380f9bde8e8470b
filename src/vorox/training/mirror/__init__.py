"""The mirror of a run: its checkpoints and its record, copied to a store in the background and brought back from it."""

from vorox.training.mirror.bringing_back import bring_back, download
from vorox.training.mirror.contents import Contents, MirroredCheckpoint, contents_of
from vorox.training.mirror.opening import Mirrored, mirror_of, mirrored, remove_mirror, resume_from_store

__all__ = [
    "Contents",
    "Mirrored",
    "MirroredCheckpoint",
    "bring_back",
    "contents_of",
    "download",
    "mirror_of",
    "mirrored",
    "remove_mirror",
    "resume_from_store",
]
