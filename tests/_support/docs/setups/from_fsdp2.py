"""What the examples of docs/from_fsdp2.md take as given: a model with blocks, and a batch."""

import copy

import torch
from _support.models import Lm
from _support.models import lm_loss as loss_of
from _support.models import tokens as batch

import parallel3d as p3d

model = Lm()
tokens = batch(0)
