"""Options of the engine. Which ones a root may have is listed here, and the core names none.

A unit's options are put into ``Unit.options`` by what asks for them: a policy, or a call of the user's. Other
options are a kind of ``Bucket``, of ``Reducer`` or of ``Stage``, which the core is given.
"""

from parallel3d.fsdp.context import RunContext
from parallel3d.fsdp.options.checks import BuffersAreFilled, RanksAgree
from parallel3d.fsdp.options.finalization import Finalization
from parallel3d.fsdp.options.gather_extension import LateExtensions
from parallel3d.fsdp.options.memory import StaticMemory
from parallel3d.fsdp.options.merged import MergedBuckets, RegisteredByRoot

ROOT_OPTIONS = (
    LateExtensions,  # first: it makes other buckets
    StaticMemory,
    RanksAgree,
    BuffersAreFilled,
    Finalization,
    MergedBuckets,
    RegisteredByRoot,  # last: once it has registered parameters, nothing may raise
)
"""In the order in which they are told. Whichever option is imported, this file is read before it."""

RunContext.root_options = ROOT_OPTIONS
