"""The plain computation of a recorded step, unit by unit, on gathered inputs and parameters.

The skeleton, the plain model on meta, runs its own code once, from its inputs to its outputs. Each unit
inside it gets the gathered inputs of the parallel unit and computes its outputs. These and the gradients that
reach the unit are compared. The code around the unit then continues with the gathered outputs of the parallel
unit, so that a difference appears only at the unit, or the code between units, that causes it. Memory is
needed for one whole unit and its activations of the whole sequence; for those of all units if a tensor leaves
a unit in another way than as an output, see ``run``.

The loss of a step is the mean over the ranks of cp, so the gradients of parts are those of the plain model
times cp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from parallel3d.audit.findings import Finding, Report, bound_of, gap_between
from parallel3d.audit.recording import ModuleCall, Recording, leaves, left_on, put_on, replaced
from parallel3d.audit.whole import Incomparable, Whole


@dataclass
class _Ran:
    """The result of running one unit of the plain model."""

    outputs: dict[str, Tensor]  # path -> gathered output of the parallel unit
    result: Any  # what the plain unit has returned
    plain: dict[str, Tensor]  # path -> tensor in ``result``
    trained: set[str]  # the paths of tensors with a gradient
    known: bool  # whether its gradients are known


class Replay:
    """Computes a recorded step again with the plain model, and compares.

    Args:
        skeleton: the plain model on meta; its audited modules by name in ``modules``.
        values: (name of a parameter or buffer, unit) -> its whole value, on the device that computes.
        recording: the recorded calls of the step.
        whole: gathers tensors, see ``Whole``.
        backward: whether gradients are compared too.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        modules: Mapping[str, nn.Module],
        values: Any,
        recording: Recording,
        whole: Whole,
        report: Report,
        *,
        backward: bool,
    ) -> None:
        self.skeleton, self.modules, self.values = skeleton, modules, values
        self.calls = {name: list(calls) for name, calls in recording.calls.items()}
        self.whole, self.report, self.backward = whole, report, backward
        self.findings: list[Finding] = []
        # Of parameters in the plain step, on this data rank's batch; and the names of those not known.
        self.grads: dict[str, Tensor] = {}
        self.unknown: set[str] = set()
        self._random: list[Tensor] = []  # their state when the code of the unit that runs went on
        self._drawing: set[str] = set()  # units that have drawn some
        self._broken: set[str] = set()  # units inside which the graph of the plain code ends
        # Inputs that ``shard_batch`` gives the ranks of cp in their share.
        self.scaled = {".1.num_items_in_batch"}
        self._places = _places(skeleton, modules)
        self._recorded = recording.calls
        self._keeps = False  # whether the graphs of units are kept until the end
        self._later: list[Callable[[], None]] = []  # what is compared and collected then

    def run(self, args: Any, kwargs: Any) -> None:
        """Runs the plain model on its whole inputs and compares each unit.

        A tensor may leave a unit in another way than as an output, such as the routers' logits that
        transformers collects for its load-balancing loss. The code around the unit then computes a gradient
        for it too. In this case the graphs of all units are kept, and gradients are compared at the end.
        """
        compared = dict(self.report.compared)
        try:
            self._run(args, kwargs)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            self.calls = {name: list(calls) for name, calls in self._recorded.items()}
            self.report.compared = compared
            self.findings, self.grads, self._keeps = [], {}, True
            self.unknown, self._drawing, self._broken = set(), set(), set()
            self._run(args, kwargs)
            for each in self._later:
                each()

    def _run(self, args: Any, kwargs: Any) -> None:
        with ExitStack() as stack:
            for name, module in self.modules.items():
                if name:
                    stand_in = partial(self.call, name, module.forward)
                    stack.enter_context(patch.object(module, "forward", stand_in))
            stack.enter_context(patch.object(checkpoint, "CheckpointFunction", _Straight))
            self._call("", self.skeleton.forward, args, kwargs, self.calls[""][0])

    # -- one unit --------------------------------------------------------------------------------------

    def call(self, name: str, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Stands in for ``forward`` of the plain unit ``name``: runs it on the parallel unit's inputs,
        compares, and returns the parallel unit's outputs, gathered."""
        calls = self.calls.get(name)
        if not calls:
            self.leave_out(name, "it was not called in the step, or with gradients switched off")
            with self._entered(name):
                return forward(*args, **kwargs)
        call = calls.pop(0)
        plain = dict(leaves((args, kwargs)))
        compares = not self._draws(_owner(name, self.modules))
        given: dict[str, Tensor] = {}
        for path, tensor in plain.items():
            recorded = call.inputs.get(path)
            if recorded is None or recorded.dtype == torch.bool or path in self.scaled:
                continue
            found = self._gathered(name, f"input{_word(path)}", recorded, tensor.shape)
            if found is not None:
                if compares:
                    self.compare(name, f"input{_word(path)}", tensor, found, around=True)
                # Numbers that were drawn, such as the experts of a token, are those of the step.
                if found.is_floating_point() or not compares:
                    given[path] = found
        with torch.set_grad_enabled(self.backward):
            mine = {
                path: found.detach().requires_grad_(self.backward and plain[path].requires_grad)
                for path, found in given.items()
            }
            args, kwargs = replaced((args, kwargs), {k: t.clone() for k, t in mine.items()})
            ran = self._call(name, forward, args, kwargs, call)
        grads = {}
        for path, leaf in mine.items():
            if not leaf.requires_grad:
                continue
            what = f"gradient of its input{_word(path)}"
            got = self._gathered_grad(name, what, call.input_grads.get(path), leaf)
            if got is not None:
                if ran.known:
                    self._at_the_end(partial(self._compare_grad, name, what, leaf, got))
                grads[path] = got
        outputs = ran.outputs | {
            path: tensor.detach() for path, tensor in ran.plain.items() if path not in ran.outputs
        }
        passed = {path: ran.outputs[path] for path in ran.trained if path in ran.outputs}
        if len(passed) < len(ran.trained):
            self._broken.add(_owner(name, self.modules))
        if passed:
            # The last one makes it part of a graph where no input is.
            anchor = torch.zeros((), requires_grad=True)
            sources = [*(plain[path] for path in grads), anchor]
            given_back = [*grads.values(), None]
            made = _Passed.apply(
                self, name, call, list(passed), given_back, *passed.values(), *sources
            )
            outputs.update(zip(passed, made, strict=True))
        put_on(self.modules[name], {p: t for p, t in outputs.items() if p.startswith("@")})
        self._random = self.whole.random_state()
        return replaced(ran.result, outputs)

    def _draws(self, name: str) -> bool:
        """Returns whether the code of a unit has drawn random numbers until now."""
        if not all(map(torch.equal, self._random, self.whole.random_state())):
            self._drawing.add(name)
        return name in self._drawing

    def _call(self, name: str, forward: Any, args: Any, kwargs: Any, call: ModuleCall) -> _Ran:
        """Runs a plain unit, and compares its outputs and gradients with those of the recorded ``call``."""
        self._random = self.whole.random_state()
        with self._entered(name) as parameters:
            result = forward(*args, **kwargs)
            draws = self._draws(name)
            module = self.modules[name]
            plain = dict(leaves(result)) | dict(left_on(module))
            trained = {p for p, t in plain.items() if t.requires_grad} if self.backward else set()
            outputs = self._outputs(name, call, plain, compared=not draws)
            known = True
            if draws:
                self.leave_out(name, "it draws random numbers, which ranks draw otherwise")
                known = False
            elif self.backward:
                known = (
                    not call.is_plain
                    and name not in self._broken
                    and self._backward(name, call, plain, parameters)
                )
                if not known:
                    self.leave_out(name, "its gradients: those of an output are not known")
            if not known:
                self.unknown.update(parameters)
        return _Ran(outputs, result, plain, trained, known)

    def _outputs(
        self, name: str, call: ModuleCall, plain: Mapping[str, Tensor], *, compared: bool
    ) -> dict[str, Tensor]:
        outputs = {}
        for path, tensor in plain.items():
            what = f"output{_word(path)}"
            recorded = (call.outputs or {}).get(path)
            if recorded is None:
                why = "its class is not torch's own" if path in call.odd else "there is none"
                self.leave_out(name, f"{what}: {why}")
                continue
            found = self._gathered(name, what, recorded, tensor.shape)
            if found is not None:
                if compared:
                    self.compare(name, what, tensor, found)
                outputs[path] = found
        return outputs

    def _backward(
        self,
        name: str,
        call: ModuleCall,
        plain: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> bool:
        """Runs the backward of a unit's outputs in the plain model, ``plain`` by path, from their recorded
        gradients, and adds its ``parameters``' gradients to ``grads``. False: a recorded one is missing."""
        roots, grads, known = [], [], True
        for path, tensor in plain.items():
            if not tensor.requires_grad:
                continue
            if path not in call.output_grads:
                known = known and path in (call.outputs or {})  # then nothing has read it
                continue
            grad = self._gathered_grad(
                name, f"gradient of output{_word(path)}", call.output_grads[path], tensor
            )
            known = known and grad is not None
            if grad is not None:
                roots.append(tensor)
                grads.append(grad.to(tensor.dtype))
        if not roots or not known:
            return known
        torch.autograd.backward(roots, grads, retain_graph=self._keeps)
        self._at_the_end(partial(self._collect, parameters))
        return True

    def _at_the_end(self, action: Callable[[], None]) -> None:
        """Calls ``action`` when all gradients are there: now or, if graphs are kept, after the last unit."""
        if self._keeps:
            self._later.append(action)
        else:
            action()

    def _collect(self, parameters: Mapping[str, Tensor]) -> None:
        for own, value in parameters.items():
            if value.grad is not None:
                before = self.grads.get(own)
                self.grads[own] = value.grad if before is None else before + value.grad
                value.grad = None

    def _compare_grad(self, name: str, what: str, leaf: Tensor, got: Tensor) -> None:
        self.compare(name, what, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, got)

    @contextmanager
    def _entered(self, name: str) -> Iterator[dict[str, Tensor]]:
        """Context manager: gives a unit's own parameters and buffers values; yields the parameters."""
        made: dict[str, Tensor] = {}
        before = []
        for own, places in self._places[name].items():
            value = self.values(own, name)
            if value is None:
                continue
            if any(kind == "_parameters" for _, kind, _ in places):
                trained = any(getattr(m, kind)[key].requires_grad for m, kind, key in places)
                value = value.detach().requires_grad_(trained and self.backward)
                made[own] = value
            for module, kind, key in places:
                before.append((getattr(module, kind), key, getattr(module, kind)[key]))
                getattr(module, kind)[key] = value
        try:
            yield made
        finally:
            for holder, key, value in reversed(before):
                holder[key] = value

    # -- comparing -------------------------------------------------------------------------------------

    def compare(
        self,
        name: str,
        what: str,
        want: Tensor,
        got: Tensor,
        *,
        floor: float = 0.0,
        around: bool = False,
    ) -> None:
        """Compares a tensor and adds a finding if it differs; ``around``: one of the code around the unit."""
        bound = bound_of(want.dtype, got.dtype)
        if _is_float8(self.modules[name]):
            bound = max(bound, FLOAT8)
        gap = gap_between(want, got, bound, floor)
        self.report.compared[name] = self.report.compared.get(name, 0) + 1
        if gap.difference > bound:
            found = Finding(name, what, gap, bound)
            if around:
                found = replace(
                    found, unit=_owner(name, self.modules), what=f"what it gives to {name}, {what}"
                )
            self.findings.append(found)
        else:
            self.report.largest = max(self.report.largest, gap.difference / bound)

    def leave_out(self, name: str, why: str) -> None:
        self.report.left_out[f"{name or 'the model itself'}: {why}"] = None

    def _gathered(
        self, name: str, what: str, tensor: Tensor, shape: torch.Size, *, is_grad: bool = False
    ) -> Tensor | None:
        try:
            return (self.whole.gradient if is_grad else self.whole)(tensor, shape)
        except Incomparable as error:
            self.leave_out(name, f"{what}: {error}")
            return None

    def _gathered_grad(
        self, name: str, what: str, grad: Tensor | None, like: Tensor
    ) -> Tensor | None:
        if grad is None:
            return torch.zeros_like(like)
        return self._gathered(name, what, grad, like.shape, is_grad=True)


class _Passed(torch.autograd.Function):
    """Puts the gathered outputs of the parallel unit into the graph of the plain code around it.

    Its backward compares the gradients that this code computes with those that reached the parallel unit, and
    continues with the latter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replay: Replay,
        name: str,
        call: ModuleCall,
        paths: Any,
        grads: Any,
        *tensors: Tensor,
    ) -> Any:
        ctx.replay, ctx.name, ctx.call, ctx.paths, ctx.grads = replay, name, call, paths, grads
        return tuple(t.clone() for t in tensors[: len(paths)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        replay, name = ctx.replay, ctx.name
        for path, want in zip(ctx.paths, grads, strict=True):
            what = f"gradient of output{_word(path)}"
            got = replay._gathered_grad(name, what, ctx.call.output_grads.get(path), want)
            if got is not None:
                replay.compare(name, what, want, got, around=True)
        return (None,) * (5 + len(ctx.paths)) + tuple(ctx.grads)


class _Straight:
    """Replaces torch's function for a reentrant checkpoint, which would run a unit twice; runs it once."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args)


FLOAT8 = 0.15
"""The bound where a module multiplies in float8: some two units of the last place of e4m3."""


def _is_float8(module: nn.Module) -> bool:
    return any("float8" in type(each).__name__.lower() for each in module.modules())


def _word(path: str) -> str:
    """Returns a path as a word for texts: ``.0.1`` of args -> `` 1``, ``.1.mask`` of kwargs -> `` mask``."""
    if path.startswith("@"):
        return f", attribute {path[1:]}"
    rest = path.partition(".")[2].partition(".")[2] if path.startswith((".0.", ".1.")) else path[1:]
    return f" {rest}" if rest else ""


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Returns the name of the innermost audited module that contains the module ``name``."""
    around = [
        other for other in modules if other != name and (not other or name.startswith(f"{other}."))
    ]
    return max(around, key=len, default="")


def _places(
    skeleton: nn.Module, modules: Mapping[str, nn.Module]
) -> dict[str, dict[str, list[tuple[nn.Module, str, str]]]]:
    """Returns unit -> name of its parameter or buffer -> its places there, each (module, dict, key)."""
    found: dict[str, dict[str, list[tuple[nn.Module, str, str]]]] = {name: {} for name in modules}
    first: dict[int, str] = {}
    for path, module in skeleton.named_modules(remove_duplicate=False):
        unit = path if path in modules else _owner(path, modules)
        for kind in ("_parameters", "_buffers"):
            for key, value in getattr(module, kind).items():
                if value is not None:
                    own = first.setdefault(id(value), f"{path}.{key}" if path else key)
                    found[unit].setdefault(own, []).append((module, kind, key))
    return found
