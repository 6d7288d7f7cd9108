"""Members of enums in a DCP folder's ``.metadata``: Python 3.11.0 to 3.11.3 writes them as ``getattr``."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from _support.checkpoint.handmade_dcp import flat, make, small
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from parallel3d.checkpoint import load_dcp


class Older(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _MEM_FORMAT_ENCODING):
            return getattr, (_MEM_FORMAT_ENCODING, value.name)
        return NotImplemented


def test_members_by_getattr(tmp_path: Path) -> None:
    folder, table = make(flat(*small(1))), io.BytesIO()
    Older(table).dump(folder.metadata)
    assert b"getattr" in table.getvalue()
    folder.write(tmp_path / "it")
    (tmp_path / "it" / ".metadata").write_bytes(table.getvalue())
    model, optimizer = small(2)
    load_dcp(tmp_path / "it", model, optimizer)
    assert torch.equal(model.lin.weight, small(1)[0].lin.weight)
