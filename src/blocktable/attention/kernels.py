"""Attention over a paged cache: softmax(q · K) · V, with K and V fetched cell by cell through the block table.

The table is handed to the kernel's contract first, at every call, as the real kernel does it.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from blocktable.attention.memory import BlockMemory
from blocktable.attention.reading import Reading

__all__ = ["latent_attention", "paged_attention"]


def paged_attention(query: torch.Tensor, memory: BlockMemory, reading: Reading, *, scale: float) -> torch.Tensor:
    """Return the attention of a step's tokens [T, heads, head_dim] over what their rows hold, in the query's dtype.

    Multi-head, grouped and multi-query attention alike: query heads share the memory's heads in equal runs. Raises
    `ContractError` where the kernel would refuse the table. Cost: the cells that are read.
    """
    reading.table.accept()
    out = torch.empty_like(query)
    heads, shared = memory.heads, query.shape[1] // memory.heads
    for part in reading.parts:
        keys, values = _load(memory, reading, part.cells, part.dead)
        n, queries = part.mask.shape[0], part.mask.shape[2]
        # Query heads that share one head of the memory stand in line with the queries, [n, heads, shared · q, head_dim].
        lined = query[part.tokens].view(n, queries, heads, shared, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = part.mask.repeat(1, 1, shared, 1)
        found = scaled_dot_product_attention(lined, keys, values, attn_mask=mask, scale=scale)
        found = found.view(n, heads, shared, queries, -1).permute(0, 3, 1, 2, 4)
        out[part.tokens] = found.reshape(n * queries, heads * shared, -1)
    return out


def _load(
    memory: BlockMemory, reading: Reading, cells: tuple[torch.Tensor, ...], dead: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch keys and values [n, heads, L, head_dim]; a memory of one plane serves as both."""
    whole = memory.cells(reading.table.block_size)
    planes = []
    for plane in cells:
        fetched = whole.index_select(0, plane.view(-1)).view(*plane.shape, memory.heads, memory.head_dim)
        if dead is not None:
            fetched.masked_fill_(dead[:, :, None, None], 0)
        planes.append(fetched.transpose(1, 2))
    return planes[0], planes[-1]


def latent_attention(
    query: torch.Tensor,
    memory: BlockMemory,
    reading: Reading,
    *,
    to_key: torch.Tensor,
    to_value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return MLA's attention [T, heads, value_dim] over latents, without ever expanding them (the absorbed form).

    ``query`` is [T, heads, nope + rope]; a cell of the memory is one "head" of latent and rope, 512 + 64 in DeepSeek.
    ``to_key`` [heads, nope, latent] and ``to_value`` [heads, value_dim, latent] are the two halves of the projection that
    would expand a latent: the first moves the query into the latents' space, the second moves the result out of it.
    """
    nope, latent = to_key.shape[1:]
    inside = torch.einsum("thn,hnl->thl", query[..., :nope], to_key)
    found = paged_attention(torch.cat((inside, query[..., nope:]), dim=-1), memory, reading, scale=scale)
    return torch.einsum("thl,hvl->thv", found[..., :latent], to_value)
