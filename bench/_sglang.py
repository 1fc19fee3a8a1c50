"""SGLang's own host code for the same work: its Rust radix core, and the CPU path of its paged allocator.

The package wants CUDA as a whole; the compiled core needs torch alone, and the allocator's function is read out of its
source file.
"""

import ast
import importlib.util
import sys
from array import array
from pathlib import Path
from typing import Any

import torch

ROOT = Path(sys.prefix) / "sglang" / "sglang" / "srt"
VERSION = "0.5.23"


def _core() -> Any:
    path = next((ROOT / "mem_cache" / "rust_tree_core").glob("mem_cache.*.so"))
    spec = importlib.util.spec_from_file_location("mem_cache", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions(path: Path, *names: str) -> dict[str, Any]:
    """Return functions of a source file without importing what else it needs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in tree.body:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
    found: dict[str, Any] = {"torch": torch}
    exec(compile(tree, str(path), "exec"), found)  # noqa: S102 - a pinned package's own function
    return found


class Radix:
    """The radix tree: prompts in, lengths and slots out."""

    def __init__(self) -> None:
        core = _core()
        self._core = core
        self.tree = core.RustUnifiedTreeCoreBinding(
            core.TreeCoreInitParamsBinding(eviction_policy="lru", page_size=16, device="cpu"), [0]
        )

    def match(self, key: array) -> Any:
        """Return how far a prompt is cached."""
        return self.tree.match_prefix(self._core.MatchParamsBinding(key=key))

    def insert(self, key: array, slots: torch.Tensor) -> Any:
        """Register a prompt and its slots."""
        return self.tree.insert(self._core.InsertParamsBinding(key=key, value=slots))

    def slots(self, found: Any) -> torch.Tensor:
        """Return the slots of a prefix that was found."""
        return self.tree.collect_full_device_indices(found.last_device_node_id, self.tree.root_node_handle())


class Decode:
    """Rows that decode together: a slot each per step, and its write into the request-to-token table."""

    def __init__(self, rows: int, context: int, room: int) -> None:
        naive = _functions(ROOT / "mem_cache" / "allocator" / "paged.py", "alloc_decode_naive")
        pages = _functions(ROOT / "utils" / "common.py", "get_num_new_pages")
        self._alloc, self._new_pages = naive["alloc_decode_naive"], pages["get_num_new_pages"]
        per = -(-(context + room) // 16)
        self.free = torch.randperm(rows * per) + 1
        self.table = torch.zeros((rows, context + room), dtype=torch.int32)
        blocks, self.free = self.free[: rows * (context // 16)], self.free[rows * (context // 16) :]
        slots = (blocks.reshape(rows, -1, 1) * 16 + torch.arange(16)).reshape(rows, -1)
        self.table[:, :context] = slots.to(torch.int32)
        self.rows = torch.arange(rows)
        self.lengths = torch.full((rows,), context, dtype=torch.int64) - torch.arange(rows) % 16

    def step(self) -> torch.Tensor:
        """Do what ``alloc_for_decode`` does for tensors on the CPU."""
        last = self.table[self.rows, self.lengths - 1]
        following = self.lengths + 1
        fresh = self._new_pages(seq_lens=self.lengths + 1, page_size=16, decode=True)
        out = torch.empty((len(self.rows),), dtype=torch.int64)
        self._alloc(following, last, self.free, out, 16, fresh)
        self.free = self.free[fresh:]
        self.table[self.rows, self.lengths.clone()] = out.to(torch.int32)
        self.lengths = following
        return out
