"""What all tests share: the pool of gloo processes, the engine under test, a guard against leaked groups."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from _support import changed, hosts, tiers
from _support.engines import ENGINES, Engine, OnRanks, check_fault
from _support.forked import python_at
from _support.parity_table import MARKED, gather
from torch import distributed as dist

from parallel3d.testing import GlooPool
from parallel3d.testing.gloo_pool import _PRELOAD

# What most tests on processes use is imported once, before these are forked.
_PRELOAD += ["parallel3d.testing.parity", "parallel3d.parallelize", "parallel3d.optim.local"]
_PRELOAD += ["parallel3d.checkpoint.loading", "parallel3d.checkpoint.saving"]
_PRELOAD += ["torch.distributed.checkpoint.state_dict", "parallel3d.guards.session"]

CONCERNED = pytest.StashKey[set[Path]]()
torch.set_num_threads(1)  # tests run side by side
tiers.today()  # the workers of xdist get the day of the process that starts them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        choices=sorted(ENGINES),
        default="parallel3d",
        help="what the tests with the fixtures engine and on_ranks run on",
    )
    parser.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="REF",
        help="run only the test files that the changes since REF (default: the last commit) concern",
    )
    parser.addoption("--only-engine-tests", action="store_true", help="run only those tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: the worker with the pool mostly waits for its processes."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that says ``pytestmark = pytest.mark.slow``, ``ci`` or ``full`` is not imported where its tests
    are deselected: the import (transformers, Lightning, ...) takes each worker longer than many tests. Unless
    it has marks of which docs/parity.md is made."""
    if not collection_path.name.startswith("test_"):
        return None
    since = config.getoption("--changed")
    if since is not None:
        if CONCERNED not in config.stash:
            config.stash[CONCERNED] = changed.concerned(changed.changed_since(since))
        if collection_path not in config.stash[CONCERNED]:
            return True
    tiers_of = {"slow": "slow", "ci": "slow", "full": "full"}
    deselected = [m for m, tier in tiers_of.items() if f"not {tier}" in config.option.markexpr]
    text = collection_path.read_text() if deselected else ""
    if "mark.parity(" in text:
        return None
    return True if any(f"\npytestmark = pytest.mark.{m}" in text for m in deselected) else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One xdist worker runs every test that needs the pool, the hosts or the fork server: one of each."""
    config.stash[MARKED] = gather(items)
    for item in items:  # each xdist worker hashes strings its own way: a set's repr is no id
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            if isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.nodeid:
                raise pytest.UsageError(f"{item.nodeid}: a set has no order; use a list")
    if config.getoption("--only-engine-tests"):
        items[:] = [item for item in items if "engine" in getattr(item, "fixturenames", ())]
    if not tiers.all_are_asked_for(config):
        tiers.mark(items)
    if "transformers" in sys.modules:  # some test imports it, and so would each process of the pool
        _PRELOAD.append("transformers.models.llama.modeling_llama")
    for item in items:
        if tiers.on_processes(item):
            item.add_marker(pytest.mark.xdist_group("gloo"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector need not look through it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Eight gloo workers for the whole test run; they start with the first ``run``."""
    with GlooPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """``[*python, script]`` starts a program that need not import torch; one for the whole test run."""
    with python_at(str(tmp_path_factory.mktemp("python") / "socket")) as command:
        yield command


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Iterator[hosts.Site]:
    """Four hosts for the whole test run, and a Python that starts at once on each; or the test is skipped."""
    if why := hosts.missing():
        pytest.skip(f"several hosts on one machine: {why}")
    with hosts.hosts(4) as made:
        yield hosts.Site(made, request.getfixturevalue("python"))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """The engine that ``--engine`` names."""
    return Engine(request.config.getoption("--engine"))


@pytest.fixture
def on_ranks(gloo_pool: GlooPool, engine: Engine) -> OnRanks:
    """``on_ranks(body, *args, size=2)``: ``body(engine, *args)`` on real ranks."""
    return OnRanks(gloo_pool, engine)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """With ``--engine torch``, a test marked ``torch_fails`` passes if it fails just so."""
    mark = pyfuncitem.get_closest_marker("torch_fails")
    if mark is None or pyfuncitem.config.getoption("--engine") != "torch":
        return (yield)
    error: BaseException | None = None
    try:
        yield
    except (Exception, pytest.fail.Exception) as caught:
        error = caught
    check_fault(mark.args[0], mark.kwargs["match"], error)
    return True


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fail a test that leaves a default process group behind, and destroy it for the next."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        left = f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"
        dist.destroy_process_group()
        pytest.fail(f"the test left a default process group initialised ({left})")
