"""Hold the catalogue against the SGLang installed here: its choices and page sizes, read from its files without importing it."""

import logging
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from blocktable.contracts import Release, get_contract, resolve_engine
from blocktable.contracts.engines import catalogue
from blocktable.errors import UnknownName
from blocktable.preflight.findings import Finding
from blocktable.preflight.lifting import lift, literal

__all__ = ["ask_sglang"]


def ask_sglang(version: str) -> Iterator[Finding]:
    """Yield what can be compared without a GPU: the names that --attention-backend takes, the pages really taken."""
    release = resolve_engine(f"sglang=={version}")
    if release.extrapolated:
        yield Finding(str(release), "release", f"the catalogue ends at {release.data_version}")
    folder = Path(str(metadata.distribution("sglang").locate_file("sglang/srt/arg_groups")))
    try:
        yield from _names(release, set(literal(folder / "choices.py", "ATTENTION_BACKEND_CHOICES")))
    except (OSError, LookupError, SyntaxError, ValueError) as error:
        yield Finding(str(release), "choices of --attention-backend", skipped=str(error))
    try:
        scope = {"logger": logging.getLogger(__name__)}
        resolve = lift(folder / "overrides.py", "_mla_backend_page_constraints", scope)
    except (OSError, LookupError, SyntaxError) as error:
        yield Finding(str(release), "page sizes", skipped=str(error))
        return
    logging.getLogger(__name__).setLevel(logging.ERROR)  # it warns of each page size that it changes
    for name in ("flashmla", "trtllm_mla", "cutedsl_mla", "trtllm_mha", "hpc_ops"):
        yield _pages(release, name, resolve)


def _names(release: Release, theirs: set[str]) -> Iterator[Finding]:
    ours = set(release.backends) | set(catalogue("sglang").aliases)
    for name in sorted(theirs - ours):
        yield Finding(str(release), name, "the engine has it, the catalogue does not")
    for name in sorted(ours - theirs):
        yield Finding(str(release), name, "the catalogue has it, the engine does not")
    yield Finding(str(release), "choices of --attention-backend")


def _pages(release: Release, name: str, resolve: object) -> Finding:
    try:
        contract = get_contract(name, engine="sglang", version=release.version)
    except UnknownName as error:
        return Finding(str(release), name, skipped=error.message)
    differ = []
    for page in range(1, 513):
        view = SimpleNamespace(
            page_size=page,
            attention_backend=name,
            decode_attention_backend=None,
            prefill_attention_backend=None,
            speculative_draft_attention_backend=None,
        )
        theirs = resolve(view).get("page_size", page)  # type: ignore[operator]
        if theirs != (ours := contract.effective_block_size(page)):
            differ.append(f"page size {page}: the engine takes {theirs}, the catalogue says {ours}")
    more = f" (and {len(differ) - 1} more)" if len(differ) > 1 else ""
    return Finding(str(release), f"page sizes of {name}", differ[0] + more if differ else "")
