"""Expert parallelism: each rank of ``ep`` holds some experts of every mixture (``docs/expert_parallel.md``).

- ``build_mesh(MeshLayout(..., ep=...))`` makes the mesh; ``make_expert_view`` makes its second view, with ep,
of any mesh;
  ``parallelize`` finds the modules that hold experts, ``Experts`` declares one.
- ``stats`` tells how many tokens each expert got, ``balance`` moves the routers' correction biases by it,
  ``set_capacity`` fixes the sizes of messages, so that no size must be known on the host.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.ep.experts import Experts as Experts
    from parallel3d.ep.load import balance as balance
    from parallel3d.ep.load import count as count
    from parallel3d.ep.load import set_capacity as set_capacity
    from parallel3d.ep.load import stats as stats
    from parallel3d.mesh.joined import make_expert_view as make_expert_view
else:
    export_lazily(
        __name__,
        {
            ".experts": "Experts",
            ".load": "balance count set_capacity stats",
            "parallel3d.mesh.joined": "make_expert_view",
        },
    )
