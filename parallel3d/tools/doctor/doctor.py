"""doctor: collects facts on every rank, checks them, measures collectives, and reports what is wrong."""

import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import parallel3d.tools.doctor.checks  # noqa: F401 - registers them
from parallel3d.errors import MeshError, PlanningError
from parallel3d.mesh import MeshLayout
from parallel3d.planner.cluster import Cluster
from parallel3d.tools.doctor.collectives import Line, Measurement, lines_of, measure, profile_of
from parallel3d.tools.doctor.facts import GIB, Facts, adopt_slurm, collect
from parallel3d.tools.doctor.finding import (
    ACROSS,
    CHECKS,
    ON_AXES,
    Finding,
    Severity,
    all_checks,
    examine,
    examine_all,
    sort,
)
from parallel3d.tools.doctor.store_group import StoreGroup, clock_offset, connect
from parallel3d.tools.dryrun.result import decoded

_ALONE = "this is one process; start doctor on all ranks: torchrun ... -m parallel3d doctor"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``doctor``.

    Attributes:
        layout: the mesh on whose axes collectives are measured, resolved for the world size; None: one axis
            of all ranks.
        checkpoint: the folder that checkpoints are to be written to.
        gpu, profile, nic: the profile to compare with, as for ``parallel3d plan``; by default that of this
            machine's device, and none on a CPU.
        collectives: whether to measure collectives.
        megabytes: size of the measured tensors in MB; None: a default for the device.
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
        facts: rank -> what it has read of its machine.
        findings: what is wrong, errors first.
        lines: the times of collectives by axis.
        speaks: whether this rank should print the result.
        failed: whether there is an error on any rank; all ranks have the same value.
        not_measured: why collectives were not measured; "" if they were.
    """

    facts: dict[int, Facts]
    findings: list[Finding] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    speaks: bool = True
    failed: bool = False
    not_measured: str = ""

    @property
    def passed(self) -> list[str]:
        """Names of the checks that ran and have no finding."""
        others = {finding.name for finding in self.findings} | set(self.not_run)
        return [check.name for check in all_checks() if check.name not in others]

    @property
    def not_run(self) -> list[str]:
        """Names of the checks that could not run, with one process or no measured collectives."""
        done = (ACROSS, len(self.facts) > 1), (ON_AXES, bool(self.lines))
        areas = {each.about.area for checks, ran in done if not ran for each in checks.values()}
        found = {finding.name for finding in self.findings}
        return [c.name for c in all_checks() if c.area in areas and c.name not in found]

    def hosts(self) -> dict[int, str]:
        """Returns rank -> host name."""
        return {rank: own.place.host for rank, own in self.facts.items()}

    def to_json(self) -> dict[str, Any]:
        """Returns the result as plain values."""
        return {
            "failed": self.failed,
            "findings": [asdict(finding) for finding in self.findings],
            "passed": self.passed,
            "not_run": self.not_run,
            "not_measured": self.not_measured,
            "collectives": [line.to_json() for line in self.lines],
            "facts": {str(rank): asdict(own) for rank, own in self.facts.items()},
        }


def doctor(options: Options, show: Callable[[Diagnosis], None] | None = None) -> Diagnosis:
    """Examines this process, or the whole job if torchrun or srun has started the process.

    It changes nothing, except that it writes a file to the checkpoint folder and removes it again. It takes a
    few seconds, plus up to ``options.timeout`` each time that ranks wait for each other.

    Args:
        show: prints the result, on the rank that reports. It is called before any other rank returns, because
            torchrun ends all ranks as soon as one exits with 1.

    Returns:
        The diagnosis: complete on rank 0. On other ranks ``speaks`` is False, unless rank 0 could not be
        reached.

    Raises:
        PlanningError: there is no such GPU or profile.
    """
    adopt_slurm(os.environ)
    _cluster(options, 1, 1)  # raises for wrong options before anything else
    facts = collect(options.checkpoint)
    place = facts.place
    if place.world_size == 1:
        found = Diagnosis({0: facts}, examine({0: facts}), not_measured=_ALONE)
        found.failed = bool(_errors(found))
    else:
        try:
            return _diagnose_job(options, facts, connect(place, os.environ, options.timeout), show)
        except MeshError as error:  # the first rank of each node reports its own findings
            own = {place.rank: replace(facts, store_error="" if facts.master_error else str(error))}
            found = Diagnosis(own, examine(own), failed=True, not_measured=str(error))
            found.speaks = place.local_rank == 0
    if show is not None and found.speaks:
        show(found)
    return found


def _diagnose_job(
    options: Options, facts: Facts, group: StoreGroup, show: Callable[[Diagnosis], None] | None
) -> Diagnosis:
    facts = _test_shared_disk(facts, group)
    leaders = group.gather("leads", facts.place.local_rank == 0)
    nodes = group.broadcast("nodes", [rank for rank, leads in leaders.items() if rank and leads])
    clock, clock_error = clock_offset(group, nodes)
    facts = replace(facts, clock=clock, clock_error=clock_error)
    by_rank = group.gather("facts", asdict(facts))
    gathered = {rank: decoded(Facts, data) for rank, data in by_rank.items()}
    found = Diagnosis(gathered or {facts.place.rank: facts}, speaks=group.rank == 0)
    if group.rank == 0:
        found.findings = examine(gathered)
        if absent := tuple(rank for rank in range(group.world_size) if rank not in gathered):
            text = f"{len(absent)} of {group.world_size}"
            found.findings = sort([CHECKS["ranks-missing"].finding(text, absent), *found.findings])
        found.not_measured = _why_not_measured(options, found, group)
    found.not_measured = group.broadcast("measure", found.not_measured)
    if not found.not_measured:
        _measure(options, found, group)
    found.failed = bool(_errors(found))
    if show is not None and found.speaks:
        show(found)
    found.failed = group.broadcast("failed", found.failed)
    group.finish()
    return found


def _test_shared_disk(facts: Facts, group: StoreGroup) -> Facts:
    """Returns ``facts`` with whether this rank sees a file that rank 0 writes to the checkpoint folder."""
    disk = facts.writable_disk
    token = f".doctor-{secrets.token_hex(8)}"
    if group.rank == 0 and disk is not None:
        (Path(disk.path) / token).write_text("")
    token = group.broadcast("token", token)
    if disk is not None:
        facts = replace(facts, disk=replace(disk, shared=(Path(disk.path) / token).exists()))
    all_looked = group.gather("looked", True)
    if all_looked and disk is not None:
        (Path(disk.path) / token).unlink(missing_ok=True)
    return facts


def _why_not_measured(options: Options, found: Diagnosis, group: StoreGroup) -> str:
    """Returns, on rank 0, why collectives should not be measured; "" if they should."""
    if not options.collectives:
        return "not asked for"
    if errors := _errors(found):
        return f"first correct {', '.join(errors)}"
    try:
        _layout(options, group.world_size)
    except MeshError as error:
        misfit = CHECKS["mesh-does-not-fit"].finding(str(error))
        found.findings = sort([*found.findings, misfit])
        return "the mesh does not fit"
    return ""


def _layout(options: Options, world_size: int) -> MeshLayout:
    return (options.layout or MeshLayout(1, -1, 1)).resolve(world_size)


def _measure(options: Options, found: Diagnosis, group: StoreGroup) -> None:
    layout = _layout(options, group.world_size)
    gathered = group.gather("times", measure(layout, group, options.megabytes))
    if group.rank:
        return
    seconds = {
        rank: {(axis, name, nbytes): taken for axis, name, nbytes, taken in own["seconds"]}
        for rank, own in gathered.items()
    }
    errors = {rank: own["error"] for rank, own in gathered.items() if own["error"]}
    silent = set(range(group.world_size)) - set(gathered)
    errors |= dict.fromkeys(silent, f"no answer within {group.seconds:.0f} s")
    local = max(own.place.local_world_size for own in found.facts.values())
    cluster = _cluster(options, -(-group.world_size // local), local)
    measurement = Measurement(layout, found.hosts(), seconds, errors, cluster)
    found.lines = lines_of(measurement)
    found.findings = sort([*found.findings, *examine_all(ON_AXES, measurement)])


def _cluster(options: Options, nodes: int, per_node: int) -> Cluster | None:
    """Returns the cluster with the profile to compare with; None if there is no profile."""
    name = options.gpu
    if name is None and options.profile is not None:
        raise PlanningError("which GPU of the profile? Give its name with --gpu")
    if name is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = profile_of(properties.name, properties.total_memory / GIB)
    if name is None:
        return None
    return Cluster.of(name, nodes, per_node, options.nic, options.profile)


def _errors(found: Diagnosis) -> dict[str, None]:
    """Returns the names of the findings that are errors, each once."""
    return dict.fromkeys(f.name for f in found.findings if f.severity == Severity.error)
