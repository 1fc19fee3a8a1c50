"""Attention over a paged cache: softmax(q · K) · V, with K and V fetched cell by cell through the block table.

The table is handed to the kernel's contract first, at every call, as the real kernel does it.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from blocktable.attention.memory import BlockMemory
from blocktable.attention.reading import Part, Reading

__all__ = ["latent_attention", "paged_attention"]


def paged_attention(query: torch.Tensor, memory: BlockMemory, reading: Reading, *, scale: float) -> torch.Tensor:
    """Return the attention of a step's tokens [T, heads, head_dim] over what their rows hold, in the query's dtype.

    Multi-head, grouped and multi-query attention alike: query heads share the memory's heads in equal runs. Raises
    `ContractError` where the kernel would refuse the table. Cost: the cells that are read.
    """
    reading.table.accept()
    if len(reading.parts) == 1:  # it has all tokens of the step, in their order
        return _attend(query, memory, reading, reading.parts[0], scale)
    out = torch.empty_like(query)
    for part in reading.parts:
        out[part.tokens] = _attend(query[part.tokens], memory, reading, part, scale)
    return out


def _attend(query: torch.Tensor, memory: BlockMemory, reading: Reading, part: Part, scale: float) -> torch.Tensor:
    keys, values = _load(memory, reading, part)
    n, queries = part.mask.shape[0], part.mask.shape[2]
    heads, shared = memory.heads, query.shape[1] // memory.heads
    # Query heads that share one head of the memory stand in line with the queries, [n, heads, shared · q, head_dim].
    lined = query.view(n, queries, heads, shared, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    bias = part.bias(shared, query.dtype)
    found = scaled_dot_product_attention(lined, keys, values, attn_mask=bias, scale=scale)
    found = found.view(n, heads, shared, queries, -1).permute(0, 3, 1, 2, 4)
    return found.reshape(n * queries, heads * shared, -1)


def _load(memory: BlockMemory, reading: Reading, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Fetch keys and values [n, heads, L, head_dim]; a memory of one plane serves as both."""
    whole = memory.cells(reading.table.block_size)
    fetched = whole.index_select(0, part.cells.view(-1)).view(*part.cells.shape, memory.heads, memory.head_dim)
    if part.dead is not None:
        fetched.masked_fill_(part.dead[:, :, None, None], 0)
    planes = fetched.transpose(2, 3)
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
