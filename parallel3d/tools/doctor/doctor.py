"""doctor: collects, meets the other ranks, measures, and says what is wrong."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel3d.errors import MeshError, PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.tools.doctor import checks as _checks  # noqa: F401 - registers them
from parallel3d.tools.doctor.collecting import collect
from parallel3d.tools.doctor.facts import GIB, Facts, adopt_slurm, place_of
from parallel3d.tools.doctor.finding import (
    CHECKS,
    Finding,
    Severity,
    all_checks,
    examine,
    examine_axes,
    sort,
)
from parallel3d.tools.doctor.measuring import Line, Measurement, lines_of
from parallel3d.tools.doctor.meeting import Meeting, clock_offset, meet, profile_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``doctor`` is asked.

    Attributes:
        layout: of the mesh whose collectives are measured, resolved against the world size; None: one axis
            of all ranks.
        checkpoint: the folder that checkpoints are to go to.
        gpu, profile, nic: what to compare with, as in ``parallel3d plan``; by default the profile of this
            machine's device, and none on the CPU.
        collectives: whether to measure.
        megabytes: of the tensors; see ``measure``.
        timeout: seconds that ranks wait for each other.
    """

    layout: MeshLayout | None = None
    checkpoint: Path | None = None
    gpu: str | None = None
    profile: Path | None = None
    nic: float | None = None
    collectives: bool = True
    megabytes: float | None = None
    timeout: float = 60.0


@dataclass
class Diagnosis:
    """What ``doctor`` has found.

    Attributes:
        facts: rank -> what it has seen.
        findings: the worst first.
        lines: what collectives took.
        speaks: whether this rank is to print it.
        failed: whether there is an error on any rank; the same on all.
        passed: names of the checks that had nothing to say.
        not_measured: why collectives were not; "" if they were.
    """

    facts: dict[int, Facts]
    findings: list[Finding] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    speaks: bool = True
    failed: bool = False
    not_measured: str = ""

    @property
    def passed(self) -> list[str]:
        found = {each.name for each in self.findings}
        return [each.name for each in all_checks() if each.name not in found]

    def hosts(self) -> dict[int, str]:
        return {rank: own.place.host for rank, own in self.facts.items()}

    def to_json(self) -> dict[str, Any]:
        """Of plain values."""
        return {
            "failed": self.failed,
            "findings": [asdict(each) for each in self.findings],
            "passed": self.passed,
            "not_measured": self.not_measured,
            "collectives": [_line_to_json(each) for each in self.lines],
            "facts": {str(rank): own.to_json() for rank, own in self.facts.items()},
        }


def doctor(options: Options, show: Callable[[Diagnosis], None] | None = None) -> Diagnosis:
    """Looks at this process, or, in one that torchrun or srun has started, at the whole job with all ranks.

    Nothing is changed but a file that is written to the checkpoint folder and removed again. It takes a
    few seconds, and no longer than ``options.timeout`` for each time that ranks wait for each other.

    Args:
        show: what shows it, called on the rank that speaks before any other rank returns: one that ended
            with an exit code of 1 would have torchrun end the rest.

    Returns:
        On rank 0 everything; on other ranks ``speaks`` is False, unless rank 0 could not be reached.

    Raises:
        PlanningError: no such GPU or profile.
    """
    adopt_slurm(os.environ)
    cluster_of(options, 1, 1)  # an error of the options' own comes first
    place = place_of(os.environ)
    facts = collect(options.checkpoint)
    if place.world_size == 1:
        found = Diagnosis({0: facts}, examine({0: facts}), not_measured="one process has no axes")
        found.failed = _has_error(found.findings)
        return _shown(found, show)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        if not address or not port.isdigit():
            raise MeshError(f"MASTER_ADDR is {address!r} and MASTER_PORT {port!r}")
        meeting = meet(place, address, int(port), options.timeout)
        return _together(options, facts, meeting, show)
    except MeshError as error:
        return _shown(_alone(facts, str(error)), show)


def _shown(found: Diagnosis, show: Callable[[Diagnosis], None] | None) -> Diagnosis:
    if show is not None and found.speaks:
        show(found)
    return found


def _alone(facts: Facts, why: str) -> Diagnosis:
    """The store can't be reached: the first rank of each node says what it sees itself."""
    own = facts if facts.master_error else replace(facts, store_error=why)
    rank = facts.place.rank
    speaks = facts.place.local_rank == 0
    found = examine({rank: own})
    return Diagnosis({rank: own}, found, speaks=speaks, failed=True, not_measured=why)


def _together(
    options: Options, facts: Facts, meeting: Meeting, show: Callable[[Diagnosis], None] | None
) -> Diagnosis:
    facts = _share_disk(facts, meeting)
    leads = facts.place.local_rank == 0
    leaders = meeting.gather("leads", leads)
    nodes = meeting.tell("nodes", [rank for rank, lead in leaders.items() if rank and lead])
    clock, sure = clock_offset(meeting, nodes)
    facts = replace(facts, clock=clock, clock_error=sure)
    gathered = {
        rank: Facts.from_json(data)
        for rank, data in meeting.gather("facts", facts.to_json()).items()
    }
    found = Diagnosis(gathered or {facts.place.rank: facts}, speaks=meeting.rank == 0)
    if meeting.rank == 0:
        found.findings = sort([*_missing(gathered, meeting.world_size), *examine(gathered)])
        found.not_measured = _why_not(options, found, meeting)
    found.not_measured = meeting.tell("measure", found.not_measured)
    if not found.not_measured:
        _measure(options, found, meeting)
    found.failed = _has_error(found.findings)
    _shown(found, show)
    found.failed = meeting.tell("failed", found.failed)
    meeting.part()
    return found


def _share_disk(facts: Facts, meeting: Meeting) -> Facts:
    """Whether a file that rank 0 writes is seen by this rank."""
    disk = facts.disk
    token = f".doctor-{secrets.token_hex(8)}"
    if meeting.rank == 0 and disk is not None and not disk.error:
        (Path(disk.path) / token).write_text("")
    token = meeting.tell("token", token)
    if disk is not None and not disk.error:
        seen = (Path(disk.path) / token).exists()
        facts = replace(facts, disk=replace(disk, shared=seen))
    looked = meeting.gather("looked", True)
    if looked and disk is not None and not disk.error:
        (Path(disk.path) / token).unlink(missing_ok=True)
    return facts


def _missing(gathered: dict[int, Facts], world_size: int) -> list[Finding]:
    absent = tuple(rank for rank in range(world_size) if rank not in gathered)
    return (
        [CHECKS["ranks-missing"].finding(f"{len(absent)} of {world_size}", absent)]
        if absent
        else []
    )


def _why_not(options: Options, found: Diagnosis, meeting: Meeting) -> str:
    """On rank 0: why collectives are not to be measured; "" if they are."""
    if not options.collectives:
        return "not asked for"
    errors = [each.name for each in found.findings if each.severity == Severity.error]
    if errors:
        return f"first mend {', '.join(dict.fromkeys(errors))}"
    try:
        _layout(options, meeting.world_size)
    except MeshError as error:
        found.findings = sort(
            [*found.findings, CHECKS["mesh-does-not-fit"].finding(str(error), ())]
        )
        return "the mesh does not fit"
    return ""


def _layout(options: Options, world_size: int) -> MeshLayout:
    wanted = options.layout or MeshLayout(1, -1, 1)
    return wanted.resolve(world_size)


def _measure(options: Options, found: Diagnosis, meeting: Meeting) -> None:
    from parallel3d.tools.doctor.meeting import measure

    layout = _layout(options, meeting.world_size)
    gathered = meeting.gather("times", measure(layout, meeting, options.megabytes))
    if meeting.rank:
        return
    seconds = {
        rank: {(axis, name, count): taken for axis, name, count, taken in each["seconds"]}
        for rank, each in gathered.items()
    }
    errors = {rank: each["error"] for rank, each in gathered.items() if each["error"]}
    silent = set(range(meeting.world_size)) - set(gathered)
    errors |= dict.fromkeys(silent, f"nothing heard within {meeting.seconds:.0f} s")
    local = max(own.place.local_world_size for own in found.facts.values())
    cluster = cluster_of(options, -(-meeting.world_size // local), local)
    measurement = Measurement(layout, found.hosts(), seconds, errors, cluster)
    found.lines = lines_of(measurement)
    found.findings = sort([*found.findings, *examine_axes(measurement)])


def cluster_of(options: Options, nodes: int, per_node: int) -> Cluster | None:
    """What to compare with.

    Raises:
        PlanningError: there is no such GPU, or no such profile.
    """
    name = options.gpu
    if name is None:
        if options.profile is not None:
            raise PlanningError("which GPU of the profile? Give --gpu its name")
        import torch

        if torch.cuda.is_available():
            known = torch.cuda.get_device_properties(0)
            name = profile_of(known.name, known.total_memory / GIB)
    if name is None:
        return None
    return Cluster.of(name, nodes, per_node, options.nic, options.profile)


def _has_error(findings: list[Finding]) -> bool:
    return any(each.severity == Severity.error for each in findings)


def _line_to_json(line: Line) -> dict[str, Any]:
    groups = [{"ranks": list(g), "bytes_per_second": b} for g, b in line.groups.items()]
    return {**asdict(line), "groups": groups, "bandwidth": line.bandwidth, "slowest": line.slowest}
