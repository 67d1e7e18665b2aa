"""Named tensors of a layer, without its prefix, or of a file."""

import torch

Tensors = dict[str, torch.Tensor]
