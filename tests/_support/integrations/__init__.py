"""Other libraries on parallel3d, as tests and docs/integrations.md run them."""

import torch

# PyPI's torchvision is built for CUDA's torch. Beside a CPU build none of its operators is there, and its
# import, which timm needs and others try, fails where it registers something for these two. No row uses them.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
