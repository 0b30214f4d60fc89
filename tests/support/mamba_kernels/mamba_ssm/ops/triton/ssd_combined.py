"""Convolution, scan and gate of a Mamba-2 layer, token by token (Dao and Gu 2024, arXiv 2405.21060, Eq. 1 and 16).

h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_tᵀ        y_t = h_t C_t + D x_t        out_t = y_t silu(z_t)
"""

import torch
import torch.nn.functional as F


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    activation="silu",
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
    seq_idx=None,
):
    assert activation == "silu"
    assert seq_idx is None
    length, heads = zxbcdt.shape[1], len(A)
    inner, taps = heads * headdim, conv1d_weight.shape[1]
    state = (zxbcdt.shape[2] - 2 * inner - heads) // (2 * ngroups)
    gate, columns, step = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], dim=-1)
    padded = F.pad(columns.transpose(1, 2), (taps - 1, 0))
    columns = F.conv1d(padded, conv1d_weight.unsqueeze(1), conv1d_bias, groups=len(conv1d_weight)).transpose(1, 2)
    x, b, c = F.silu(columns).split([inner, ngroups * state, ngroups * state], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    # Each group's b and c serve the heads of the group.
    b, c = (one.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, dim=2) for one in (b, c))
    step = F.softplus(step + dt_bias)
    held, outputs = x.new_zeros(len(x), heads, headdim, state), []
    for at in range(length):
        decay = (step[:, at] * A).exp()[..., None, None]
        held = decay * held + (step[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        outputs.append((held * c[:, at, :, None]).sum(-1) + D[:, None] * x[:, at])
    return (torch.stack(outputs, 1).flatten(2) * F.silu(gate)).to(zxbcdt.dtype)


mamba_chunk_scan_combined = None
"""Only for generation, which Megatron-Core does not do here."""
