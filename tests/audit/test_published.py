"""Published faults of other libraries, made again: ``testing.audit`` finds each, and names group and factor.

``python tests/audit/test_published.py`` prints the table.
"""

import re

import pytest
from _support.audit.published import FAULTS, PLAN, Fault, Net, loss_of, tokens

from parallel3d.testing import GlooPool, audit
from parallel3d.testing.relations.engines import sgd
from parallel3d.testing.relations.relation import DEFAULT, Outcome, Verdict


def outcome_of(fault: Fault, pool: GlooPool) -> Outcome:
    table = audit(
        Net,
        tokens,
        loss=fault.loss,
        layout=fault.layout,
        engines=[fault.engine],
        relations=[fault.relation],
        optimizer=fault.optimizer or sgd,
        tp_plan=PLAN if fault.layout.tp > 1 else None,
        pool=pool,
        **fault.options,
    )
    (outcome,) = table.outcomes
    return outcome


def is_named(fault: Fault, found: Outcome) -> bool:
    """Whether what is said of it is right: the parameters, the factor, and its axis."""
    if fault.what:
        return fault.what in found.what
    same = found.factor is fault.factor or (
        None not in (found.factor, fault.factor) and abs(found.factor - fault.factor) < 1e-6
    )
    return bool(same and found.axes == fault.axes and re.fullmatch(fault.group, found.group))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_is_found(fault: Fault, gloo_pool: GlooPool) -> None:
    found = outcome_of(fault, gloo_pool)
    assert found.verdict is Verdict.FAILS, found
    assert is_named(fault, found), found


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_the_right_program_holds(tp: int, gloo_pool: GlooPool) -> None:
    from parallel3d import MeshLayout

    table = audit(
        Net,
        tokens,
        loss=loss_of,
        layout=MeshLayout(1, 2, tp),
        relations=DEFAULT,
        tp_plan=PLAN if tp > 1 else None,
        pool=gloo_pool,
    )
    assert not table.failed, table
    assert [o.relation for o in table.outcomes if o.verdict is Verdict.HOLDS] == list(DEFAULT)


if __name__ == "__main__":
    with GlooPool(2) as pool:
        rows = [(fault, outcome_of(fault, pool)) for fault in FAULTS]
    for fault, found in rows:
        print(
            f"{fault.where:50} {fault.relation:13} {'named' if is_named(fault, found) else '     '}  {found}"
        )
    print(sum(found.verdict is Verdict.FAILS for _, found in rows), "of", len(rows), "found")
    print(sum(is_named(*row) for row in rows), "named")
