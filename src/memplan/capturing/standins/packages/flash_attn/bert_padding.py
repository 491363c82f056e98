"""Taking the padding out of a batch, and putting it back.

`index_first_axis` keeps its int64 indices for the backward pass, expanded for the gather.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, indices):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        ctx.rows, shape = tensor.shape[0], tensor.shape[1:]
        wide = indices[:, None].expand(-1, shape.numel())
        return torch.gather(tensor.flatten(1), 0, wide).reshape(-1, *shape)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (indices,) = ctx.saved_tensors
        shape = gradient.shape[1:]
        flat = gradient.flatten(1)
        whole = flat.new_zeros((ctx.rows, flat.shape[1]))
        whole.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return whole.reshape(ctx.rows, *shape), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, indices, rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(indices)
        out = values.new_zeros((rows, *values.shape[1:]))
        out[indices] = values
        return out

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (indices,) = ctx.saved_tensors
        return gradient[indices], None, None


index_first_axis = _Take.apply
index_put_first_axis = _Put.apply


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Tokens, their indices, cumulative lengths, the longest length, lengths in use."""
    masks = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = masks.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(masks.flatten(), as_tuple=False).flatten()
    longest = int(lengths.max().item())
    cumulative = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)  # type: ignore[no-untyped-call]
    return tokens, indices, cumulative, longest, used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """(batch, seqlen, …) with zeros where there is no token."""
    out = index_put_first_axis(hidden_states, indices, batch * seqlen)  # type: ignore[no-untyped-call]
    padded: torch.Tensor = out.reshape(batch, seqlen, *hidden_states.shape[1:])
    return padded
