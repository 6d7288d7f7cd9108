"""The capture checker: finds what keeps a training step out of a CUDA graph, or makes its replays wrong.

A graph holds what a step puts on streams, recorded once. Its replays run no Python, use the same memory, and
repeat the numbers that the host had computed. The checker uses the dry run's recordings: ``_util.streams``
tells which streams have joined the capture (their vector clocks are later than its beginning), the race
detector which memory is used, the modes which values are read.

A step reaches from the first forward with gradients to the last optimizer's step; or, where the program calls
``capture``, it is that call's step function. The first two steps warm up, and are not reported.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel3d._torch.autograd import in_backward_pass
from parallel3d._trace.kinds import arguments_of, written_by
from parallel3d._util.streams import HOST, Clock, FakeStream, Streams
from parallel3d._util.trace import issuing
from parallel3d._util.trees import tensors_in
from parallel3d._util.users_code import caller
from parallel3d.tools.dryrun.memory import Held
from parallel3d.tools.dryrun.place import Place, line_text, running_line
from parallel3d.tools.dryrun.result import CaptureObstacle

WARM_UP = 2
"""Steps at the beginning that are not reported."""

_REGION = -2
"""A stream number that is no stream's: its count in a clock is the number of the capture that it is in."""

_REMEDIES = {
    "host synchronisation": "keep the number on the GPU, and read it after the step, outside the capture",
    "allocation outside the pool": "allocate it before the step, on the GPU",
    "memory of another step": "allocate it once and write to it in place (copy_)",
    "event of uncaptured work": "let it wait for an event that is recorded within the step, after the "
    "computation's stream was waited for",
    "work outside the capture": "let its stream wait for the computation's first "
    "(side.wait_stream(torch.cuda.current_stream()))",
    "stream not joined": "let the computation's stream wait for it before the step ends "
    "(torch.cuda.current_stream().wait_stream(side))",
    "branch on a value": "compute both ways and choose with torch.where, or decide after the step",
    "random state": "seed before the step: replays advance the GPU's default generator",
}
_CPU_COMPUTES, _CPU_ALLOCATES = "the CPU computes", "memory of the CPU is allocated"
_CPU_COUNTS = "a number of the CPU changes, which replays do not change"
KINDS = tuple(_REMEDIES)
"""Kinds of obstacles."""

_SHAPED_BY_VALUES = (
    *("nonzero", "masked_select", "bincount", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
)
_READ = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__)
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_WRITES_AT = (Tensor.__setitem__, Tensor.index_put_, Tensor.index_put)
_TO_CPU = re.compile(r"""\.to\(\s*(device\s*=\s*)?(torch\.device\(\s*)?["']cpu["']""")


class CaptureChecker:
    """Follows the steps of a dry run; ``obstacles()`` returns what would keep them from being captured.

    Attributes:
        follows: whether it checks; if not, there are no steps for it.
        number: the number of the current step, from 1; 0 before the first.
        is_open: whether the program is in a step now.
    """

    def __init__(self, streams: Streams, place: Place, *, follows: bool) -> None:
        self.streams, self.place, self.follows = streams, place, follows
        self.number = 0
        self.is_open = False
        self._is_explicit = False  # the program says itself what its steps are
        self._stepped = False  # an optimizer has, and another one may follow
        self._unjoined_due = False  # the step ends in a backward, which has more to do
        self._origin: FakeStream = streams.compute
        self._counts: dict[int, int] = {}  # number of a stream -> its count when the step began
        self._found: dict[Any, CaptureObstacle] = {}
        self._times: Counter[Any] = Counter()  # the same keys -> how often
        self._pending: list[CaptureObstacle] = []
        self._broken = False  # the program could not go on
        self._born: dict[Held, int] = {}  # memory -> the step that has allocated it; 0: none
        # Memory -> the last step that has used it, or written to it.
        self._used: dict[Held, int] = {}
        self._written: dict[Held, int] = {}
        # Storages of real tensors: on the GPU in a real run; others, made within the step.
        self._on_device, self._made = WeakSet[Any](), WeakSet[Any]()
        self._python: Any = None
        if follows:
            place.on_forward, place.on_optimizer = self._forward, self._optimizer_step

    # -- which part of the program is a step

    def _begin(self) -> None:
        self.number += 1
        self.is_open, self._stepped = True, False
        self._pending = []
        self._origin = self.streams.current_stream()
        self._origin.clock[_REGION] = self.number
        self._counts = {n: s.clock.get(n, 0) for n, s in self.streams.made.items()}
        self._made.clear()
        self._python = _states_of_python()
        for root in self.place.roots:
            for tensor in (*root.parameters(), *root.buffers()):
                self._mark(tensor)

    def _forward(self, inputs: Any) -> None:
        """Called when a module is called outside any module; begins a step if none is open."""
        if not torch.is_grad_enabled() or in_backward_pass():
            return
        if not self._is_explicit and (self._stepped or not self.is_open):
            self._end()
            self._begin()
        if self.is_open:
            for tensor in tensors_in(inputs):
                self._mark(tensor)

    def _optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer's step, which may be the last of the training step."""
        if any(group.get("capturable") is False for group in optimizer.param_groups):
            # Which may have its counts on the CPU, too.
            of_it = "optimizer", _CPU_COUNTS
            self._pending = [each for each in self._pending if (each.phase, each.what) != of_it]
            self._note(
                "work outside the capture",
                f"{type(optimizer).__name__} refuses a capture, and may count steps on the CPU",
                "give it capturable=True; fused=True may be beside it",
            )
        if self._is_explicit or not self.is_open:
            return
        self._commit()
        self._stepped = True
        self._unjoined_due = True
        self._settle()

    def _settle(self) -> None:
        """Checks the streams at the end of a step, as soon as its last backward is over."""
        if self._unjoined_due and not in_backward_pass():
            self._unjoined_due = False
            self._check_end()
            self._commit()

    def _end(self) -> None:
        """Ends the step, and drops what was noted after the last optimizer's step."""
        if self._stepped:
            self._unjoined_due = self._unjoined_due and not in_backward_pass()
            self._settle()
        self._pending = []
        self.is_open = self._stepped = False

    @contextmanager
    def captured(self, batch: Any) -> Iterator[None]:
        if not self.follows:
            yield
            return
        self._is_explicit = True
        self._pending = []
        self._begin()
        for tensor in tensors_in(batch):
            self._mark(tensor)
        yield  # an error leaves the step open
        self._check_end()
        self._commit()
        self.is_open = False

    def _commit(self) -> None:
        for each in self._pending:
            key = each.kind, each.what, each.line
            if key not in self._found or self._found[key].step <= WARM_UP < each.step:
                self._found[key], self._times[key] = each, 0
            self._times[key] += 1
        self._pending = []

    def _check_end(self) -> None:
        """At a step's end: notes streams that were not waited for, and Python's random numbers."""
        known = self._origin.seen()
        for number, stream in self.streams.made.items():
            done = stream.clock.get(number, 0)
            seen = max(self._counts.get(number, 0), known.get(number, 0))
            if number != HOST and done > seen and self._captures(stream.clock):
                what = f"the work on {stream.name!r} is not waited for"
                self._note("stream not joined", what, line="")
        if _states_of_python() != self._python:
            self._note(
                "random state",
                "Python's module random, or numpy's, draws numbers, which replays repeat",
                "draw them before the step, and give them to it in a tensor of the batch",
                line="",
            )

    def _captures(self, clock: Clock) -> bool:
        """Whether a stream with this vector clock has joined the capture of the current step."""
        return clock.get(_REGION, 0) == self.number

    # -- what streams do

    def put(self, stream: FakeStream) -> None:
        """Called when work was put on ``stream``; notes it if the stream is not in the capture."""
        if not self.is_open or stream is self._origin:
            return
        if stream.number == HOST:
            self._note("work outside the capture", _CPU_COMPUTES, "compute it on the GPU")
        elif not self._captures(stream.clock):
            what = f"work is put on {stream.name!r}, which has not waited for the step's stream"
            self._note("work outside the capture", what)

    def stream_waits(self, stream: FakeStream, clock: Clock) -> None:
        """Called before ``stream`` waits for the work that ``clock`` stands for; notes a wait of the capture
        for uncaptured work."""
        if not self.is_open or self._captures(clock):
            return
        if stream is self._origin or self._captures(stream.clock):
            what = f"{stream.name!r} waits for an event that was recorded outside the capture"
            self._note("event of uncaptured work", what)

    def host_waits(self, what: str) -> None:
        """Notes that the host waits for a stream, or asks whether it has finished; ``what``: the call."""
        remedy = "leave it out, or move it out of the step"
        self._note("host synchronisation", f"the host waits ({what})", remedy)

    # -- what is read

    def reads(self, what: str) -> None:
        """Notes that the host reads a value from the GPU; ``what``: the call."""
        self._note("host synchronisation", f"the host reads a value ({what})")

    def _shaped_by_values(self, name: str, line: str | None = None) -> None:
        self._note(
            "host synchronisation",
            f"the shape of a result depends on values ({name})",
            "keep the whole shape and mask it (torch.where, masked_fill)",
            line=line,
        )

    def copies(self, name: str) -> None:
        """Notes a blocking copy between the CPU's memory and the GPU's by the operation ``name``."""
        self._note(
            "host synchronisation",
            f"a blocking copy between the CPU's memory and the GPU's ({name})",
            "copy it before or after the step; within it pinned memory and non_blocking=True",
        )

    def branches(self, what: str, line: str | None = None) -> None:
        """Notes that Python branches on a value from the GPU."""
        self._note("branch on a value", what, line=line)

    def breaks_off(self, what: str, line: str, *, by_shape: bool = False) -> bool:
        """Called when the program can't go on without a value: in a step, notes that, ends the check, and
        returns True; outside a step returns False.

        ``by_shape``: the value decides a tensor's shape, not a branch.
        """
        if not self.is_open or self._stepped:
            return False
        (self._shaped_by_values if by_shape else self.branches)(what, line)
        self._broken = True
        self._commit()
        return True

    # -- functions and operations of torch

    def function(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Called for each function of torch; notes what a graph can't hold (``pin_memory``)."""
        if not self.is_open:
            return
        if func in _FROM_NUMBERS and args and not isinstance(args[0], Tensor):
            is_empty = isinstance(args[0], list | tuple) and not args[0]  # nothing is copied
            if kwargs.get("device") is not None and not is_empty:
                self._note(
                    "host synchronisation",
                    "a tensor of the GPU is made from Python's numbers",
                    "make it before the step, or with torch.full, arange or zeros",
                )
        elif func is Tensor.cpu or (func is Tensor.to and _is_to_cpu()):
            self.copies("cpu()" if func is Tensor.cpu else 'to("cpu")')
        elif func is Tensor.new_tensor and not any(isinstance(a, Tensor) for a in args[1:]):
            self._note(
                "host synchronisation",
                "a tensor of the GPU is made from Python's numbers",
                "make it before the step, or with new_full, new_zeros or new_ones",
            )
        elif func is Tensor.pin_memory or kwargs.get("pin_memory"):
            self._note("allocation outside the pool", "memory is pinned")
        elif func in _WRITES_AT and len(args) > 2:  # a number is written without knowing how many
            if isinstance(args[2], Tensor) and _by_mask(args[:2]):
                self._shaped_by_values(func.__name__.strip("_"))
        elif func in _READ and self._is_on_device(args[0]):
            self.reads(func.__name__)

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._on_device

    def deciding(self, tensor: Any) -> bool:
        """Whether ``tensor``, by whose known value the program branches, would be on the GPU."""
        return self.is_open and isinstance(tensor, Tensor) and self._is_on_device(tensor)

    def random(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notes an operation that draws from another than torch's default generator."""
        if not self.is_open or torch.Tag.nondeterministic_seeded not in func.tags:
            return
        given = arguments_of(func, args, kwargs).get("generator")
        if given is not None and given is not torch.default_generator:
            self._note(
                "random state",
                f"{func.overloadpacket.__name__} draws from a generator that the graph does not know",
                "use the default generator, or give it to capture(generators=[...])",
            )

    def real(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        """Called for an operation on tensors whose values are known in the dry run too, such as token ids;
        notes reads of those that would be on the GPU."""
        outputs = [tensor.untyped_storage() for tensor in tensors_in(out)]
        name = func.overloadpacket.__name__
        if any(map(self._is_on_device, tensors)):
            if name == "_local_scalar_dense":
                self.reads("item")
            elif name in _SHAPED_BY_VALUES or (name == "index" and _by_mask(args)):
                self._shaped_by_values(name)
            self._on_device.update(outputs)
        elif not self.is_open:
            return
        elif any(t.untyped_storage() not in self._made for t in written_by(func, args, kwargs)):
            self._note("work outside the capture", _CPU_COUNTS, "keep it on the GPU")
        self._made.update(outputs)

    def on_device(self, tensor: Tensor) -> None:
        """Called when a real tensor is combined with fake ones; one with dims would be on the GPU too."""
        if tensor.ndim:
            self._on_device.add(tensor.untyped_storage())

    def _mark(self, tensor: Tensor) -> None:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            for inner in (getattr(tensor, name) for name in flatten()[0]):
                if isinstance(inner, Tensor):  # a DTensor's mesh is one of the names
                    self._mark(inner)
        elif not tensor.is_meta:
            self._on_device.add(tensor.untyped_storage())

    # -- memory

    def allocated(self, held: Held) -> None:
        """Called when memory is allocated; notes it if the allocation isn't part of the capture."""
        self._settle()
        inside = self.is_open and not self._stepped and held.kind != "inputs"
        self._born[held] = self.number if inside else 0
        self._used.pop(held, None)
        self._written.pop(held, None)
        if not self.is_open or held.kind == "inputs":
            return
        if held.on_host:
            self._note("allocation outside the pool", _CPU_ALLOCATES)
            return
        stream = self.streams.current_stream()
        if stream is not self._origin and not self._captures(stream.clock):
            what = f"memory is allocated on {stream.name!r}, which is not in the capture"
            self._note("allocation outside the pool", what)

    def freed(self, held: Held) -> None:
        """Called when memory is freed; notes it if it is older than the step and the step uses it."""
        born, used = self._born.pop(held, 0), self._used.pop(held, 0)
        self._written.pop(held, None)
        before = 0 if self._is_explicit else 1  # without: inputs may be freed as they are used
        if self.is_open and before <= born < self.number == used and held.kind != "inputs":
            what = f"memory from before the step is used, and freed in it (made by {held.made_by})"
            self._note("memory of another step", what, "keep it as long as the graph is replayed")

    def use(self, held: Held, *, writes: bool) -> None:
        """Called when memory is used; notes a read of what only the step before has allocated and written."""
        self._settle()
        if not self.is_open or self._stepped:
            return
        self._used[held] = self.number
        if writes:
            self._written[held] = self.number
        elif WARM_UP < self._born.get(held, 0) < self.number != self._written.get(held):
            what = f"what the step before has allocated is read (made by {held.made_by})"
            self._note("memory of another step", what)

    # -- random numbers

    @contextmanager
    def seeds_played(self) -> Iterator[None]:
        """Within this context calls are noted that seed generators, or read or set their states."""

        inside = False

        def noted(owner: Any, name: str) -> tuple[Any, str, Callable[..., Any]]:
            of_gpu = owner is torch.cuda and "state" in name  # the CPU's stands for it
            original = getattr(torch if of_gpu else owner, name)

            def function(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside:
                    return original(*args, **kwargs)
                inside = True
                try:
                    self._seeds(name)
                    return original(*args[:1]) if of_gpu and args else original(*args, **kwargs)
                finally:
                    inside = False

            return owner, name, function

        with ExitStack() as stack:
            for owner, names in _SEEDING.items():
                for name in names.split() if self.follows else ():
                    stack.enter_context(patch.object(*noted(owner, name)))
            yield

    def seeds(self, what: str) -> None:
        self._note("random state", what)

    def _seeds(self, name: str) -> None:
        what = f"a generator is seeded ({name}), which replays do not do"
        if name.startswith("get"):
            what = f"the state of a generator is read ({name})"
        remedy = "recompute with preserve_rng_state=False, if nothing random is in it"
        self._note("random state", what, remedy if _in_checkpoint() else None)

    # -- what was found

    def _note(
        self, kind: str, what: str, remedy: str | None = None, *, line: str | None = None
    ) -> None:
        if not self.is_open or self.place.paused:
            return
        at, called = (line, "") if line is not None else (line_text(running_line()), caller())
        where = self.place.module, issuing.unit, self.place.phase, self.number
        lines = at, "" if called == at else called
        found = CaptureObstacle(kind, what, *where, *lines, remedy or _REMEDIES[kind], count=1)
        self._pending.append(found)

    def obstacles(self) -> tuple[CaptureObstacle, ...] | None:
        """Returns the obstacles found after the two warm-up steps, each line once, in the order found.

        If the program can't go on, or has fewer steps, those of all steps; None if nothing was checked.
        """
        if not self.follows:
            return None
        self._end()
        first = 0 if self._broken or self.number <= WARM_UP else WARM_UP
        found = {key: each for key, each in self._found.items() if each.step > first}
        on_cpu = {each.line for each in found.values() if each.what == _CPU_COMPUTES}
        return tuple(
            replace(each, count=self._times[key])
            for key, each in found.items()
            if each.what != _CPU_ALLOCATES or each.line not in on_cpu
        )


_SEEDING: dict[Any, str] = {
    torch: "manual_seed seed get_rng_state set_rng_state",
    torch.random: "manual_seed seed get_rng_state set_rng_state",
    torch.cuda: "manual_seed manual_seed_all seed seed_all get_rng_state set_rng_state",
}


def _by_mask(args: Any) -> bool:
    """Whether aten's ``index`` is called with a mask, so that the result's shape depends on values."""
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1:]))


def _states_of_python() -> Any:
    of_numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]


def _is_to_cpu() -> bool:
    """Whether the running line contains ``.to("cpu")``, which does nothing in a dry run."""
    line = running_line()
    text = linecache.getline(line[0].co_filename, line[1]) if line is not None else ""
    return _TO_CPU.search(text) is not None


def _in_checkpoint() -> bool:
    """Whether the caller was called by torch's activation checkpointing."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
