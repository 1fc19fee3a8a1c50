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
PART = {
    "add_row", "commit_block_table", "get_device_tensor", "get_numpy_array", "max_num_blocks_per_req", "block_size",
    "block_table", "slot_mapping",
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
    found = [
        *vllm_drift.strangers(root, "input_batch.block_table", V1 | PART),
        *vllm_drift.strangers(root, "block_tables", V2 | V1 | PART | TENSOR),
    ]
    assert [one for one in found if not one.startswith(own)] == []
    first, second = real("blocktable.integrations.vllm_tables_v1"), real("blocktable.integrations.vllm_tables_v2")
    assert names_of(first.TablesV1) | names_of(first.Halves) >= V1
    assert names_of(first.GroupV1) >= PART
    assert names_of(second.TablesV2) >= V2


def names_of(made):
    """Return the names that a class defines and that its constructor sets."""
    return set(made.__init__.__code__.co_names) | set(vars(made))


ALIASED = """
class Runner:
    def warm_up(self, runner):
        tables = runner.input_batch.block_table
        parts = tables.block_tables
        for part, ids in zip(parts, [1]):
            part.first_new(ids)
        for i, part in enumerate(runner.input_batch.block_table.block_tables):
            part.second_new(i)
        lone = runner.input_batch.block_table[3]
        return [one.third_new for one in parts], lone.fourth_new, ids.stranger
"""


def test_tables_are_found_under_other_names(tmp_path):
    (tmp_path / "warm.py").write_text(ALIASED)
    found = [one.rpartition(".")[2] for one in vllm_drift.strangers(tmp_path, "input_batch.block_table", V1)]
    assert sorted(found) == ["first_new", "fourth_new", "second_new", "third_new"]


def test_what_writes_into_tables_by_hand_is_what_was_read(root):
    assert vllm_drift.rewritten(root) == []


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
