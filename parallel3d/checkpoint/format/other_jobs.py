"""Whether another job saves into a run's folder too, between the saves of this one.

A lock tells of two saves at the same time; two jobs seldom save at the same time. But each checkpoint says
which save of its run it was and which process made it: one that this process hasn't made and that wasn't
there when it last looked is another job's.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from parallel3d.checkpoint.format.folder import newest
from parallel3d.checkpoint.format.owner import Owner, this_process
from parallel3d.errors import CheckpointError

__all__ = ["check_alone", "looked"]

_seen: dict[tuple[str, str], int] = {}
"""(process's token, run) -> the last save that the process knows of."""


def looked(run: Path) -> None:
    """What is in ``run`` now is known to this process: it has been asked for, or it has saved."""
    _seen[_key(run)] = newest(run)[0]


def check_alone(run: Path) -> None:
    """Looks whether another job, that lives or may live, has saved into ``run`` since this process looked.

    It is an error in the job that was started later, and a warning in the one before.

    Raises:
        CheckpointError: as said.
    """
    known = _seen.get(_key(run))
    if known is None:
        return
    serial, folder, by = newest(run)
    mine = this_process()
    if by is None or serial <= known or by.token == mine.token or by.is_alive() is False:
        return
    text = (
        f"{run}: another job saves here too: {by}, has saved {folder.name if folder else ''} since this job "
        "last looked. Two jobs in one folder remove each other's checkpoints"
    )
    if _is_before(mine, by):
        _seen[_key(run)] = serial
        warnings.warn(f"{text}: end that one, or give it another folder", stacklevel=3)
        return
    raise CheckpointError(
        f"{text}: end one of them, or give it another folder. If that one has ended, load again (or start "
        "again) to go on from what it has saved"
    )


def _is_before(mine: Owner, other: Owner) -> bool:
    if mine.machine and mine.machine == other.machine and mine.start != other.start:
        return mine.start < other.start
    return (mine.began, mine.token) < (other.began, other.token)


def _key(run: Path) -> tuple[str, str]:
    return this_process().token, os.path.realpath(run)
