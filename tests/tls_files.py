"""Certificates for tests, each kind made once: of one authority, of another, and one that has expired."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from kvbaton.wire.certificates import make_certificate, trial_tls
from kvbaton.wire.tls import ClusterTls

__all__ = ["copy_files", "expired_files", "other_tls", "our_tls"]


def our_tls() -> ClusterTls:
    """The certificates of the cluster."""
    return trial_tls()


@functools.cache
def other_tls() -> ClusterTls:
    """Certificates of another authority."""
    folder = trial_tls().folder / "other"
    make_certificate(folder)
    return ClusterTls(folder)


@functools.cache
def expired_files() -> Path:
    """The cluster's authority, and a certificate of it that has expired."""
    folder = trial_tls().folder / "expired"
    shutil.copytree(trial_tls().folder / "authority", folder / "authority")
    shutil.copy(trial_tls().folder / "ca.crt", folder)
    make_certificate(folder, days=-1)
    return folder


def copy_files(source: Path, target: Path) -> Path:
    """Put the three files of one directory into another."""
    target.mkdir(exist_ok=True)
    for name in ("ca.crt", "tls.crt", "tls.key"):
        shutil.copyfile(source / name, target / f"{name}.new")
        (target / f"{name}.new").replace(target / name)
    return target
