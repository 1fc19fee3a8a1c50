"""Paged attention in torch that takes a table only where the real kernel would; needs torch.

memory.py      the cache itself: blocks of keys and values, or of latents
acceptance.py  what the kernel does to a table before it reads it
layouts.py     dense, split and CSR tables as pages
reading.py     which cells of the memory each query token reads
kernels.py     attention over those cells, multi-head and latent
"""

from blocktable.attention.acceptance import accept
from blocktable.attention.kernels import latent_attention, paged_attention
from blocktable.attention.layouts import Table
from blocktable.attention.memory import BlockMemory
from blocktable.attention.reading import Reading

__all__ = ["BlockMemory", "Reading", "Table", "accept", "latent_attention", "paged_attention"]
