"""Packed parameters under the engine: simulated ranks equal the plain model, on any mesh."""

import pytest
from _support.packed_models import even_lm, packed_plan, packed_tokens, uneven_lm

from parallel3d import MeshLayout
from parallel3d.testing import assert_parity


def shown(value: object) -> str:
    return getattr(value, "__name__", str(value))


LAYOUTS = [
    (even_lm, (1, 1, 2)),
    (even_lm, (2, 1, 2)),
    (even_lm, (1, 4, 2)),
    (uneven_lm, (1, 2, 2)),
    (uneven_lm, (1, 1, 4)),
    (uneven_lm, (1, 2, 4)),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            (even_lm, (1, 2, 4)),
            (even_lm, (2, 2, 2)),
            (even_lm, (1, 3, 2)),
            (uneven_lm, (1, 2, 3)),
            (uneven_lm, (2, 1, 4)),
            (uneven_lm, (2, 2, 2)),
            (uneven_lm, (1, 4, 4)),
            (uneven_lm, (1, 3, 4)),
        )
    ),
]


@pytest.mark.parametrize(("build", "sizes"), LAYOUTS, ids=shown)
def test_parity(build, sizes) -> None:
    layout = MeshLayout(*sizes).resolve(sizes[0] * sizes[1] * sizes[2])
    plan = packed_plan(build())
    assert_parity(build, packed_tokens, layout, tp_plan=plan, steps=2, fp32=False)
