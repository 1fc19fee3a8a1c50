"""Hold the catalogue against the FlashInfer installed here: its shape checks, block size by block size and width by width."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from blocktable.contracts import Contract, Release, get_contract, resolve_engine
from blocktable.errors import BlockTableError, ContractError
from blocktable.preflight.findings import Finding

__all__ = ["ask_flashinfer"]

_BLOCKS = (*range(1, 257), 320, 384, 512, 640, 768, 1024)
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 31, 32, 64, 127, 128, 255, 256)


class _Shape(tuple[int, ...]):
    """A tensor as far as a shape check looks at one."""

    __slots__ = ()

    @property
    def shape(self) -> "_Shape":
        return self

    @property
    def ndim(self) -> int:
        return len(self)

    def size(self, dim: int) -> int:
        return self[dim]

    def unsqueeze(self, dim: int) -> "_Shape":
        return _Shape((*self[:dim], 1, *self[dim:]))


def ask_flashinfer(version: str) -> Iterator[Finding]:
    """Yield a finding for each of its validators."""
    release = resolve_engine(f"flashinfer=={version}")
    if release.extrapolated:
        yield Finding(str(release), "release", f"the catalogue ends at {release.data_version}")
    for name, subject, validator in (
        ("auto", "aligned MLA tables", _shared(aligned=True)),
        ("trtllm-gen", "MLA tables of an explicit trtllm-gen", _shared(aligned=False)),
        ("cutlass", "tables of cutlass MLA", _cutlass),
    ):
        yield _compare(release, name, subject, validator)


def _compare(release: Release, name: str, subject: str, validator: Callable[[int, int], None]) -> Finding:
    """Compare which widths pass; the sizes of blocks are another check's, except for cutlass."""
    try:
        contract = get_contract(name, engine="flashinfer", version=release.version)
        whole = contract if name == "cutlass" else Contract(name, width_rule=contract.width_rule)
        differ = [
            f"block size {block}, width {width}: the engine {'refuses' if ours else 'accepts'} what the catalogue does not"
            for block in _BLOCKS
            for width in _WIDTHS
            if (ours := _accepts(whole, block, width)) != _passes(validator, block, width)
        ]
    except BlockTableError as error:
        return Finding(str(release), subject, skipped=error.message)
    except Exception as error:  # noqa: BLE001 - another signature, another name, or a module that does not import here
        return Finding(str(release), subject, skipped=f"its validator is not one that this command knows: {error}")
    more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
    return Finding(str(release), subject, differ[0] + more if differ else "")


def _accepts(contract: Contract, block: int, width: int) -> bool:
    try:
        contract.check_table((1, width), block)
    except ContractError:
        return False
    return True


def _passes(validator: Callable[[int, int], None], block: int, width: int) -> bool:
    try:
        validator(block, width)
    except ValueError:
        return False
    return True


def _shared(*, aligned: bool) -> Callable[[int, int], None]:
    query = _Shape((1, 1, 128, 576))

    def validator(block: int, width: int) -> None:
        core: Any = importlib.import_module("flashinfer.mla._core")
        table = _Shape((1, width))
        core._check_trtllm_gen_mla_shape(  # noqa: SLF001 - its validators are private
            query, _Shape((1, block, 576)), 512, 64, 0, table, block, require_aligned_block_table=aligned
        )

    return validator


def _cutlass(block: int, width: int) -> None:
    backend: Any = importlib.import_module("flashinfer.mla._batch_mla._backends.cutlass_backend")
    tables = _Shape((7, block, 576)), _Shape((1,)), _Shape((1, width))
    backend._check_cutlass_shape(_Shape((1, 128, 576)), *tables)  # noqa: SLF001 - its validators are private
