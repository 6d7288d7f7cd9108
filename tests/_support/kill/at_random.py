"""Kills training with SIGKILL at random moments, and compares it with the same training that nobody killed.

    python tests/_support/kill/at_random.py [--kills 30] [--others 8] [--torchrun 3] [--seed 0] [--folder DIR]

``examples/llama/train.py`` runs on 4 gloo processes with FSDP, HSDP and FSDP + TP, saving in the foreground
or the background. One rank, or all, die at a random moment: by the clock, or in the middle of forward,
backward, a collective, a write, a rename, a load (moments.py). The job is started again until it is done.
Then

- each step of each start had the samples, the loss and the gradient norm of the run that nobody killed, and
  the last weights and optimizer states are the same: bit for bit;
- where it went on on other numbers of processes and other meshes, each step's samples are the same, and its
  loss within 1e-6 in float32, 1e-12 in float64;
- under ``torchrun --max-restarts`` it is as in the first case.

Exits with 1 if anything is not so.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":  # under pytest they are there already
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "llama")]

from _support.kill.supervisor import Kill, run_by_torchrun, run_ranks  # noqa: E402
from _support.kill.verify import (  # noqa: E402
    Record,
    Start,
    different_end,
    different_states,
    different_steps,
    wrong_samples,
)

STEPS, BATCH = 16, 24
OPTIONS = ("--size", "nano", "--steps", str(STEPS), "--batch", str(BATCH), "--keep", "2")
DATA, DATA_BYTES = "text", 9_000
"""So few that the second epoch begins in step 11."""
Mesh = tuple[int, int, int]


@dataclass(frozen=True)
class Job:
    """One way to train.

    Attributes:
        meshes: (replicate, shard, tp) of its first start, its second, ...; then again from the first.
        options: of train.py, beside the mesh.
        tolerance: of the loss; 0: all is the same, bit for bit.
    """

    name: str
    meshes: tuple[Mesh, ...]
    options: tuple[str, ...] = ("--save-every", "3")
    tolerance: float = 0.0

    def arguments(self, start: int, folder: Path) -> tuple[list[str], int]:
        """(train.py's options for a start, the number of ranks)."""
        mesh = self.meshes[start % len(self.meshes)]
        axes = zip(("--replicate", "--shard", "--tp"), map(str, mesh), strict=True)
        files = ["--checkpoint", str(folder / "run"), "--step-log", str(folder / "log")]
        files += ["--data", str(folder.parent / DATA)]
        options = [*OPTIONS, *self.options, *(part for pair in axes for part in pair), *files]
        return options, mesh[0] * mesh[1] * mesh[2]


SAME = (
    Job("FSDP", ((1, 4, 1),)),
    Job("HSDP, background", ((2, 2, 1),), ("--save-every", "3", "--async-save")),
    Job("FSDP + TP, background", ((1, 2, 2),), ("--save-every", "3", "--async-save")),
)
MESHES = ((1, 4, 1), (1, 2, 1), (2, 2, 2), (1, 1, 1), (1, 2, 2), (1, 3, 1), (2, 1, 2), (1, 4, 1))
OTHERS = (
    Job("other meshes", MESHES, ("--save-every", "1"), tolerance=1e-6),
    Job("other meshes, float64", MESHES, ("--save-every", "1", "--double"), tolerance=1e-12),
)
AT_TORCHRUN: tuple[Kill, ...] = (
    {"rank": 1, "moment": "backward", "call": 9},
    {"rank": 0, "moment": "before rename", "call": 1},
    {"rank": 3, "moment": "start", "call": 1},
)


def random_kill(rng: random.Random, ranks: int, seconds: float, *, resumed: bool) -> Kill:
    """A rank and a moment; ``seconds``: how long a start would take that isn't killed."""
    steps = rng.randint(1, 6)
    calls = {"forward": 2 * steps, "backward": 2 * steps, "all-reduce": steps, "optimizer": steps}
    calls |= {
        "gradient exchange": 2 * steps,
        "copy": rng.randint(1, 2),
        "write": rng.randint(1, 100),
    }
    calls |= {"before fsync": rng.randint(1, 2), "start": 1}
    on_first = {name: rng.randint(1, 2) for name in ("before rename", "after rename")}
    on_first |= {"remove": rng.randint(1, 4), "before fsync of rank 0": rng.randint(1, 10)}
    if resumed:
        calls["load"] = rng.randint(1, 40)
    name = rng.choice([*calls, *on_first, "clock", "clock, all ranks"])
    if name.startswith("clock"):
        rank = "all" if name.endswith("all ranks") else rng.randrange(ranks)
        return {"rank": rank, "moment": "clock", "seconds": rng.uniform(0.1, 1.0) * seconds}
    rank = 0 if name in on_first else rng.randrange(ranks)
    return {
        "rank": rank,
        "moment": name.removesuffix(" of rank 0"),
        "call": (calls | on_first)[name],
    }


@dataclass
class Killer:
    """Runs jobs, kills them, compares; keeps what came of it."""

    folder: Path
    rng: random.Random
    jobs = kills = starts = steps = forced = 0
    slowest_end = 0.0
    largest: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    whole: dict[object, tuple[Path, Record, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = self.folder / DATA
        self.data.write_bytes((Path(__file__).read_bytes())[:DATA_BYTES])

    def kill(self, job: Job, kills: int) -> None:
        """Kills a job so many times; where it is done before, another one like it."""
        print(f"\n{job.name}, (replicate, shard, tp) = {', '.join(map(str, job.meshes))}")
        print(ROW.format(*HEAD), flush=True)
        wanted = self.kills + kills
        while self.kills < wanted:
            folder = self._new_folder(job)
            self._kill_until_done(job, folder, wanted)
            self._judge(job, folder)

    def by_torchrun(self, job: Job, kills: Sequence[Kill]) -> None:
        """The same under torchrun, which starts the job again itself."""
        print(
            f"\n{job.name} by torchrun --max-restarts {len(kills)}\n{ROW.format(*HEAD)}", flush=True
        )
        self._whole(job)
        folder = self._new_folder(job)
        arguments, ranks = job.arguments(0, folder)
        code = run_by_torchrun(arguments, ranks, kills, folder / "output")
        found = Record.read(folder / "log")
        logged = iter(found.starts[1:])
        for kill, following in zip(kills, [*kills[1:], None], strict=True):
            # Before its first line.
            silent = following is not None and following["moment"] == "start"
            self._show(job, kill, None if silent else next(logged, None), found)
        killed = (folder / "output").read_text().count("failed (exitcode: -9)")
        self.starts += len(kills) + 1
        self.kills += killed
        if code or killed != len(kills):
            self._problem(folder, f"torchrun ended with {code} after {killed} kills")
        self._judge(job, folder)

    def _kill_until_done(self, job: Job, folder: Path, wanted: int) -> None:
        """Starts a job until it is done, with a kill in each start until there have been enough."""
        seconds, before = self._whole(job)[2], None
        for number in range(100):
            arguments, ranks = job.arguments(number, folder)
            kill = random_kill(self.rng, ranks, seconds, resumed=number > 0)
            known = len(Record.read(folder / "log").starts)
            arranged = kill if self.kills < wanted else None
            ending = run_ranks(arguments, ranks, arranged, folder / "output")
            found = Record.read(folder / "log")
            if before is not None:
                self._show(job, before, next(iter(found.starts[known:]), None), found)
            before = kill if ending.killed else None
            self.starts += 1
            self.kills += bool(ending.killed)
            self.forced += len(ending.forced)
            self.slowest_end = max(self.slowest_end, ending.peers)
            if not ending.failed:
                if arranged is not None and not ending.killed:
                    print(ROW.format(_moment(arranged), arranged["rank"], "done before", ""))
                return
            if not ending.killed:
                raise RuntimeError(f"{job.name} failed without being killed; see {folder}/output")
        raise RuntimeError(f"{job.name} does not come to an end; see {folder}/output")

    def _whole(self, job: Job) -> tuple[Path, Record, float]:
        """Folder, record and seconds of the job when nobody kills it, on its first mesh."""
        key = job.meshes[0], job.options
        if key not in self.whole:
            folder = self._new_folder(job)
            arguments, ranks = job.arguments(0, folder)
            ending = run_ranks(arguments, ranks, None, folder / "output")
            record = Record.read(folder / "log")
            if ending.failed or record.end is None:
                raise RuntimeError(f"{job.name} fails by itself; see {folder}/output")
            for text in wrong_samples(record, self.data, BATCH):
                self._problem(folder, text)
            self.whole[key] = folder, record, ending.seconds
        return self.whole[key]

    def _show(self, job: Job, kill: Kill, start: Start | None, found: Record) -> None:
        """A row about a kill, once the next start has come to its end or been killed too."""
        wrong, _ = different_steps(self._whole(job)[1], found, job.tolerance)
        went_on = "(killed again)"
        if start is not None:
            went_on = f"step {start.step}" if start.step else "the beginning"
        print(
            ROW.format(_moment(kill), kill["rank"], went_on, "no" if wrong else "yes"), flush=True
        )

    def _judge(self, job: Job, folder: Path) -> None:
        """Compares a job that is done with the one that nobody killed."""
        whole_folder, whole, _ = self._whole(job)
        found = Record.read(folder / "log")
        wrong, largest = different_steps(whole, found, job.tolerance)
        wrong += different_end(whole, found, job.tolerance)
        wrong += wrong_samples(found, self.data, BATCH)
        if not job.tolerance:
            wrong += [
                f"{n} differs" for n in different_states(whole_folder / "run", folder / "run")
            ]
        left = sorted(path.name for path in (folder / "run").iterdir())
        if left != sorted(path.name for path in (whole_folder / "run").iterdir()):
            wrong.append(f"left behind: {left}")
        for text in wrong:
            self._problem(folder, text)
        self.steps += sum(1 for _ in found.lines())
        self.largest[job.name] = max(largest, self.largest.get(job.name, 0.0))
        print(
            "done: " + ("NOT as if nobody had killed it" if wrong else VERDICT[not job.tolerance])
        )

    def _new_folder(self, job: Job) -> Path:
        self.jobs += 1
        folder = self.folder / f"{self.jobs:02d} {job.name}"
        folder.mkdir(parents=True)
        return folder

    def _problem(self, folder: Path, text: str) -> None:
        self.problems.append(f"{folder}: {text}")


def _moment(kill: Kill) -> str:
    return f"{kill['moment']}, call {kill['call']}" if "call" in kill else str(kill["moment"])


ROW = "  {:<26} {:>5}  {:<16} {:<6}"
HEAD = ("killed in", "rank", "went on from", "as it was")
VERDICT = {
    True: "samples, losses, weights and optimizer state are those of the whole run, bit for bit",
    False: "its samples are those of the whole run, its losses nearly",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30, help="on the same processes")
    parser.add_argument("--others", type=int, default=8, help="going on on others, each dtype")
    parser.add_argument("--torchrun", type=int, default=3, choices=range(4), help="kills under it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for checkpoints, logs and output")
    options = parser.parse_args()
    begin = time.monotonic()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-test-"))
    print(f"in {folder}")
    killer = Killer(folder, random.Random(options.seed))
    for index, job in enumerate(SAME):
        killer.kill(job, options.kills * (index + 1) // 3 - options.kills * index // 3)
    for job in OTHERS:
        killer.kill(job, options.others)
    if options.torchrun:
        killer.by_torchrun(SAME[0], AT_TORCHRUN[: options.torchrun])
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    print(
        f"\n{killer.kills} kills, {killer.starts} starts, {killer.steps} steps compared, in {minutes} min "
        f"{seconds} s; ranks that had to be ended because they hung: {killer.forced}; the others ended at "
        f"most {killer.slowest_end:.1f} s after the one that was killed"
    )
    for name, difference in killer.largest.items():
        print(f"largest difference of the loss, {name}: {difference:.1e}")
    if killer.problems:
        sys.exit("\n".join(["NOT ok:", *killer.problems]))
    print("all ok")


if __name__ == "__main__":
    main()
