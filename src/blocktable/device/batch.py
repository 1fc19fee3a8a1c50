"""A step's tables in batch order, in the shapes that attention kernels take, each checked against its contract.

dense      [B, W]       the persistent table; stride(0) = W
narrowed   [B, w]       a view of it, as wide as the longest row needs and the contract accepts; stride(0) = W
split      [B, 2, W]    the pages of K and of V apart: block m of a cache [blocks, 2, ...] is pages 2m and 2m + 1
csr        kv_indptr [B + 1], kv_indices, last_page_len [B]
"""

from typing import Any

import torch

from blocktable.device.layout import CHUNK, Buffers
from blocktable.errors import ArgumentError
from blocktable.geometry import Geometry, plan


class Batch:
    """The result of a gather: persistent tensors that the next gather into the same batch overwrites.

    ``rows`` int32 [padded] are the rows of the tables, -1 in padding; ``seq_lens`` int32 [padded] the lengths given, 0 in
    padding. Per group and in kernel blocks: ``tables`` int32 [padded, kernel_width], null past a row's live blocks;
    ``num_blocks`` int32 [padded]; and, where the gather was given lengths, ``kv_indptr`` int32 [padded + 1],
    ``kv_indices`` int32, of which the first kv_indptr[-1] hold (the rest is left over from earlier steps), and
    ``last_page_len`` int32 [padded], from 1 to the kernel block size, 1 where a row has no page and it is never read.

    The same ``padded`` gives the same tensors at the same addresses, always.
    """

    def __init__(self, store: "Store", padded: int) -> None:
        buffers = store.tensors
        self._store = store
        self.padded = padded
        self.rows = buffers.rows[:padded]
        self.seq_lens = buffers.seq_lens[:padded]
        self.tables = tuple(table[:padded] for table in store.by_group(buffers.tables))
        self.num_blocks = tuple(line[:padded] for line in buffers.num_blocks)
        self._csr: tuple[Any, Any, Any] | None = None
        self._split: dict[int, tuple[Any, Any]] = {}
        self.has_lengths = False

    def _flat(self, which: int, name: str) -> Any:
        if not self.has_lengths:
            raise ArgumentError(
                f"{name} needs the rows' lengths, and this batch was gathered without",
                law="L7",
                values={"padded": self.padded},
                remedy="gather(rows, padded, lengths)",
            )
        if self._csr is None:
            buffers = self._store.tensors
            self._csr = (
                tuple(line[: self.padded + 1] for line in buffers.kv_indptr),
                tuple(table.view(-1) for table in self._store.by_group(buffers.kv_indices[:-1])),
                tuple(line[: self.padded] for line in buffers.last_page_len),
            )
        return self._csr[which]

    @property
    def kv_indptr(self) -> tuple[Any, ...]:
        """Per group, where each row's pages begin in ``kv_indices``: int32 [padded + 1]; padding repeats the last."""
        found: tuple[Any, ...] = self._flat(0, "kv_indptr")
        return found

    @property
    def kv_indices(self) -> tuple[Any, ...]:
        """Per group, the pages of all rows one behind the other: int32, of which the first kv_indptr[-1] hold."""
        found: tuple[Any, ...] = self._flat(1, "kv_indices")
        return found

    @property
    def last_page_len(self) -> tuple[Any, ...]:
        """Per group, the tokens on each row's last page: int32 [padded]."""
        found: tuple[Any, ...] = self._flat(2, "last_page_len")
        return found

    def dense(self, group: int = 0) -> Any:
        """Return tables[group], int32 [padded, kernel_width], once the contracts it was planned for accept it.

        Raises ContractError with the kernel's own text. Cost: a look-up, after the first time.

        >>> import blocktable
        >>> from blocktable.device import DeviceTables
        >>> tables = blocktable.BlockTables([blocktable.plan(max_model_len=64, block_size=16)], max_rows=2)
        >>> tables.append([1], [0, 3], [3, 7, 9])
        >>> device = DeviceTables(tables, "cpu")
        >>> device.apply(tables.commit())
        >>> device.gather([1], 2).dense().tolist()
        [[3, 7, 9, 0], [0, 0, 0, 0]]
        """
        table = self.tables[group]
        self._store.check(group, table, None)
        return table

    def narrowed(self, longest: int, group: int = 0) -> Any:
        """Return a view of tables[group] that holds rows of up to ``longest`` tokens: the fewest columns the contracts accept.

        Its rows lie as far apart as in the whole table, so a kernel that takes the width as the row stride refuses it
        (ContractError): give that one ``dense``. Raises ArgumentError for more tokens than a row holds. Cost: some ten
        microseconds for a ``longest`` not met before, a look-up after.

        >>> import blocktable
        >>> from blocktable.device import DeviceTables
        >>> contract = blocktable.Contract("WALKS_TILES", width_rule=blocktable.TokenMultiple(128))
        >>> geometry = blocktable.plan(max_model_len=9416, block_size=32, contracts=[contract])
        >>> tables = blocktable.BlockTables([geometry], max_rows=2)
        >>> device = DeviceTables(tables, "cpu")
        >>> view = device.gather([0], 2).narrowed(1100)
        >>> tuple(view.shape), view.stride(0) == geometry.kernel_width
        ((2, 36), True)
        """
        table = self.tables[group][:, : self._store.columns(group, longest)]
        self._store.check(group, table, longest)
        return table

    def split(self, group: int = 0) -> Any:
        """Return int32 [padded, 2, kernel_width]: pages 2m of K and 2m + 1 of V for block m; past the live blocks 0.

        Filled anew by each call, at a fixed address. Raises ContractError where no contract of the group takes it,
        ArgumentError where the ids would pass int32. Cost: three operations on the device.
        """
        table = self.tables[group]
        if group not in self._split:
            pair = torch.zeros((self.padded, 2, table.shape[1]), dtype=torch.int32, device=table.device)
            live = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
            self._store.check(group, pair, None)
            self._store.check_pairs(group)
            self._split[group] = (pair, live)
        pair, live = self._split[group]
        torch.mul(table, 2, out=pair[:, 0])
        torch.lt(self._store.column[: table.shape[1]], self.num_blocks[group][:, None], out=live)
        torch.add(pair[:, 0], live, out=pair[:, 1])
        return pair

    def csr(self, group: int = 0) -> tuple[Any, Any, Any]:
        """Return (kv_indptr, kv_indices, last_page_len) of a group, as FlashInfer's wrappers take them.

        Raises ArgumentError where the gather had no lengths, ContractError where a contract of the group does not take the
        table it stands for. Cost: a look-up, after the first time.
        """
        self._store.check(group, self.tables[group], None)
        return self.kv_indptr[group], self.kv_indices[group], self.last_page_len[group]

    def __repr__(self) -> str:
        """Say the shape."""
        csr = ", with lengths" if self.has_lengths else ""
        return f"Batch(padded={self.padded}, {len(self.tables)} groups{csr})"


class Store:
    """The arrays of one batch of up to ``capacity`` rows, and the batches of each size seen over them."""

    def __init__(
        self,
        shapes: Any,
        geometries: tuple[Geometry | None, ...],
        num_blocks: int | None,
        capacity: int,
        device: torch.device,
    ) -> None:
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.capacity = capacity
        self._geometries = geometries
        self.device = device
        self._batches: dict[int, Batch] = {}
        self._accepted: set[Any] = set()
        self._columns: dict[tuple[int, int], int] = {}
        self._widths = [shape.kernel_width for shape in shapes]
        groups, chunks = len(shapes), -(-max(self._widths) // CHUNK)
        self.column = torch.arange(max(self._widths), device=device)
        self.tensors = Buffers(
            widths=tuple(self._widths),
            rows=self._zeros(capacity),
            seq_lens=self._zeros(capacity),
            tables=self._zeros(capacity * sum(self._widths)),
            num_blocks=self._zeros(groups, capacity),
            marks=self._zeros(groups, capacity, chunks),
        )
        self.arrays = self._as_arrays()

    def _zeros(self, *shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _as_arrays(self) -> Buffers:
        if self.device.type != "cpu":
            return self.tensors
        views: Any = (part.numpy() if isinstance(part, torch.Tensor) else part for part in self.tensors)
        return Buffers(*views)

    def by_group(self, flat: Any) -> list[Any]:
        """Return the flat array as one [capacity, kernel_width] per group."""
        sizes = [self.capacity * width for width in self._widths]
        parts = flat.split(sizes)
        return [part.view(self.capacity, width) for part, width in zip(parts, self._widths, strict=True)]

    def add_csr(self) -> None:
        """Make the arrays of the flat form, at the first gather that has lengths."""
        if self.tensors.kv_indptr is not None:
            return
        if self.capacity * max(self._widths) >= 2**31:
            raise ArgumentError(
                f"{self.capacity} rows of {max(self._widths)} pages overflow an int32 kv_indptr",
                law="L12",
                values={"rows": self.capacity, "width": max(self._widths)},
                remedy="lower max_rows or max_model_len, or use the dense tables",
            )
        groups = len(self._widths)
        self.tensors = self.tensors._replace(
            kv_indptr=self._zeros(groups, self.capacity + 1),
            kv_indices=self._zeros(self.capacity * sum(self._widths) + 1),
            last_page_len=self._zeros(groups, self.capacity),
        )
        self.arrays = self._as_arrays()

    def batch(self, padded: int) -> Batch:
        """Return the batch of one size, the same object each time."""
        if padded not in self._batches:
            self._batches[padded] = Batch(self, padded)
        return self._batches[padded]

    def forget(self) -> None:
        """Take nothing for granted about what the tables hold: the next gather writes every column."""
        for group, width in enumerate(self._widths):
            for z in range(self.tensors.marks.shape[2]):
                self.tensors.marks[group, :, z] = min(max(width - z * CHUNK, 0), CHUNK)

    def columns(self, group: int, longest: int) -> int:
        """Return the fewest kernel columns that hold ``longest`` tokens and that the contracts accept."""
        key = (group, longest)
        if key not in self._columns:
            if len(self._columns) >= 4096:
                self._columns.clear()
            self._columns[key] = self._solve(group, longest)
        return self._columns[key]

    def _solve(self, group: int, longest: int) -> int:
        geometry, shape = self._geometries[group], self.shapes[group]
        most = (
            geometry.max_model_len + geometry.lookahead if geometry else shape.width * shape.block_size * shape.cp_size
        )
        if not 1 <= longest <= most:
            raise ArgumentError(
                f"narrowed: a row holds 1..{most} tokens, not {longest}",
                law="L1",
                values={"longest": longest, "most": most},
                remedy="pass the length of the longest live row",
            )
        solved = plan(
            max_model_len=longest,
            block_size=shape.block_size,
            contracts=geometry.contracts if geometry else (),
            cp_size=shape.cp_size,
            cp_interleave=shape.cp_interleave,
        )
        ratio = shape.block_size // shape.kernel_block_size
        columns = solved.kernel_width if geometry else solved.kernel_width * ratio
        return min(int(columns), int(shape.kernel_width))

    def check(self, group: int, table: Any, longest: int | None) -> None:
        """Raise what a kernel would raise for this table of a group; ``longest`` tokens, or as many as were planned."""
        geometry = self._geometries[group]
        key = (group, tuple(table.shape), table.stride(), longest)
        if geometry is None or key in self._accepted:
            return
        tokens = geometry.max_seq_len if longest is None else -(-longest // geometry.cp_size)
        for contract in geometry.contracts:
            contract.check_table(
                tuple(table.shape),
                geometry.kernel_block_size,
                max_seq_len=tokens,
                strides=table.stride(),
                dtype="int32",
            )
        if len(self._accepted) >= 4096:
            self._accepted.clear()
        self._accepted.add(key)

    def check_pairs(self, group: int) -> None:
        """Refuse pages of K and V whose numbers could pass int32."""
        shape = self.shapes[group]
        limit = 2**30 // (shape.block_size // shape.kernel_block_size)
        if self.num_blocks is None or self.num_blocks > limit:
            raise ArgumentError(
                f"split: the pages of K and V of {self.num_blocks or 'an unknown number of'} blocks may pass int32",
                law="L12",
                values={"num_blocks": self.num_blocks, "limit": limit},
                remedy=f"make the tables with num_blocks of at most {limit}",
            )
