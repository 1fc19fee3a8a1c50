"""The rows of the catalogue against tables recorded from the engines: kernel blocks, page sizes, names, wrong answers."""

from dataclasses import replace
from pathlib import Path

import pytest

import blocktable.contracts
from blocktable import ContractError, GeometryError, MultipleOf, UnknownName, get_contract, plan
from blocktable.contracts import known_engines, known_versions, list_contracts, resolve_engine
from blocktable.contracts.catalogue import read_catalogue
from blocktable.contracts.engines import catalogue
from blocktable.contracts.packaged import read_packaged
from blocktable.errors import CatalogueError

MANAGER_BLOCKS = (16, 32, 48, 64, 96, 112, 128, 192, 256, 512, 544, 640)

# What vLLM 0.32's own select_common_block_size picked for each manager block; x: none.
PICKED = {
    "FLASH_ATTN TRITON_ATTN TRITON_MLA FLASH_ATTN_DIFFKV TRITON_ATTN_DIFFKV TRITON_FLASH_ATTN ROCM_ATTN"
    " ROCM_SEGMENTED_ATTN ROCM_AITER_UNIFIED_ATTN": "16 32 48 64 96 112 128 192 256 512 544 640",
    "FLASHINFER": "16 32 16 64 32 16 64 64 64 64 32 64",
    "FLASHINFER_MLA TOKENSPEED_MLA": "x 32 x 64 32 x 64 64 64 64 32 64",
    "FLASHMLA HPC_ATTN TRITON_FLASHINFER": "x x x 64 x x 64 64 64 64 x 64",
    "TURBOQUANT ULTRAQUANT": "16 32 16 64 32 16 128 64 128 128 32 128",
    "ROCM_AITER_FA": "16 32 16 32 32 16 32 32 32 32 32 32",
    "CPU_ATTN AMX_MLA FLASHINFER_MLA_SPARSE": "x 32 x 64 96 x 128 192 256 512 544 640",
    "FLASHMLA_SPARSE FLASHINFER_MLA_SPARSE_SM120 FLASHINFER_MLA_SPARSE_SM90 FLASH_ATTN_MLA_SPARSE": (
        "x x x 64 x x 128 192 256 512 x 640"
    ),
    "FLASHMLA_SPARSE_DSV4 FLASHINFER_MLA_SPARSE_DSV4 ROCM_FLASHMLA_SPARSE_DSV4 DEEPSEEK_V4_INDEXER": (
        "x x x x x x x x 256 256 x x"
    ),
    "DEEPSEEK_V32_INDEXER": "x x x 64 x x 64 64 64 64 x 64",
    "CUTLASS_MSA MINIMAX_M3_SPARSE TRITON_MSA CUTLASS_MLA": "x x x x x x 128 x 128 128 x 128",
}


@pytest.mark.parametrize("names", PICKED)
def test_kernel_blocks_are_those_that_the_engine_picks(names):
    for name in names.split():
        picked = []
        for block in MANAGER_BLOCKS:
            try:
                geometry = plan(max_model_len=9416, block_size=block, contracts=[get_contract(f"vllm:{name}@0.32.0")])
            except GeometryError:
                picked.append("x")
            else:
                picked.append(str(geometry.kernel_block_size))
        assert " ".join(picked) == PICKED[names], name
        for block in (1, 8, 24):
            with pytest.raises(GeometryError):
                plan(max_model_len=9416, block_size=block, contracts=[get_contract(f"vllm:{name}@0.32.0")])


def test_every_backend_that_the_newest_vllm_can_select_has_a_rule():
    release = resolve_engine("vllm==0.32.0")
    assert len(release.backends) == 43
    assert {contract.name for contract in list_contracts("vllm")} == set(release.backends)


@pytest.mark.parametrize(
    ("name", "version", "sizes"),
    [
        ("ROCM_AITER_MLA", "0.19.1", (1,)),
        ("ROCM_AITER_MLA", "0.20.0", (MultipleOf(1),)),
        ("ROCM_AITER_MLA_SPARSE", "0.20.2", (1,)),
        ("ROCM_AITER_MLA_SPARSE", "0.21.0", (1, 64)),
        ("ROCM_AITER_MLA_SPARSE", "0.28.0", (1, MultipleOf(16))),
        ("FLASHINFER_MLA_SPARSE", "0.31.0", (32, 64)),
        ("FLASHINFER_MLA_SPARSE", "0.32.0", (MultipleOf(32),)),
        ("FLASHMLA_SPARSE", "0.31.0", (64,)),
        ("FLASHMLA_SPARSE", "0.32.0", (MultipleOf(64),)),
        ("FLASHINFER_MLA_SPARSE_SM120", "0.24.0", (64, 256)),
    ],
)
def test_block_sizes_by_release(name, version, sizes):
    assert get_contract(name, engine="vllm", version=version).kernel_block_sizes == sizes


@pytest.mark.parametrize(
    ("name", "before", "since"),
    [
        ("FLASHINFER_MLA", "0.24.0", "0.25.0"),
        ("FLASHINFER_MLA_SPARSE", "0.24.0", "0.25.0"),
        ("FLASHMLA_SPARSE", "0.28.0", "0.29.0"),
        ("ROCM_AITER_MLA", "0.28.0", "0.29.0"),
        ("TOKENSPEED_MLA", "0.25.1", "0.26.0"),
    ],
)
def test_context_parallelism_by_release(name, before, since):
    assert get_contract(name, engine="vllm", version=before).context_parallel is False
    assert get_contract(name, engine="vllm", version=since).context_parallel is True


def test_what_layers_bring_themselves_is_known_and_not_offered():
    assert get_contract("DEEPSEEK_V32_INDEXER").kernel_block_sizes == (64,)
    assert get_contract("DEEPSEEK_V32_INDEXER", hardware="rocm").kernel_block_sizes == (1, MultipleOf(16))
    assert get_contract("DEEPSEEK_V41_INDEXER", hardware="9.0").kernel_block_sizes == (64,)
    assert get_contract("MAMBA2_ATTN").tail == "null"
    with pytest.raises(UnknownName, match=r"in vllm 0.29.0; it exists in 0.30.0 to 0.32.0"):
        get_contract("KPOOL_TAIL", engine="vllm", version="0.29.0")
    offered = {contract.name for contract in list_contracts("vllm")}
    assert offered.isdisjoint(catalogue("vllm").parts)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("vllm:TREE_ATTN@0.32.0", "TRITON_ATTN"),
        ("NO_ATTENTION", "no backend"),
        ("torch_sdpa", "CPU_ATTN"),
        ("CUSTOM", "register a Contract"),
        ("sglang:cutlass_mla", "trtllm_mla"),
    ],
)
def test_names_that_start_nothing_say_what_to_use(name, use):
    with pytest.raises(UnknownName) as caught:
        get_contract(name)
    assert use in caught.value.remedy


def test_aliases_lead_to_the_name_that_selects():
    assert get_contract("AITER_TRITON_MLA").name == "ROCM_AITER_TRITON_MLA"
    for alias, name in {"nsa": "dsa", "compressed": "dsv4", "tokenspeed_mla": "cutedsl_mla"}.items():
        assert get_contract(alias, engine="sglang").name == name


def test_a_bare_name_means_vllms_before_sglangs():
    assert get_contract("flashmla").engine == "vllm"
    assert get_contract("sglang:flashmla").engine == "sglang"
    assert get_contract("hpc_ops").engine == "sglang"


def test_fa4_takes_blocks_of_128_at_head_size_256_on_blackwell():
    assert get_contract("FLASH_ATTN", head_size=256).kernel_block_sizes == (128,)
    for facts in ({"head_size": 128}, {"head_size": 256, "hardware": "9.0"}, {}):
        assert get_contract("FLASH_ATTN", **facts).kernel_block_sizes == (MultipleOf(16),)
    assert get_contract("FLASH_ATTN", engine="vllm", version="0.28.0", head_size=256).kernel_block_sizes == (
        MultipleOf(16),
    )


def test_flashinfers_heads_of_512_need_blackwell_until_its_kernels_came():
    for version, hardware, heads in (
        ("0.21.0", "10.0", (64, 128, 256)),
        ("0.26.0", "10.0", (64, 128, 256, 512)),
        ("0.26.0", "9.0", (64, 128, 256)),
        ("0.27.0", "9.0", (64, 128, 256, 512)),
    ):
        assert get_contract("FLASHINFER", engine="vllm", version=version, hardware=hardware).head_sizes == heads


# FlashInfer issue 4347: the kernels of 0.6.12 to 0.6.17 answer wrongly with pages above 128 tokens.
@pytest.mark.parametrize(
    ("version", "wrong"), [("0.23.0", False), ("0.24.0", True), ("0.28.0", True), ("0.29.0", False)]
)
def test_pages_known_to_give_wrong_answers_are_refused(version, wrong):
    contract = get_contract("FLASHINFER", engine="vllm", version=version, hardware="10.0")
    kernel = resolve_engine(f"vllm=={version}").requires["flashinfer"]
    assert contract.answers_wrongly(256) == wrong == ("0.6.12" <= kernel < "0.6.18" and version != "0.23.0")
    assert not contract.answers_wrongly(128)
    if wrong:
        with pytest.raises(GeometryError, match=r"answers wrongly with blocks of 512 tokens.*issue 4347"):
            plan(max_model_len=9416, block_size=512, contracts=[contract])
    assert not get_contract("FLASHINFER", engine="vllm", version=version, hardware="9.0").answers_wrongly(256)


def test_pages_of_the_entry_point_itself():
    name = "flashinfer:trtllm_batch_decode_with_kv_cache.trtllm-gen"
    wrong = [version for version in known_versions("flashinfer") if get_contract(f"{name}@{version}").wrong_blocks]
    assert (wrong[0], wrong[-1]) == ("0.6.12", "0.6.17")


@pytest.mark.parametrize(
    ("name", "width", "accepted"),
    [
        ("trtllm_batch_decode_with_kv_cache.cake", 147, False),  # 4 · ceil(9300 / 256) = 148
        ("trtllm_batch_decode_with_kv_cache.cake", 148, True),
        ("BatchMLAPagedAttentionWrapper.auto", 145, False),  # ceil(9300 / 64) = 146
        ("BatchMLAPagedAttentionWrapper.auto", 147, True),
        ("BatchMLAPagedAttentionWrapper.xqa", 147, False),
        ("BatchMLAPagedAttentionWrapper.xqa", 148, True),
        ("BatchMLAPagedAttentionWrapper.xqa", 0, False),
    ],
)
def test_least_widths_of_flashinfers_other_entry_points(name, width, accepted):
    contract = get_contract(name, engine="flashinfer", version="0.7.2", hardware="12.0" if "xqa" in name else None)
    if accepted:
        contract.check_table((8, width), 64, max_seq_len=9300)
    else:
        with pytest.raises(ContractError):
            contract.check_table((8, width), 64, max_seq_len=9300)


# SGLang 0.5.23: page size asked for -> page size taken, by backend (post-processing of its arguments).
PAGES = {
    "flashmla": {1: 64, 16: 64, 64: 64, 128: 64},
    "trtllm_mla": {1: 64, 16: 64, 32: 32, 64: 64, 128: 64},
    "cutedsl_mla": {1: 64, 32: 32, 64: 64, 256: 64},
    "trtllm_mha": {1: 64, 8: 64, 16: 16, 32: 32, 64: 64, 128: 128, 256: 64},
    "hpc_ops": {1: 64, 32: 64, 64: 64},
    "fa4": {1: 128, 64: 128, 128: 128},
    "intel_xpu": {1: 128, 64: 64, 128: 128, 256: 128},
    "triton": {1: 1, 16: 16, 77: 77},
    "fa3": {1: 1, 16: 16},
}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_size_that_sglang_takes(name):
    contract = get_contract(f"sglang:{name}@0.5.23")
    assert {asked: contract.effective_block_size(asked) for asked in PAGES[name]} == PAGES[name]


@pytest.mark.parametrize(
    ("name", "page", "width"),
    [
        ("trtllm_mla", 32, 384),  # a multiple of 4096 tokens
        ("trtllm_mla", 64, 192),
        ("cutedsl_mla", 64, 192),
        ("trtllm_mha", 64, 148),
        ("flashmla", 64, 148),  # (9416 + 64) // 64
    ],
)
def test_the_rows_that_sglang_builds(name, page, width):
    geometry = plan(max_model_len=9416, block_size=page, contracts=[f"sglang:{name}"], engine="sglang==0.5.23")
    assert geometry.width == geometry.kernel_width == width
    geometry.check((1, width))


def test_a_graph_row_of_flashmla_is_one_block_wider_where_64_divides_the_context():
    contracts = [get_contract("sglang:flashmla")]
    widths = [
        plan(max_model_len=n, block_size=64, contracts=contracts, engine="sglang").width for n in (64, 65, 127, 128)
    ]
    assert widths == [(n + 64) // 64 for n in (64, 65, 127, 128)]


def test_every_row_names_its_source_and_its_date():
    rows = [
        record.contract for engine in known_engines() for own in catalogue(engine).records.values() for record in own
    ]
    assert len(rows) > 120
    assert all(row.source and row.date for row in rows)


def test_flashinfer_widens_its_blocks_for_grouped_queries_on_blackwell():
    wide = (16, 32, 64, 128, 256, 512, 1024)
    for version, hardware, grouped, sizes, wrong in (
        ("0.32.0", "10.0", True, wide, False),
        ("0.32.0", "10.0", False, wide[:3], False),
        ("0.32.0", "10.0", None, wide[:3], False),
        ("0.32.0", "9.0", True, wide[:3], False),
        ("0.26.0", "10.3", True, wide, True),
        ("0.26.0", "10.3", False, wide[:3], False),
        ("0.26.0", "10.3", None, wide[:3], True),  # nobody said that it is not grouped
        ("0.26.0", "9.0", True, wide[:3], False),
        ("0.23.0", "10.0", True, wide[:3], False),
    ):
        contract = get_contract("FLASHINFER", engine="vllm", version=version, hardware=hardware, grouped=grouped)
        assert (contract.kernel_block_sizes, contract.answers_wrongly(256)) == (sizes, wrong), (
            version,
            hardware,
            grouped,
        )


@pytest.mark.parametrize("engine", known_engines())
def test_entries_read_one_by_one_are_those_of_the_whole_file(engine: str) -> None:
    file = Path(blocktable.contracts.__file__).with_name(f"{engine}.toml")
    text = file.read_text(encoding="utf-8")
    whole, packaged = read_catalogue(text, file.name), read_packaged(text, file.name)
    assert list(packaged.records) == list(whole.records)
    assert dict(packaged.records) == dict(whole.records)
    assert packaged == replace(whole, records=packaged.records)


def test_a_wrong_entry_is_named_by_its_line_in_the_whole_file() -> None:
    right = '[[backend]]\nname = "RIGHT"\n'
    text = f'engine = "acme"\n\n{right}\n[[backend]]\nname = "WRONG"\nmin_width = -1\n\n[backend.refusals]\ndtype = "X: no"\n'
    packaged = read_packaged(text, "acme.toml")
    assert packaged.records["RIGHT"][0].contract.name == "RIGHT"
    with pytest.raises(CatalogueError, match=r"acme\.toml:8: \[\[backend\]\] 2: min_width"):
        packaged.records["WRONG"]
