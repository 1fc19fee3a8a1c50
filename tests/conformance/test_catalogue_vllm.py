"""Every backend of the installed vLLM that imports here, against its row of the catalogue."""

import pytest

from blocktable import Contract, get_contract
from blocktable.contracts import list_contracts
from blocktable.contracts.engines import catalogue
from blocktable.contracts.hardware import runs_on
from blocktable.preflight.choice import _IN_32_BITS

pytestmark = pytest.mark.conformance

# Importing ROCm's platform where there is none ends the process, so those rows stay with what was read.
NAMES = tuple(contract.name for contract in list_contracts("vllm") if "rocm" not in contract.hardware)
# Classes that ask the platform for their sizes: a machine without a GPU gets another answer than the GPU of the row.
BY_PLATFORM = {"FLASHMLA_SPARSE_DSV41"}


@pytest.fixture
def backend(real, vllm_version, name):
    registry = real("vllm.v1.attention.backends.registry").AttentionBackendEnum
    module, _, cls = registry[name].get_path().rpartition(".")
    try:
        return getattr(real(module), cls)
    except (ImportError, AssertionError, AttributeError, RuntimeError) as error:
        pytest.skip(f"{name} does not import without its hardware: {error}")


@pytest.mark.parametrize("name", NAMES)
def test_sizes(backend, vllm_version, name):
    if name in BY_PLATFORM:
        pytest.skip(f"{name} asks the platform for its sizes")
    contract, read = get_contract(f"vllm:{name}@{vllm_version}"), Contract.from_backend(backend)
    assert set(contract.kernel_block_sizes) == set(read.kernel_block_sizes)
    for block_size in range(1, 1025):  # the selector's test: the manager block is a multiple of some size
        sizes = {getattr(size, "base", size) for size in contract.kernel_block_sizes}
        ours = contract.accepts_manager(block_size) and any(block_size % size == 0 for size in sizes)
        assert ours == backend.supports_block_size(block_size), block_size
    if contract.default_block_size and contract.hardware != ("cpu",):
        assert contract.default_block_size == backend.get_preferred_block_size(16)


@pytest.mark.parametrize("name", NAMES)
def test_head_sizes(backend, vllm_version, name):
    contract = get_contract(f"vllm:{name}@{vllm_version}")
    if contract.head_sizes:
        assert set(contract.head_sizes) == set(backend.get_supported_head_sizes())
    else:
        assert not backend.get_supported_head_sizes()


@pytest.mark.parametrize("name", NAMES)
def test_kv_cache_dtypes(backend, vllm_version, name):
    records = [one for one in catalogue("vllm").records[name] if one.versions.contains(vllm_version)]
    ours = {dtype for one in records for _, some in one.contract.kv_dtypes for dtype in some}
    if not ours:
        pytest.skip(f"{name} is not told which dtypes it takes")
    assert ours == set(backend.supported_kv_cache_dtypes)


@pytest.mark.parametrize("name", NAMES)
def test_compute_capabilities(real, backend, vllm_version, name):
    capability = real("vllm.platforms.interface").DeviceCapability
    contract = get_contract(f"vllm:{name}@{vllm_version}")
    if {"cpu", "rocm", "xpu"} & set(contract.hardware):
        pytest.skip(f"{name} is for {', '.join(contract.hardware)}")
    for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        patterns = {one for record in catalogue("vllm").records[name] for one in record.contract.hardware}
        ours = not patterns or any(
            runs_on(one, f"{major}.{minor}")
            for record in catalogue("vllm").records[name]
            if record.versions.contains(vllm_version)
            for one in record.contract.hardware
        )
        assert ours == backend.supports_compute_capability(capability(major, minor)), (major, minor)


@pytest.mark.parametrize("name", NAMES)
def test_attention_in_32_bits(real, backend, vllm_version, name):
    if "cpu" in get_contract(f"vllm:{name}@{vllm_version}").hardware:
        pytest.skip("a CPU selects nothing")
    assert (name in _IN_32_BITS) == backend.supports_dtype(real("torch").float32)


@pytest.mark.parametrize("name", NAMES)
def test_attention_sinks(backend, vllm_version, name, monkeypatch):
    ours = {
        on
        for one in catalogue("vllm").sinks
        if one.name == name and one.versions.contains(vllm_version)
        for on in one.hardware
    }
    if ours and "*" not in ours:
        pytest.skip(f"{name} asks the platform whether it takes sinks")
    assert bool(ours) == backend.supports_sink()


@pytest.mark.parametrize("name", NAMES)
def test_context_parallelism(backend, vllm_version, name):
    contract = get_contract(f"vllm:{name}@{vllm_version}")
    try:
        impl = backend.get_impl_cls()
    except NotImplementedError:
        assert contract.context_parallel is not True
        return
    if contract.context_parallel is not None:
        assert contract.context_parallel == impl.supports_dcp
        assert contract.cp_drafts_interleave == impl.supports_mtp_with_cp_non_trivial_interleave_size
