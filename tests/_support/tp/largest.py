"""The largest tensor that operations make."""

from torch import Tensor

from parallel3d._torch.autograd import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return result
