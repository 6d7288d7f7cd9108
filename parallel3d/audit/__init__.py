"""The first real step, compared with the plain computation (``docs/audit.md``).

What a static check finds was proven of another run: on the meta device, at other lengths, with other kernels.
Here each unit's real inputs, outputs and gradients are gathered, and the plain module computes the same.

- ``parallelize(checks=Checks(audit=...))`` asks for it, and has it by default where cp > 1.
- ``next_step(model)`` asks for it again, ``report(model)`` says what was compared, and what could not be.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.audit.findings import Finding as Finding
    from parallel3d.audit.findings import Report as Report
    from parallel3d.audit.training import next_step as next_step
    from parallel3d.audit.training import report as report
else:
    export_lazily(__name__, {".findings": "Finding Report", ".training": "next_step report"})
