"""Members of enums in a DCP folder's ``.metadata``: Python 3.11.0 to 3.11.3 writes them as ``getattr``."""

import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    TensorProperties,
)

from parallel3d.checkpoint.torch_formats.pickled import DCP_METADATA, read_pickle
from parallel3d.errors import CheckpointError


class Attribute:
    """Pickled as ``getattr(of, name)``."""

    def __init__(self, of: Any, name: str) -> None:
        self.call = getattr, (of, name)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("member", _MEM_FORMAT_ENCODING)
def test_a_memory_format(member: _MEM_FORMAT_ENCODING) -> None:
    data = pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, member.name))
    assert read_pickle(data, DCP_METADATA, what="it").kind == "memory format"


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "__subclasses__"),
        (TensorProperties, "TORCH_CHANNELS_LAST"),
        (TensorProperties, "__init__"),
    ],
)
def test_no_other_attribute(of: Any, name: str) -> None:
    with pytest.raises(CheckpointError):
        read_pickle(pickle.dumps(Attribute(of, name)), DCP_METADATA, what="it")
