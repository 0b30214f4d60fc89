"""RMSNorm of groups of columns."""

import torch


class RMSNorm(torch.nn.Module):
    def __init__(self, width, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size or width

    def forward(self, hidden):
        groups = hidden.unflatten(-1, (-1, self.group_size))
        normed = groups * (groups.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return normed.flatten(-2) * self.weight
