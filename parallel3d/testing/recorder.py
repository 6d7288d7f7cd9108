"""The recorder of collectives; it is in ``parallel3d._recorder``, as the guards use it too."""

from parallel3d._recorder import Collective, Recorder, record_collectives

__all__ = ["Collective", "Recorder", "record_collectives"]
