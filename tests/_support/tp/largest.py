"""The largest tensor that operations make."""

from torch import Tensor

from parallel3d._torch.autograd import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operation made, of one that is expanded those in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                held = t.untyped_storage().nbytes() // t.element_size()
                self.numel = max(self.numel, min(t.numel(), held))
        return result
