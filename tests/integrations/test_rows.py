"""Every row of docs/integrations.md: another library's program, as far from the plain run as rounding."""

import pytest
from _support.integrations.rows import Row, check
from _support.integrations.table import rows

from parallel3d.testing import GlooPool

pytestmark = pytest.mark.slow


# timm has an extra of its own, which .ci/run installs last; it runs those rows by table.py.
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.id) for row in rows() if "timm" not in row.packages]
)
def test_row(gloo_pool: GlooPool, row: Row) -> None:
    for result in gloo_pool.run(row.run, *row.arguments, world_size=row.world_size, timeout=300):
        check(row, result)
