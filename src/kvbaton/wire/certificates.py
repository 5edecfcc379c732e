"""Makes the certificates of a cluster with the `openssl` program: an authority once, then a certificate and key per call.

The standard library signs nothing, and a package that does would be a dependency of every instance for what is done once a
year. Certificates from elsewhere, such as cert-manager's, do as well: the three files are all that is needed.
"""

from __future__ import annotations

import atexit
import functools
import ipaddress
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvbaton.core.addresses import is_host
from kvbaton.errors import ConfigError, LocalError
from kvbaton.wire.tls import TLS_FILES, ClusterTls

__all__ = ["check_openssl", "make_certificate", "trial_tls"]

AUTHORITY = "authority"
"""The folder, beside the three files, in which the authority's key is; nothing but this command needs it."""

_OPENSSL_S = 60.0
_TRIAL_VARIABLE = "KVBATON_TRIAL_TLS_DIR"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_AUTHORITY_DAYS = 3650
_REQUEST = "[req]\ndistinguished_name = name\nprompt = no\n[name]\nCN = {name}\n"
_AUTHORITY_PART = (
    "x509_extensions = part\n[part]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign, cRLSign\n"
)
_MEMBER_PART = (
    "basicConstraints = critical, CA:FALSE\nkeyUsage = critical, digitalSignature\n"
    "extendedKeyUsage = serverAuth, clientAuth\nsubjectAltName = {names}\nauthorityKeyIdentifier = keyid\n"
)


def make_certificate(folder: Path, hosts: Sequence[str] = (), days: int = 365, *, new_authority: bool = False) -> None:
    """Put a new certificate and key into `folder`, and the authority that has signed it; made first, where there is none.

    A new authority is believed beside those before it, and signs from the next call on: members that do not believe it yet
    would refuse its certificates. Each file is replaced as a whole, so that what follows the files sees the old or the new one.
    Raises ConfigError, or LocalError with what `openssl` printed.
    """
    names = ", ".join(_alternative_name(host) for host in (hosts or ("localhost", "127.0.0.1", "::1")))
    authority = folder / AUTHORITY
    try:
        authority.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=authority) as temporary:
            work = Path(temporary)
            is_first = not (authority / "ca.key").exists()
            if new_authority or is_first:
                _make_authority(work)
                earlier = (folder / TLS_FILES[0]).read_bytes() if (folder / TLS_FILES[0]).exists() else b""
                (work / "believed").write_bytes((work / "ca.crt").read_bytes() + earlier)
                (work / "believed").replace(folder / TLS_FILES[0])
                for name in ("ca.crt", "ca.key"):
                    (work / name).replace(authority / name)
            if new_authority and not is_first:
                return
            _make_member(work, authority, names, days)
            for name in TLS_FILES[1:]:
                (work / name).replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}; name a folder that can be written to") from error


def _make_authority(work: Path) -> None:
    config = work / "authority.cnf"
    name = f"kvbaton {secrets.token_hex(4)}"
    config.write_text(_REQUEST.replace("[name]", _AUTHORITY_PART + "[name]").format(name=name))
    files = ("-keyout", str(work / "ca.key"), "-out", str(work / "ca.crt"))
    _openssl("req", "-x509", *_KEY, "-config", str(config), "-days", str(_AUTHORITY_DAYS), *files)


def _make_member(work: Path, authority: Path, names: str, days: int) -> None:
    config, part, request = work / "member.cnf", work / "member.ext", work / "member.csr"
    config.write_text(_REQUEST.format(name="kvbaton member"))
    part.write_text(_MEMBER_PART.format(names=names))
    _openssl("req", *_KEY, "-config", str(config), "-keyout", str(work / "tls.key"), "-out", str(request))
    signer = (
        "-CA",
        str(authority / "ca.crt"),
        "-CAkey",
        str(authority / "ca.key"),
        "-set_serial",
        f"0x{secrets.token_hex(15)}",
    )
    files = ("-in", str(request), "-out", str(work / "tls.crt"), "-extfile", str(part))
    _openssl("x509", "-req", *files, *signer, "-days", str(days))


def _openssl(*arguments: str) -> None:
    try:
        done = subprocess.run(
            ["openssl", *arguments], capture_output=True, text=True, timeout=_OPENSSL_S, check=False, umask=0o077
        )
    except OSError as error:
        raise LocalError(f"openssl cannot be run ({error.strerror}); install it, or bring certificates of your own") from error
    if done.returncode:
        raise LocalError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-500:]}")


def _alternative_name(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        if not is_host(host):
            raise ConfigError(f"--host is {host!r}: no IP address, and no host name") from None
        return f"DNS:{host}"


def check_openssl() -> None:
    """Raise LocalError where the program is missing."""
    _openssl("version")


@functools.cache
def trial_tls() -> ClusterTls:
    """Certificates for trials, tests and measurements of this process and of those that it starts; gone with it."""
    folder = os.environ.get(_TRIAL_VARIABLE)
    if folder is None:
        folder = os.environ[_TRIAL_VARIABLE] = tempfile.mkdtemp(prefix="kvbaton-tls-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        make_certificate(Path(folder))
    return ClusterTls(Path(folder))
