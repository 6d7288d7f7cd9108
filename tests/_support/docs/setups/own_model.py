"""What README's example of tests of one's own needs."""

import torch
from _support.models import LM_PLAN as PLAN
from _support.models import Lm, lm_loss, tokens

import parallel3d as p3d

build_model, sample, loss = Lm, tokens, lm_loss
with torch.device("meta"):
    meta_model = Lm(dim=512, hidden=512, vocab=512)
    meta_tokens = torch.zeros(2, 9, dtype=torch.int64)
