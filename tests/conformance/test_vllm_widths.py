"""vLLM's own width and block size arithmetic against `Release.width`, `plan` and the catalogue."""

from random import Random

import pytest

from blocktable import Contract, ContractError, GeometryError, get_contract, plan
from blocktable.contracts import resolve_engine

pytestmark = pytest.mark.conformance

# The backends of the catalogue whose classes import without a GPU.
IMPORTABLE = (
    "FLASHINFER_MLA",
    "FLASHMLA",
    "TRITON_MLA",
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "CPU_ATTN",
    "CPU_MLA",
    "B12X",
)


@pytest.fixture
def backends(real):
    registry = real("vllm.v1.attention.backends.registry").AttentionBackendEnum
    paths = {name: registry[name].get_path().rpartition(".") for name in IMPORTABLE}
    return {name: getattr(real(module), cls) for name, (module, _, cls) in paths.items()}


def test_the_width_of_the_installed_release(real, vllm_version):
    helper = real("vllm.v1.worker.block_table").get_block_table_width
    release, draw = resolve_engine(f"vllm=={vllm_version}"), Random(1)  # noqa: S311 - test data
    for block_size in range(1, 1025):
        for max_model_len in (1, block_size, block_size + 1, 9416, *(draw.randrange(1, 1 << 20) for _ in range(4))):
            for cp_size in (1, 2, 8):
                native = -(-max_model_len // (block_size * cp_size))
                ours = release.width(max_model_len=max_model_len, block_size=block_size, cp_size=cp_size)
                assert ours == helper(native, block_size), (block_size, max_model_len, cp_size)


def test_plan_gives_what_the_tables_of_the_release_allocate(real, vllm_version):
    torch, tables = real("torch"), real("vllm.v1.worker.block_table")
    for max_model_len, block_size in ((9416, 32), (9416, 48), (9416, 544), (1000, 16), (129, 128)):
        native = -(-max_model_len // block_size)
        stock = tables.MultiGroupBlockTable(
            max_num_reqs=2,
            max_num_batched_tokens=8,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=[block_size],
            max_num_blocks=[native],
        )
        planned = plan(max_model_len=max_model_len, block_size=block_size, engine=f"vllm=={vllm_version}")
        assert stock[0].get_numpy_array().shape == (2, planned.width)


def test_the_kernel_block_of_one_backend_and_of_pairs(real, backends):
    """vLLM's choice for a group of layers, at every manager block: the same size, or refused by both."""
    select = real("vllm.v1.worker.utils").select_common_block_size
    contracts = {name: Contract.from_backend(backend) for name, backend in backends.items()}
    groups = [(name,) for name in IMPORTABLE]
    groups += [(one, two) for one in IMPORTABLE for two in IMPORTABLE if one < two]
    for group in groups:
        step = 1 if len(group) == 1 else 16
        for block_size in range(step, 1025, step):
            try:
                theirs = select(block_size, [backends[name] for name in group])
            except ValueError:
                theirs = None
            try:
                planned = plan(max_model_len=4096, block_size=block_size, contracts=[contracts[name] for name in group])
            except GeometryError:
                planned = None
            assert (planned and planned.kernel_block_size) == theirs, (group, block_size)


@pytest.mark.parametrize("name", IMPORTABLE)
def test_the_catalogue_says_what_the_class_says(backends, vllm_version, name):
    backend, contract = backends[name], get_contract(f"vllm:{name}@{vllm_version}")
    read = Contract.from_backend(backend)
    assert set(contract.kernel_block_sizes) == set(read.kernel_block_sizes)
    assert read.name == name
    for block_size in (None, *range(1, 1025)):
        if block_size and contract.manager_block_sizes:  # the selector's test, where a backend narrows it
            assert contract.accepts_manager(block_size) == backend.supports_block_size(block_size), block_size


@pytest.mark.parametrize("name", IMPORTABLE)
def test_the_block_size_when_none_is_asked_for(real, backends, vllm_version, name):
    """A CPU worker takes 128, or what its MLA kernel is compiled for; elsewhere the class prefers one near the default."""
    default = real("vllm.config.cache").CacheConfig.DEFAULT_BLOCK_SIZE
    assert resolve_engine(f"vllm=={vllm_version}").default_block_size == default
    expected = 128 if name == "CPU_ATTN" else backends[name].get_preferred_block_size(default)
    assert get_contract(f"vllm:{name}@{vllm_version}").default_block_size == expected


@pytest.mark.parametrize("name", IMPORTABLE)
def test_context_parallelism_needs_what_the_class_returns(backends, vllm_version, name):
    returns_lse = bool(backends[name].get_impl_cls().can_return_lse_for_decode)
    assert get_contract(f"vllm:{name}@{vllm_version}").context_parallel is returns_lse


@pytest.mark.parametrize("name", IMPORTABLE)
def test_the_backends_of_the_release(real, vllm_version, name):
    registry = real("vllm.v1.attention.backends.registry").AttentionBackendEnum
    release = resolve_engine(f"vllm=={vllm_version}")
    assert name in release.backends
    assert set(release.backends) <= set(registry.__members__)


# Which share of max_model_len 1 .. 20000 a release's width fails FlashInfer's aligned check, by manager block, in
# kernel blocks of FLASHINFER_MLA. The figures were measured on the engines' own expressions.
SHARES = {
    "0.20.2": "75.0 50.1 75.0 0.0 75.2 50.1 0.0 50.4 0.0 0.0 75.5 0.0 78.9",
    "0.23.0": "0.0 0.0 75.0 0.0 75.2 50.1 0.0 50.4 0.0 0.0 75.5 0.0 78.9",
    "0.32.0": "0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0",
}
MANAGER_BLOCKS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 544, 640, 1056)


@pytest.mark.parametrize("version", SHARES)
def test_the_share_of_lengths_that_fail(version):
    release, contract = resolve_engine(f"vllm=={version}"), get_contract(f"vllm:FLASHINFER_MLA@{version}")
    shares = []
    for block_size in MANAGER_BLOCKS:
        kernel = plan(max_model_len=1, block_size=block_size, contracts=[contract]).kernel_block_size
        refused = {}
        failing = 0
        for max_model_len in range(1, 20001):
            width = release.width(max_model_len=max_model_len, block_size=block_size) * (block_size // kernel)
            if width not in refused:
                refused[width] = _is_refused(contract, width, kernel)
            failing += refused[width]
        shares.append(f"{failing / 200:.1f}")
    assert " ".join(shares) == SHARES[version]


def _is_refused(contract, width, kernel):
    try:
        contract.check_table((1, width), kernel)
    except ContractError:
        return True
    return False


# Manager blocks per row at max_model_len 9416, by block size: before 0.21, 0.21 to 0.26, and since 0.27.
WIDTHS = {
    24: (393, 395, 400),
    32: (295, 296, 296),
    40: (236, 237, 240),
    48: (197, 198, 200),
    64: (148, 148, 148),
    80: (118, 118, 120),
    96: (99, 99, 100),
    112: (85, 85, 88),
    144: (66, 66, 72),
    192: (50, 50, 50),
    640: (15, 15, 15),
}


@pytest.mark.parametrize("block_size", WIDTHS)
def test_the_widths_of_three_releases(block_size):
    widths = [plan(max_model_len=9416, block_size=block_size, engine=f"vllm=={one}").width for one in SHARES]
    assert tuple(widths) == WIDTHS[block_size]
