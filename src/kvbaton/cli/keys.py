"""`kvbaton keys`: the certificates with which a cluster encrypts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["keys"]


def keys(
    folder: Path,
    /,
    *,
    host: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    days: int = 365,
    new_authority: bool = False,
) -> int:
    """Make the certificates of a cluster, or replace them: give the folder to every part with --tls-dir.

    The folder gets ca.crt, tls.crt and tls.key; running instances and routers follow them without a restart. The key that has
    signed them is in the folder `authority` inside: keep that one away from the instances. Needs the program openssl.

    Parameters
    ----------
    folder
        where the files are put.
    host
        name or address for which the certificate is made, for clients that compare it, such as curl; may be repeated.
    days
        how long the certificate is valid.
    new_authority
        make another authority, which is believed beside the earlier ones, and leave the certificate as it is. Bring ca.crt to
        every part, then run `kvbaton keys` again for each, then delete the earlier authorities from ca.crt.
    """
    from kvbaton.wire.certificates import make_certificate
    from kvbaton.wire.tls import ClusterTls

    make_certificate(folder, host, days, new_authority=new_authority)
    made = ClusterTls(folder)
    sys.stdout.write(f"{folder}: certificate and key, valid until {made.valid_until}; use them with --tls-dir {folder}\n")
    return 0
