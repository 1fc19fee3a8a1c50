"""What the plugin relies on, in the two newest releases of vLLM's CPU package."""

import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from blocktable.integrations import vllm, vllm_drift

pytestmark = pytest.mark.conformance

PREVIOUS = Path(sys.prefix) / "previous" / "vllm"

# What else vLLM calls a `block_table`: the tensor that its backends read.
TENSOR = {"shape", "device", "size", "to", "copy_", "expand", "index_select", "stride", "dtype", "view", "unsqueeze"}
V1 = {
    "append_row", "add_row", "clear_row", "swap_row", "move_row", "commit_block_table", "compute_slot_mapping", "clear",
    "block_tables", "gpu", "cpu", "np",
}  # fmt: skip
V2 = {
    "append_block_ids", "apply_staged_writes", "gather_block_tables", "compute_slot_mappings", "get_dummy_block_tables",
    "get_dummy_slot_mappings", "input_block_tables", "slot_mappings", "block_sizes", "num_kv_cache_groups", "cp_size",
    "cp_rank", "cp_interleave", "redirect_writes_to_null_block",
}  # fmt: skip


@pytest.fixture
def root(real):
    real("vllm")
    return vllm_drift.package()


@pytest.mark.parametrize("mode", vllm.MODES)
def test_nothing_moved_in_the_installed_release(root, vllm_version, mode):
    assert SpecifierSet(vllm.TESTED[mode]).contains(vllm_version)
    assert vllm_drift.moved(root, mode) == []


def test_vllm_touches_no_member_of_the_tables_that_ours_lack(root, real):
    own = (f"{vllm_drift.V1}:", f"{vllm_drift.V2}:")
    found = [*vllm_drift.strangers(root, "block_table", V1 | TENSOR), *vllm_drift.strangers(root, "block_tables", V2)]
    assert [one for one in found if not one.startswith(own)] == []
    first, second = real("blocktable.integrations.vllm_tables_v1"), real("blocktable.integrations.vllm_tables_v2")
    made = set(vars(first.TablesV1)) | {"block_tables", "gpu", "cpu", "np"}
    assert made >= V1
    names = set(second.TablesV2.__init__.__code__.co_names) | set(vars(second.TablesV2))
    assert names >= V2


def test_the_release_before_has_the_preflights_hooks_other_tables_and_another_pool():
    if not PREVIOUS.is_dir():
        pytest.skip("the release before is not here: tools/peers.sh DIR previous unpacks it")
    assert vllm_drift.moved(PREVIOUS, "preflight") == []
    moved = vllm_drift.moved(PREVIOUS, "tables")
    assert any("MultiGroupBlockTable.__init__ takes" in one and "kernel_block_sizes" in one for one in moved)
    assert any("BlockTables.__init__ takes" in one for one in moved)
    assert not SpecifierSet(vllm.TESTED["tables"]).contains("0.31.0")
    moved = vllm_drift.moved(PREVIOUS, "pool")
    assert "v1/core/kv_cache_manager.py: KVCacheManager.allocate_slots is not the one that was tested" in moved
