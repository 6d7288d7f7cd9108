"""The first real step, compared with the plain computation (``docs/audit.md``).

A static check proves something about another run: on the meta device, at other lengths, with other kernels.
Here the real inputs, outputs and gradients of each unit are gathered, and compared with what the plain module
computes from the same inputs.

- ``parallelize(checks=Checks(audit=...))`` switches it on; it is on by default if cp > 1.
- ``next_step(model)`` repeats it, ``report(model)`` returns what was compared and what could not be.
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
