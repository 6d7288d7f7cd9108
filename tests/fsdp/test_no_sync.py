"""no_sync(): backwards that reduce nothing, and switches that are put back."""

import pytest
from _support.fsdp.beside_plain import Run
from _support.fsdp.wrapped import cpu_mesh
from _support.models import Lm

from parallel3d import MeshLayout, parallelize
from parallel3d.fsdp.inspect import units_of
from parallel3d.testing import fake_world, local_world


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_parity(sizes) -> None:
    """Samples 0 to 3: two without sync, one nested, one with."""
    with local_world(4) as world:
        run = Run(world, MeshLayout(*sizes))
        with run.model.no_sync():
            run.backward(0)
            with run.model.no_sync():
                run.backward(1)
            run.backward(2)
        run.backward(3)
        run.check([0, 1, 2, 3])


def test_switches_are_put_back_as_they_were() -> None:
    with fake_world(0, 4):
        model = parallelize(Lm(), cpu_mesh(2, 2))
        units = list(units_of(model, recurse=True))
        model.layers[0].set_requires_gradient_sync(False)
        model.layers[1].set_requires_all_reduce(False)
        before = [(unit.sync, unit.all_reduce) for unit in units]
        assert len(set(before)) == 3
        with pytest.raises(ZeroDivisionError), model.no_sync():
            assert not any(unit.sync or unit.all_reduce for unit in units)
            raise ZeroDivisionError
        assert [(unit.sync, unit.all_reduce) for unit in units] == before
        with model.layers[0].no_sync():  # of an inner unit: its own alone
            assert [unit.sync for unit in units].count(False) == 1
