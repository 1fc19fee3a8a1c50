"""What the plugin relies on in vLLM, held against the source of an installed release without importing it.

signatures   the functions that are replaced or wrapped, and the classes that are stood in for, member by member
call sites   with which arguments vLLM makes a table or a pool, and which members of it vLLM touches anywhere
bodies       what is done in fewer steps here, word for word but for comments: it must be what was compared
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from blocktable.errors import BlockTableError
from blocktable.integrations.vllm_pool_bodies import BODIES

__all__ = ["moved", "package", "rewritten", "strangers"]

CORE, WORKER = "v1/core", "v1/worker"
V1, V2 = f"{WORKER}/block_table.py", f"{WORKER}/gpu/block_table.py"

# mode: file: function or method: its parameters, "..." where more may follow
FUNCTIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "preflight": {
        "config/vllm.py": {
            "VllmConfig.__post_init__": "self",
            "get_layers_from_vllm_config": "vllm_config layer_type layer_names",
        },
        "model_executor/model_loader/utils.py": {
            "initialize_model": "vllm_config * prefix model_class model_config",
        },
        f"{WORKER}/utils.py": {"prepare_kernel_block_sizes": "kv_cache_config attn_groups"},
        f"{CORE}/kv_cache_utils.py": {
            "get_kv_cache_groups": "vllm_config kv_cache_spec",
            "get_kv_cache_config_from_groups": "vllm_config kv_cache_groups available_memory",
        },
        "v1/attention/backends/utils.py": {
            "get_supported_kv_cache_layouts": "backends",
            "resolve_kv_cache_layout": "vllm_config supported_layouts kv_cache_specs",
        },
    },
    "tables": {
        V1: {
            "get_block_table_width": "max_num_blocks block_size * token_alignment",
            "MultiGroupBlockTable.__init__": "self max_num_reqs max_num_batched_tokens pin_memory device block_sizes "
            "max_num_blocks cp_kv_cache_interleave_size slot_mapping_modes",
            "MultiGroupBlockTable.append_row": "self block_ids row_idx",
            "MultiGroupBlockTable.add_row": "self block_ids row_idx",
            "MultiGroupBlockTable.clear_row": "self row_idx",
            "MultiGroupBlockTable.move_row": "self src tgt",
            "MultiGroupBlockTable.swap_row": "self src tgt",
            "MultiGroupBlockTable.compute_slot_mapping": "self num_reqs query_start_loc positions",
            "MultiGroupBlockTable.commit_block_table": "self num_reqs",
            "MultiGroupBlockTable.clear": "self",
            "BlockTable.add_row": "self block_ids row_idx",
            "BlockTable.commit_block_table": "self num_reqs",
            "BlockTable.get_device_tensor": "self num_reqs",
            "BlockTable.get_numpy_array": "self",
        },
        V2: {
            "BlockTables.__init__": "self block_sizes max_num_reqs max_num_batched_tokens max_num_blocks_per_group device "
            "cp_size cp_rank cp_interleave slot_mapping_enabled dcp_sharded",
            "BlockTables.append_block_ids": "self req_index new_block_ids overwrite",
            "BlockTables.apply_staged_writes": "self",
            "BlockTables.gather_block_tables": "self idx_mapping num_reqs_padded out out_ptrs",
            "BlockTables.compute_slot_mappings": "self idx_mapping query_start_loc positions num_tokens_padded out",
            "BlockTables.get_dummy_block_tables": "self num_reqs",
            "BlockTables.get_dummy_slot_mappings": "self num_tokens",
        },
        f"{WORKER}/worker_base.py": {"WorkerWrapperBase.initialize_from_config": "self kv_cache_configs"},
        "config/vllm.py": {"VllmConfig.max_concurrent_batches": "self"},
    },
}
FUNCTIONS = {**FUNCTIONS, "observe": FUNCTIONS["tables"], "pool": {}}

# mode: file: names that the file must look up in itself, so that replacing them there is seen
LOOKED_UP: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "preflight": {"model_executor/model_loader/base_loader.py": ("initialize_model",)},
    "tables": {
        f"{WORKER}/gpu_input_batch.py": ("MultiGroupBlockTable",),
        f"{WORKER}/gpu/model_runner.py": ("BlockTables",),
    },
    "pool": {f"{CORE}/kv_cache_coordinator.py": ("BlockPool",), f"{CORE}/sched/scheduler.py": ("KVCacheManager",)},
}
LOOKED_UP = {**LOOKED_UP, "observe": LOOKED_UP["tables"]}

# Where vLLM makes a table or a pool, and by which keywords.
MADE: Mapping[str, tuple[str, str]] = {
    f"{CORE}/kv_cache_coordinator.py": (
        "BlockPool",
        "enable_caching enable_kv_cache_events hash_block_size metrics_collector num_gpu_blocks",
    ),
    f"{WORKER}/gpu_input_batch.py": (
        "MultiGroupBlockTable",
        (
            "block_sizes cp_kv_cache_interleave_size device max_num_batched_tokens max_num_blocks max_num_reqs pin_memory "
            "slot_mapping_modes"
        ),
    ),
    f"{WORKER}/gpu/model_runner.py": (
        "BlockTables",
        (
            "block_sizes cp_interleave cp_rank cp_size dcp_sharded device max_num_batched_tokens max_num_blocks_per_group "
            "max_num_reqs slot_mapping_enabled"
        ),
    ),
}

# Where vLLM writes into the halves of a table by hand, or puts them aside. What is done for them here follows these bodies.
WRITERS: Mapping[str, Mapping[str, str]] = {
    f"{WORKER}/gpu_model_runner.py": {"GPUModelRunner.preserve_serving_state": "84a42489"},
    f"{WORKER}/cp_utils.py": {"prepare_dcp_dummy_context_metadata": "2ad67d35"},
    "model_executor/warmup/replayssm_warmup.py": {"_temporary_replayssm_autotune_state": "d3080093"},
}


def package() -> Path:
    """Return the folder of the vLLM that would be imported here."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise BlockTableError("vLLM is not installed here", remedy="pip install blocktable[vllm]")
    return Path(next(iter(found.submodule_search_locations)))


def moved(root: Path, mode: str) -> list[str]:
    """Return a sentence for each thing that ``mode`` relies on and the vLLM in ``root`` does not have; cost: 0.1 s."""
    changed = _changed(root, BODIES) if mode == "pool" else ()
    return [*_functions(root, FUNCTIONS[mode]), *_lookups(root, LOOKED_UP[mode]), *changed]


def _functions(root: Path, files: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for file, functions in files.items():
        defined = _parameters(root / file)
        for name, wanted in functions.items():
            found = defined.get(name)
            if found is None:
                yield f"{file} has no {name}"
            elif found != wanted and not (wanted.endswith(" ...") and f"{found} ".startswith(wanted[:-3])):
                yield f"{file}: {name} takes ({found}), not ({wanted})"


def _lookups(root: Path, files: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for file, names in files.items():
        tree = _tree(root / file)
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for name in names:
            if name not in called:
                yield f"{file} does not call {name}"
        if file in MADE:
            yield from _makings(file, tree, *MADE[file])


def _makings(file: str, tree: ast.Module, name: str, wanted: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            found = " ".join(sorted(word.arg or "**" for word in node.keywords))
            if node.args or found != wanted:
                yield f"{file} makes {name} with {len(node.args)} positional arguments and ({found}), not ({wanted})"


def _changed(root: Path, files: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for file, names in files.items():
        found = _bodies(root / file)
        for name, digest in names.items():
            if name not in found:
                yield f"{file} has no {name}"
            elif found[name] != digest:
                yield f"{file}: {name} is not the one that was tested"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])


def _defined(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function and method of a file under its name."""
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{one.name}", one) for one in node.body if isinstance(one, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node


def _parameters(path: Path) -> dict[str, str]:
    """Return the parameters of every function and method of a file by its name."""
    return {name: _names(node) for name, node in _defined(path)}


def _bodies(path: Path) -> dict[str, str]:
    """Return a digest of every function and method of a file by its name: its lines, without comments and docstring."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = {}
    for name, node in _defined(path):
        kept = set(range(node.lineno - 1, node.end_lineno or 0))
        if ast.get_docstring(node) is not None:
            kept -= set(range(node.body[0].lineno - 1, node.body[0].end_lineno or 0))
        text = "\n".join(lines[i].strip() for i in sorted(kept) if not lines[i].lstrip().startswith("#"))
        found[name] = sha256(text.encode()).hexdigest()[:8]
    return found


def _names(function: ast.FunctionDef) -> str:
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if arguments.kwonlyargs:
        names += ["*", *(one.arg for one in arguments.kwonlyargs)]
    return " ".join(names)


def rewritten(root: Path) -> list[str]:
    """Return a sentence for each function that writes into tables by hand and is not the one that was read; cost: 1 s."""
    return list(_changed(root, WRITERS))


def strangers(root: Path, owner: str, members: set[str]) -> Iterator[str]:
    """Yield where vLLM touches a member of its tables that is not among ``members``; cost: seconds.

    ``owner`` is what its runners call them, ``input_batch.block_table`` in V1 and ``block_tables`` in V2. What a function
    calls by a name of its own is followed: names given to the tables, to one of them, or to each in a loop.
    """
    last = owner.rpartition(".")[2]
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f".{last}" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                for line, member in _members(function, owner):
                    if member not in members:
                        yield f"{path.relative_to(root)}:{line} touches {last}.{member}"


def _members(function: ast.FunctionDef, owner: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each attribute that a function asks of tables."""
    names: set[str] = set()
    nodes, last = list(ast.walk(function)), owner.rpartition(".")[2]

    def tables(node: ast.expr) -> bool:
        while isinstance(node, ast.Subscript):
            node = node.value
        if not isinstance(node, ast.Attribute):
            return isinstance(node, ast.Name) and node.id in names
        if node.attr == last and ast.unparse(node).endswith(owner):
            return True
        return node.attr == "block_tables" and tables(node.value)

    before = -1
    while before != len(names):
        before = len(names)
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and tables(node.value):
                names |= _names_in(node.targets[0])
            elif isinstance(node, (ast.For, ast.comprehension)):
                for target, each in _pairs(node.target, node.iter):
                    if tables(each):
                        names |= _names_in(target)
    for node in nodes:
        if isinstance(node, ast.Attribute) and tables(node.value):
            yield node.lineno, node.attr


def _pairs(target: ast.expr, each: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what a loop assigns to which part of its target, through zip and enumerate."""
    if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and isinstance(target, ast.Tuple):
        if each.func.id == "enumerate":
            yield target.elts[1], each.args[0]
        elif each.func.id == "zip":
            yield from zip(target.elts, each.args, strict=False)
    else:
        yield target, each


def _names_in(target: ast.expr) -> set[str]:
    return {target.id} if isinstance(target, ast.Name) else set()
