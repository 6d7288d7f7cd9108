"""Dry runs to JSON and back."""

import json
from dataclasses import fields, replace

import pytest
from _support.tools.dryrun.made_runs import Llama

from parallel3d.errors import DryRunError
from parallel3d.mesh import MeshLayout
from parallel3d.tools.dryrun.result import DryRun, DryRunWarning, Operation, from_json, to_json

RUN = Llama().run(
    MeshLayout(2, 2, 2),
    warnings=(DryRunWarning("tiny messages", "\u2028 </script> \N{SNOWMAN}"),),
)


def test_nothing_is_lost() -> None:
    again = from_json(to_json(RUN))
    assert again == RUN
    for each in fields(DryRun):  # lists and tuples compare unequal, ints and floats don't
        assert type(getattr(again, each.name)) is type(getattr(RUN, each.name)), each.name
    assert type(again.operations[1].flops) is float
    assert again.axis_ranks["tp"] == (0, 1)
    assert to_json(again) == to_json(RUN)


def test_an_empty_run() -> None:
    empty = replace(RUN, operations=(), collectives=(), memory=(), parameters=(), mesh={})
    assert from_json(to_json(empty)) == empty


def test_what_is_new_has_its_default_in_an_older_text() -> None:
    data = json.loads(to_json(RUN))
    del data["run"]["warnings"], data["run"]["seconds"]
    table = data["run"]["operations"]
    at = table["columns"].index("dtype")
    table["columns"].pop(at)
    for row in table["rows"]:
        row.pop(at)
    again = from_json(json.dumps(data))
    assert again.warnings == () and again.seconds == 0.0
    assert again.operations == tuple(replace(each, dtype="") for each in RUN.operations)


def changed(**new: object) -> str:
    return json.dumps({**json.loads(to_json(RUN)), **new})


def test_what_is_no_dry_run_is_refused() -> None:
    run = json.loads(to_json(RUN))["run"]
    for text, words in (
        ("{", "no JSON"),
        ("[]", "without"),
        ('{"format": "else"}', "parallel3d dry run"),
        (changed(version=99), "version 99; this parallel3d reads version 1"),
        (changed(run={**run, "rank": "0"}), "'0' is no int"),
        (changed(run={**run, "steps": True}), "True is no int"),
        (changed(run={**run, "more": 1}), "no 'more'"),
        (changed(run={k: v for k, v in run.items() if k != "peak"}), "without 'peak'"),
        (changed(run=None), "damaged"),
        (changed(run={**run, "operations": {"columns": ["kind"], "rows": []}}), "'module'"),
    ):
        with pytest.raises(DryRunError, match=words):
            from_json(text)


def test_many_operations_stay_small() -> None:
    operation = Operation("matmul", "mm", "layers.17.feed_forward.w1", "forward", 0, 1e12, 10**9)
    text = to_json(replace(RUN, operations=(operation,) * 10_000))
    assert len(text) < 1.2e6
