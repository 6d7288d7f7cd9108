"""Linears that read one tensor."""

from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.tp import Colwise, Rowwise


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def plan(layout: str) -> dict:
    output = "replicate" if layout == "replicate" else "sequence"
    return {
        "gate": Colwise(input=layout),
        "up": Colwise(input=layout),
        "down": Rowwise(output=output),
    }


LAYOUTS = ("replicate", "sequence")


def use_local(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                local = p.to_local() if hasattr(p, "to_local") else p
                module._parameters[name] = nn.Parameter(local.detach().clone(), p.requires_grad)
