"""Ranks compare what they have before it communicates: digests first, and texts only if they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from parallel3d._compat_groups import group_timeout
from parallel3d.mesh.agreement import check_agreement
from parallel3d.mesh.store import others

__all__ = ["compare_digests"]


def compare_digests(
    topic: str, ranks: Sequence[int], texts: Callable[[], Mapping[str, str]]
) -> None:
    """Checks that all of ``ranks`` have the same ``texts``; each of them must call it.

    One round trip to the store. Ranks may come as late as the process group's timeout allows: one may have
    data to read. Nothing happens where there is no other process.

    Args:
        topic: what is compared, as errors name it.
        ranks: the same list on each of them.
        texts: name -> value of all that must be alike.

    Raises:
        AgreementError: on every rank, with the names that differ, their values and the odd ranks.
        PeerFailureError: within ``guards.watch``: another rank has failed meanwhile.
    """
    if others() is None or len(ranks) < 2:
        return
    values = texts()
    digest = hashlib.sha256()
    for name, text in values.items():
        digest.update(f"{len(name)} {name} {len(text)} {text}".encode())
    check_agreement(
        topic,
        {"digest": digest.hexdigest()},
        ranks=ranks,
        timeout=group_timeout(),
        details=lambda: values,
    )
