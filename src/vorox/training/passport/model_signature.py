"""Sign a directory of a model as OpenSSF's model signing does, with a key and without a network.

In: a directory and a private key. Out: ``model.sig`` in it, a Sigstore bundle with the SHA-256 of every other file.
``model_signing verify key`` checks it without Vorox and without the run (https://github.com/sigstore/model-transparency).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.files import atomic
from vorox.training.checkpoints.signature import is_ecdsa, load_private_key, public_pem
from vorox.training.export.checkpoint import SIGNATURE_NAME
from vorox.training.passport.description import library


def check_signing_key(path: Path) -> None:
    """Refuse a key that cannot sign a model.

    Raises:
        ConfigError: It cannot be read or is of another kind, or the package is not installed.
    """
    library("model_signing")
    if not is_ecdsa(load_private_key(path)):
        raise ConfigError(
            "OpenSSF model signing has no Ed25519 keys", where=str(path), saved="nothing was written",
            hint="openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out KEY",
        )  # fmt: skip


def sign_model(directory: Path, key: Path) -> Path:
    """Write the signature of a directory, or check that the one in it is by this key and of these files.

    Raises:
        ConfigError: The directory is signed by another key, or has changed since.
    """
    model_signing = library("model_signing")
    target = directory / SIGNATURE_NAME
    if target.exists():
        _check(model_signing, directory, key)
        return target
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[SIGNATURE_NAME])
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=key)
    staged = atomic.temporary_name(directory.with_name(f"{directory.name}.sig"))
    try:
        signer.set_hashing_config(hashing).sign(directory, staged)
        atomic.sync_path(staged)
        atomic.rename(staged, target)
    finally:
        staged.unlink(missing_ok=True)
    return target


def _check(model_signing: Any, directory: Path, key: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        public = Path(folder, "public.pem")
        public.write_bytes(public_pem(load_private_key(key)))
        verifier = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=public)
        try:
            verifier.verify(directory, directory / SIGNATURE_NAME)
        except Exception as error:  # the package raises the errors of its parsers too
            raise ConfigError(
                f"The directory has a signature that is not of this key: {error}",
                where=str(directory / SIGNATURE_NAME), saved="nothing was changed",
                hint="export to another directory, or remove the signature",
            ) from error  # fmt: skip
