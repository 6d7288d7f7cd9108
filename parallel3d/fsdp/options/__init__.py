"""Options of the engine: each registers itself, and the core does not name it."""

import weakref

from parallel3d.fsdp.context import RootOption, RunContext


class ContextOption(RootOption):
    """An option that knows its root's context, weakly, as that holds it."""

    def __init__(self, context: RunContext) -> None:
        self._context = weakref.ref(context)

    @property
    def context(self) -> RunContext:
        """The root's context."""
        context = self._context()
        assert context is not None
        return context
