"""Context parallelism: each rank of ``cp`` holds a part of every sequence (``docs/context_parallel.md``).

- ``parallelize(context_parallel=...)`` finds the attention of a model; ``ContextParallel`` are its options,
  ``summary`` says what was chosen.
- ``shard_batch`` cuts a batch of whole sequences, ``gather`` joins what was computed; ``positions`` is for
  models that make positions themselves.
- ``attention`` is ``F.scaled_dot_product_attention`` of sequences that lie on the ranks: ``Sequence`` says
  how they
  lie, ``CpAxis`` on which ranks.
- ``choose`` picks the kind of attention, ``bytes_per_layer`` says what each communicates.
"""

from typing import TYPE_CHECKING

from parallel3d._util.lazy import export_lazily

if TYPE_CHECKING:
    from parallel3d.cp.attention import attention as attention
    from parallel3d.cp.batch import gather as gather
    from parallel3d.cp.batch import shard_batch as shard_batch
    from parallel3d.cp.choose import Choice as Choice
    from parallel3d.cp.choose import Traffic as Traffic
    from parallel3d.cp.choose import bytes_per_layer as bytes_per_layer
    from parallel3d.cp.choose import choose as choose
    from parallel3d.cp.model import ContextParallel as ContextParallel
    from parallel3d.cp.model import summary as summary
    from parallel3d.cp.sequence import CpAxis as CpAxis
    from parallel3d.cp.sequence import Kind as Kind
    from parallel3d.cp.sequence import Sequence as Sequence
    from parallel3d.cp.state import positions as positions
else:
    export_lazily(
        __name__,
        {
            ".attention": "attention",
            ".batch": "gather shard_batch",
            ".choose": "Choice Traffic bytes_per_layer choose",
            ".model": "ContextParallel summary",
            ".sequence": "CpAxis Kind Sequence",
            ".state": "positions",
        },
    )
