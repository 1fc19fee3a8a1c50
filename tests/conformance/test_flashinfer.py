"""FlashInfer's own validators against the contracts: every block size and width, and the public call where it decides."""

import json
import os
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocktable import AnyWidth, Contract, get_contract
from blocktable.testing import check_contract

pytestmark = pytest.mark.conformance


class Shape(tuple):
    """A tensor as far as a shape check looks at one."""

    __slots__ = ()

    @property
    def shape(self):
        return self

    @property
    def ndim(self):
        return len(self)

    def size(self, dim):
        return self[dim]

    def unsqueeze(self, dim):
        return Shape((*self[:dim], 1, *self[dim:]))


def mla_validator(real, *, aligned):
    """Return FlashInfer's shared shape check for a decode step of DeepSeek's dimensions."""
    core = real("flashinfer.mla._core")
    query = Shape((1, 1, 128, 576))

    def validator(shape, block_size):
        core._check_trtllm_gen_mla_shape(
            query,
            Shape((1, block_size, 576)),
            512,
            64,
            0,
            Shape(shape),
            block_size,
            require_aligned_block_table=aligned,
        )

    return validator


@pytest.fixture
def cutlass_validator(real):
    backend = real("flashinfer.mla._batch_mla._backends.cutlass_backend")
    query, lengths = Shape((1, 128, 576)), Shape((1,))

    def validator(shape, block_size):
        backend._check_cutlass_shape(query, Shape((7, block_size, 576)), lengths, Shape(shape))

    return validator


class Launched(Exception):  # noqa: N818 - no error: the call got as far as a kernel
    """The public call accepted the table and went on to its kernel."""


@pytest.fixture
def call(real, monkeypatch):
    """Return the public decode call on a pretended GPU, up to where it would launch a kernel; ValueError is a refusal."""
    torch, core, jit = real("torch"), real("flashinfer.mla._core"), real("flashinfer.jit.xqa")

    def launch(*_args, **_kwargs):
        raise Launched

    def launch_xqa(_q, _k, _v, _tables, _lengths, _out, _workspace, _semaphores, page_size, **_kwargs):
        # XQA looks at the page size when it is compiled, before it asks which compiler there is.
        jit.gen_xqa_module_mla(torch.bfloat16, torch.bfloat16, page_size, 576, 128)

    monkeypatch.setattr(core, "device_support_pdl", lambda _device: False)
    monkeypatch.setattr(core, "get_device_sm_count", lambda _device: 148)
    monkeypatch.setattr(core, "is_sm12x_supported", lambda _device: True)
    monkeypatch.setattr(core, "TrtllmGenMlaDecodeRunner", launch)
    monkeypatch.setattr(core, "xqa_mla", launch_xqa)
    monkeypatch.setattr(jit, "CompilationContext", launch)
    query, lengths = torch.zeros(1, 1, 128, 576, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    caches = cache(lambda block_size: torch.zeros(1, dtype=torch.bfloat16).expand(1, block_size, 576))
    tables = cache(lambda shape: torch.zeros(shape, dtype=torch.int32))

    def validator_of(backend, capability):
        monkeypatch.setattr(core, "get_compute_capability", lambda _device: capability)

        def validator(shape, block_size):
            try:
                core.trtllm_batch_decode_with_kv_cache_mla(
                    query=query,
                    kv_cache=caches(block_size),
                    workspace_buffer=workspace,
                    qk_nope_head_dim=128,
                    kv_lora_rank=512,
                    qk_rope_head_dim=64,
                    block_tables=tables(shape),
                    seq_lens=lengths,
                    max_seq_len=shape[1] * block_size,
                    backend=backend,
                )
            except Launched:
                return

        return validator

    return validator_of


def test_the_float_modulus_is_flashinfers_at_every_size_and_width(real, flashinfer_version):
    rule = get_contract(f"flashinfer:auto@{flashinfer_version}").width_rule
    check_contract(Contract("any size", width_rule=rule), mla_validator(real, aligned=True))


def test_unaligned_calls_take_every_width(real, flashinfer_version):
    assert get_contract(f"flashinfer:trtllm-gen@{flashinfer_version}").width_rule == AnyWidth()
    check_contract(Contract("any size"), mla_validator(real, aligned=False), range(1, 1025, 7))


def test_cutlass_at_every_size_and_width(cutlass_validator, flashinfer_version):
    check_contract(get_contract(f"flashinfer:cutlass@{flashinfer_version}"), cutlass_validator)


PUBLIC = [("trtllm-gen", (10, 0)), ("auto", (10, 0)), ("xqa", (12, 0)), ("auto", (12, 0))]


@pytest.mark.parametrize(("backend", "capability"), PUBLIC)
def test_the_public_call(call, flashinfer_version, backend, capability):
    hardware = ".".join(map(str, capability))
    contract = get_contract(f"flashinfer:{backend}@{flashinfer_version}", hardware=hardware)
    check_contract(contract, call(backend, capability), range(1, 1025), (1, 2, 3, 4, 6, 8, 32, 128, 255, 256))


@pytest.mark.parametrize(("backend", "capability"), PUBLIC)
def test_a_refusal_has_the_kernels_own_words(call, flashinfer_version, backend, capability):
    contract = get_contract(f"flashinfer:{backend}@{flashinfer_version}", hardware=".".join(map(str, capability)))
    validator, refused = call(backend, capability), 0
    for block_size in (8, 16, 24, 32, 64, 96, 128, 256):
        for width in (1, 3, 295, 296):
            ours = refusal(contract.check_table, (1, width), block_size)
            theirs = refusal(validator, (1, width), block_size)
            assert (ours is None) == (theirs is None)
            if ours:
                assert str(theirs).startswith(str(ours).partition("…")[0])
                assert ours.values["raised"] == type(theirs).__name__
                refused += 1
    assert refused >= 8


def refusal(check, shape, block_size):
    try:
        check(shape, block_size)
    except ValueError as error:
        return error
    return None


def test_the_bound_of_b12x_is_its_own(real, vllm_version):
    """FlashInfer carries B12X's check of a prepared decode; vLLM prepares the width that the bound is made of."""
    torch, workspace = real("torch"), real("flashinfer.experimental.b12x.attention.paged.workspace")
    planned = real("vllm.v1.attention.backends.b12x")._max_page_table_width
    contract = get_contract(f"vllm:B12X@{vllm_version}")
    owner = next(one for one in vars(workspace).values() if hasattr(one, "_validate_decode_graph_runtime_contract"))
    check = owner._validate_decode_graph_runtime_contract
    lengths, starts = torch.ones(1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)

    for max_model_len in (1, 64, 65, 4096, 8000, 8192, 9408):
        for block_size in (64, 128):
            widest = planned(max_model_len, block_size, max_num_batched_tokens=2048, is_hybrid=False)
            plan = SimpleNamespace(page_table_shape=(1, widest), total_q=1)
            prepared = SimpleNamespace(_plan=plan, device=torch.device("cpu"))

            def validator(shape, _block_size, prepared=prepared):
                table = torch.zeros(shape, dtype=torch.int32)
                check(prepared, page_table=table, cache_seqlens=lengths, cu_seqlens_q=starts, active_total_q=1)

            check_contract(contract, validator, (block_size,), range(1, widest + 4), max_seq_len=max_model_len)
            judge = partial(contract.check_table, max_seq_len=max_model_len)
            assert str(refusal(judge, (1, widest + 1), block_size)) == str(
                refusal(validator, (1, widest + 1), block_size)
            )


SWEEP = {
    "_check_cutlass_shape": "cutlass",
    "trtllm_batch_decode_with_kv_cache_mla backend=trtllm-gen fixed-Q SM100": "trtllm-gen",
    "trtllm_batch_decode_with_kv_cache_mla backend=auto fixed-Q SM100": "auto",
    "trtllm_batch_decode_with_kv_cache_mla backend=auto fixed-Q SM120": "xqa",
    "trtllm_batch_decode_with_kv_cache_mla backend=xqa fixed-Q SM120": "xqa",
}
XQA_JIT_SIZES = (16, 32, 64, 128)  # the sweep stopped before compilation, which refuses other sizes


def test_the_recorded_sweep():
    """What FlashInfer 0.7.2.post1 answered when it was swept, for machines without it."""
    folder = os.environ.get("BLOCKTABLE_DATA")
    path = Path(folder) / "flashinfer-width-sweep.json" if folder else None
    if path is None or not path.is_file():
        pytest.skip("flashinfer-width-sweep.json is not here: set BLOCKTABLE_DATA to the folder that holds it")
    compared = 0
    for entry in json.loads(path.read_text()):
        block_size, passing = entry["block_size"], set(entry["passing_widths"])
        name = entry["validator"]
        if name.startswith("_check_trtllm_gen_mla_shape"):
            rule = get_contract("flashinfer:auto@0.7.2.post1").width_rule
            contract = Contract("any size", width_rule=rule) if name.endswith("=True)") else Contract("any size")
        elif name in SWEEP and (SWEEP[name] != "xqa" or block_size in XQA_JIT_SIZES):
            contract = get_contract(f"flashinfer:{SWEEP[name]}@0.7.2.post1")
        else:
            continue

        def recorded(shape, _block_size, passing=passing):
            if shape[1] not in passing:
                raise ValueError("refused in the sweep")

        check_contract(contract, recorded, (block_size,), range(1, 65))
        compared += 1
    assert compared >= 90
