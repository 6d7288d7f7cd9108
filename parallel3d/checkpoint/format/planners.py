"""DCP's planners, without pickle: what is no tensor goes as JSON."""

from __future__ import annotations

import io
import json
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from parallel3d.checkpoint.values import decode, encode

__all__ = ["LoadPlanner", "SavePlanner"]


class SavePlanner(DefaultSavePlanner):
    """For ``Writer``: as torch's, but values that are no tensors are written as JSON.

    Raises, from ``dcp.save``:
        CheckpointError: for one that can't be.
    """

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """bytes of the JSON text, for a value."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(encode(object, write_item.index.fqn)).encode())
        return object


class LoadPlanner(DefaultLoadPlanner):
    """For ``Reader``: the reverse."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value where it belongs in the state dict."""
        name = read_item.dest_index.fqn
        found = decode(json.loads(value.getvalue()))
        if not self.flatten_state_dict:
            self.state_dict[name] = found
            self.original_state_dict[name] = found  # the base may have made another dict of it
            return
        *path, last = self.mappings[name]
        at: Any = self.original_state_dict
        for key in path:
            at = at[key]
        at[last] = found
