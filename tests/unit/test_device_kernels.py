"""The Triton kernels compile for a GPU that is not here: PTX and machine code for compute capability 9.0, nothing run."""

import inspect
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels were not compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from blocktable.device import kernels  # noqa: E402

BATCH = ("lengths", "out_rows", "seq_lens", "tables", "num_blocks", "marks", "kv_indptr", "kv_indices", "last_page_len")
SLOTS = ("query_start_loc", "positions", "out")
WIDE = ("info", "positions", "out", "rows")
NUMBERS = ("total_rows", "groups", "rank", "given", "gathers", "capacity", "chunks", "num_positions", "size")


def compile_for_hopper(
    kernel: Any, absent: tuple[str, ...], one: tuple[str, ...], wide: tuple[str, ...], **flags: bool
) -> Any:
    """Compile a kernel with these arguments missing, these numbers 1 (which Triton treats as constants), these int64."""
    signature, constants = {}, dict(flags)
    for name in inspect.signature(kernel.fn).parameters:
        if name in flags or name in absent or name in one:
            signature[name] = "constexpr"
            constants.setdefault(name, None if name in absent else 1)  # type: ignore[arg-type]
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            signature[name] = "*i64" if name in wide else "*i32"
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("one", "wide"),
    [
        ((), WIDE),
        (("total_rows", "groups", "rank", "capacity", "chunks", "size"), (*WIDE, "lengths", "query_start_loc")),
    ],
    ids=["usual", "smallest"],
)
def test_gather_and_slots_compile(one: tuple[str, ...], wide: tuple[str, ...]) -> None:
    for gather, csr, slots in ((True, True, True), (True, False, False), (False, False, True)):
        absent = () if gather else BATCH
        if gather and not csr:
            absent = ("lengths", "kv_indptr", "kv_indices", "last_page_len")
        if not slots:
            absent = (*absent, *SLOTS)
        built = compile_for_hopper(kernels._step_kernel, absent, one, wide, GATHER=gather, CSR=csr, SLOTS=slots)
        assert len(built.asm["cubin"]) > 0


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("one", [(), ("total_rows",)])
def test_apply_compiles(one: tuple[str, ...]) -> None:
    assert "st.global" in compile_for_hopper(kernels._apply_kernel, (), one, WIDE).asm["ptx"]
