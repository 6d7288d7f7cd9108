"""What all tests share: one pool of gloo processes, and a guard against leaked process groups."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist

from parallel3d.testing import GlooPool

torch.set_num_threads(1)  # tests run side by side


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One xdist worker runs every test that needs the pool, so that there is one pool."""
    for item in items:
        if "gloo_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("gloo"))


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Eight gloo workers for the whole test run; they start with the first ``run``."""
    with GlooPool(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fail a test that leaves a default process group behind, and destroy it for the next."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        left = f"{dist.get_backend()}, rank {dist.get_rank()} of {dist.get_world_size()}"
        dist.destroy_process_group()
        pytest.fail(f"the test left a default process group initialised ({left})")
