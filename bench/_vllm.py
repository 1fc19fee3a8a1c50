"""vLLM's real table classes, set up as its runners set them up, on plain memory.

V2 stages writes in pinned buffers and applies them by a kernel on the device. Here the buffers are vLLM's own plain ones
for CPUs, and the kernel launch is an empty call, so what is timed is the host's part alone.
"""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402 - after the environment that vLLM reads when imported
from vllm.platforms import current_platform  # noqa: E402

# What a CPU worker does before it imports a kernel: load the compiled operations and put them in Triton's place.
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()

from vllm.v1.worker import block_table as v1  # noqa: E402
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer  # noqa: E402
from vllm.v1.worker.gpu import block_table as v2  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

# One thread a side: what is compared is the work, not how two threads meet on a busy machine.
torch.set_num_threads(1)

CPU = torch.device("cpu")


class _NoKernel:
    """A kernel whose launch returns at once."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def v1_tables(rows: int, widths: list[int], block_size: int, tokens: int = 8192) -> Any:
    """Return V1's table of all groups, one group per width (already a multiple of its alignment)."""
    return v1.MultiGroupBlockTable(
        max_num_reqs=rows,
        max_num_batched_tokens=tokens,
        pin_memory=False,
        device=CPU,
        block_sizes=[block_size] * len(widths),
        max_num_blocks=widths,
    )


def v2_tables(rows: int, widths: list[int], block_size: int) -> Any:
    """Return V2's tables with vLLM's plain buffers for CPUs and no kernel behind them."""
    buffer_utils.UvaBuffer = UvaBuffer
    buffer_utils._apply_write_kernel = _NoKernel()  # noqa: SLF001 - the host's part is what is timed
    return v2.BlockTables(
        block_sizes=[block_size] * len(widths),
        max_num_reqs=rows,
        max_num_batched_tokens=8192,
        max_num_blocks_per_group=widths,
        device=CPU,
    )


class V1Positions:
    """The lines of V1's runner that build positions and slots from token counts, on CPU where device and host are one.

    Left out is what the runner does with positions for other ends (token ids, M-RoPE).
    """

    def __init__(self, table: Any, rows: int, tokens: int) -> None:
        self.table = table
        for group in table.block_tables:  # as CPUModelRunner does
            group.block_table.gpu = group.block_table.cpu
            group.slot_mapping.gpu = group.slot_mapping.cpu
        self.arange_np = np.arange(max(rows + 1, tokens), dtype=np.int64)
        self.query_pos = _shared(tokens, torch.int64)
        self.req_indices = _shared(tokens, torch.int64)
        self.query_start_loc = _shared(rows + 1, torch.int32)
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int32)
        self.positions = torch.zeros(tokens, dtype=torch.int64)

    _get_cumsum_and_arange = GPUModelRunner._get_cumsum_and_arange  # noqa: SLF001 - the runner's own code

    def slots(self, computed: torch.Tensor, scheduled: np.ndarray) -> None:
        """Fill positions and every group's slot mapping for rows 0 .. n - 1 of a step."""
        rows, total = scheduled.size, int(scheduled.sum())
        req_indices = np.repeat(self.arange_np[:rows], scheduled)
        cu_num_tokens = self._get_cumsum_and_arange(scheduled, self.query_pos.np)
        self.query_start_loc.np[0] = 0
        self.query_start_loc.np[1 : rows + 1] = cu_num_tokens
        self.query_start_loc.np[rows + 1 :].fill(cu_num_tokens[-1])
        self.query_start_loc.copy_to_gpu()
        self.num_computed_tokens[:rows].copy_(computed, non_blocking=True)
        self.req_indices.np[:total] = req_indices
        self.req_indices.copy_to_gpu(total)
        self.query_pos.copy_to_gpu(total)
        at = self.req_indices.gpu[:total]
        self.positions[:total] = self.num_computed_tokens[at].to(torch.int64) + self.query_pos.gpu[:total]
        self.table.compute_slot_mapping(rows, self.query_start_loc.gpu[: rows + 1], self.positions[:total])


def _shared(size: int, dtype: torch.dtype) -> Any:
    """Return a buffer of vLLM's whose device half is its host half, as its CPU runner makes them."""
    buffer = v1.CpuGpuBuffer(size, dtype=dtype, device=CPU, pin_memory=False)
    buffer.gpu = buffer.cpu
    return buffer
