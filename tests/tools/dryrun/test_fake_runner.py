"""FakeRunner gives what torch's fake mode gives, also where it repeats a call from memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama import Llama, LlamaConfig
from plans import LLAMA_TP_PLAN
from torch import Tensor
from torch.nn import functional as F

import parallel3d as p3d
from parallel3d._torch.fake import FakeTensor
from parallel3d._util.trees import tensors_in
from parallel3d.tools.dryrun import modes
from parallel3d.tools.dryrun.modes import FakeRunner
from parallel3d.tools.dryrun.record import record

aten = torch.ops.aten
Call = tuple[Any, Callable[[list[Tensor]], tuple[tuple, dict]]]

CALLS: dict[str, Call] = {
    "add": (aten.add.Tensor, lambda t: ((t[0], t[1]), {"alpha": 2})),
    "mul": (aten.mul.Scalar, lambda t: ((t[0], 2.0), {})),
    "mm": (aten.mm.default, lambda t: ((t[0], t[1]), {})),
    "to": (aten._to_copy.default, lambda t: ((t[0],), {"dtype": torch.bfloat16})),
    "sum": (aten.sum.dim_IntList, lambda t: ((t[0], [1], True), {})),
    "compare": (aten.gt.Scalar, lambda t: ((t[0], 0), {})),
    "add_": (aten.add_.Tensor, lambda t: ((t[0], t[1]), {})),
    "same_": (aten.mul_.Tensor, lambda t: ((t[0], t[0]), {})),
    "t": (aten.t.default, lambda t: ((t[0],), {})),
    "view": (aten.view.default, lambda t: ((t[2], [8, 2]), {})),
    "slice": (aten.slice.Tensor, lambda t: ((t[0], 0, 1, 3), {})),
    "select": (aten.select.int, lambda t: ((t[0], 1, 2), {})),
    "expand": (aten.expand.default, lambda t: ((t[3], [4, 4]), {})),
    "detach": (aten.detach.default, lambda t: ((t[1],), {})),
    "split": (aten.split.Tensor, lambda t: ((t[0], 3, 1), {})),
    "unbind": (aten.unbind.int, lambda t: ((t[1], 0), {})),
    "max": (aten.max.dim, lambda t: ((t[0], 0), {})),
    "layer_norm": (aten.native_layer_norm.default, lambda t: ((t[0], [4], None, None, 1e-5), {})),
    "cat": (aten.cat.default, lambda t: (([t[0], t[1]], 1), {})),
    "foreach": (aten._foreach_mul.Scalar, lambda t: (([t[0], t[1]], 3.0), {})),
    "foreach_": (aten._foreach_add_.List, lambda t: (([t[0], t[1]], [t[1], t[2]]), {})),
    "out": (aten.add.out, lambda t: ((t[0], t[1]), {"out": t[2]})),
    "copy_": (aten.copy_.default, lambda t: ((t[2], t[0]), {})),
    "transpose_": (aten.transpose_.default, lambda t: ((t[0], 0, 1), {})),
    "resize_": (aten.resize_.default, lambda t: ((t[2], [2, 3]), {})),
    "empty_like": (aten.empty_like.default, lambda t: ((t[1],), {})),
    "clone": (aten.clone.default, lambda t: ((t[1],), {"memory_format": torch.contiguous_format})),
}


class Forgetful(FakeRunner):
    """Asks torch each time."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._known.clear()
        return super().run(func, args, kwargs)


def inputs(runner: FakeRunner) -> list[Tensor]:
    """Contiguous, transposed, a second contiguous one, and a column."""
    with runner.mode:
        return [
            torch.empty(4, 4),
            torch.empty(4, 4).t(),
            torch.empty(4, 4),
            torch.empty(4, 1),
        ]


def looks(given: list[Tensor], out: Any) -> list[Any]:
    """All that can be seen of the results, and of the inputs afterwards."""
    found = list(tensors_in(out))
    everything = [*given, *found]
    storages = [id(t.untyped_storage()) for t in everything]
    return [
        type(out),
        [next((i for i, g in enumerate(given) if g is t), None) for t in found],
        [storages.index(key) for key in storages],
        *(
            (type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad)
            for t in everything
        ),
        [t.untyped_storage().nbytes() for t in everything],
    ]


def result(runner: FakeRunner, name: str) -> list[Any]:
    func, arguments = CALLS[name]
    given = inputs(runner)
    return looks(given, runner.run(func, *arguments(given)))


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_gives_the_same(name: str) -> None:
    runner, other = FakeRunner(), Forgetful()
    expected = result(other, name)
    assert [result(runner, name) for _ in range(3)] == [expected] * 3


@pytest.mark.parametrize("seed", range(4))
def test_sequences_in_which_calls_repeat_on_what_others_left(seed: int) -> None:
    ends, remembering = [], FakeRunner()
    for runner in (remembering, Forgetful()):
        choose, seen = random.Random(seed), []
        for _ in range(12):
            tensors = inputs(runner)
            for name in choose.choices(list(CALLS), k=6):
                func, arguments = CALLS[name]
                choose.shuffle(tensors)
                try:
                    out = runner.run(func, *arguments(tensors))
                # Sizes don't fit; torch 2.11 asserts so.
                except (RuntimeError, IndexError, ValueError, AssertionError) as error:
                    seen.append((name, type(error)))
                    continue
                seen.append((name, looks(tensors, out)))
                new = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
                tensors[choose.randrange(4)] = new[0] if new else tensors[0]
        ends.append(seen)
    assert len(ends[0]) == len(ends[1])
    for mine, torchs in zip(*ends, strict=True):
        assert mine == torchs
    assert len(remembering._known) > 20


def test_a_step_of_llama_is_the_same_without_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        mesh = p3d.build_mesh(p3d.MeshLayout(1, 2, 2))
        with torch.device("meta"):
            model = Llama(LlamaConfig.named("nano"))
        p3d.parallelize(model, mesh, LLAMA_TP_PLAN)
        p3d.materialize(model, device=mesh.device_type, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(0, 256, (2, 32))
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        p3d.optim.clip_grad_norm_(model, 1.0)
        optimizer.step()

    usual = record(program, 4, 1)
    monkeypatch.setattr(modes, "_key_of", lambda *_: None)
    each_anew = record(program, 4, 1)
    assert usual.operations == each_anew.operations
    assert usual.collectives == each_anew.collectives
    assert usual.memory == each_anew.memory and usual.peak == each_anew.peak
