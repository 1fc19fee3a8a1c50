"""Judge a vLLM launch twice before any weight is read, as `blocktable check` judges a launch line.

    configured    in the user's own process, once the configuration is complete and before any process starts
    built         in the worker, once the model's layers exist: their real backends, caches and groups

A refusal stops the launch with one message. Where the catalogue is unsure (a rule that was inferred or carried over from
another release, a release newer than the data) the message is only logged. A defect of the preflight itself never stops
a launch: it is logged, and vLLM goes on.
"""

import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from blocktable._ints import ceil_div
from blocktable.errors import BlockTableError, ContractError, UnknownName
from blocktable.integrations import _patches
from blocktable.integrations.vllm import PluginError, engine_version, logger

__all__ = ["PreflightError", "describe", "install", "judge_built", "judge_configured", "read_launch"]


class PreflightError(PluginError):
    """The launch would be refused for its block tables; ``values`` has the reason, the engine's error and the ways out."""

    def __str__(self) -> str:
        return self.message


def install() -> None:
    """Wrap the end of vLLM's configuration and the making of its model."""
    _patches.wrap(import_module("vllm.config.vllm").VllmConfig, "__post_init__", _configured)
    _patches.wrap(import_module("vllm.model_executor.model_loader.base_loader"), "initialize_model", _built)


def _configured(original: Callable[..., None], config: Any) -> None:
    original(config)
    _guarded(judge_configured, config)


def _built(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    config = kwargs.get("vllm_config", args[0] if args else None)
    _guarded(judge_built, config)
    return model


def _guarded(judge: Callable[[Any], None], config: Any) -> None:
    try:
        judge(config)
    except PluginError:
        raise
    except Exception as error:
        if os.environ.get("BLOCKTABLE_VLLM_STRICT") == "1":
            raise PluginError(
                f"blocktable preflight failed itself: {error!r}", values={"error": repr(error)}
            ) from error
        logger.warning("blocktable preflight: not judged, %r", error)


def judge_configured(config: Any, platform: Any = None, version: str | None = None) -> None:
    """Judge a configuration; raise `PreflightError` where vLLM would refuse it later. Cost: some ten milliseconds.

    ``platform`` and ``version`` stand in for vLLM's current platform and release.
    """
    from blocktable.preflight import judge  # noqa: PLC0415 - the catalogue is read when a launch is judged

    launch = read_launch(config, platform, version)
    if launch is None:
        return
    answer = judge(launch)
    if answer.verdict == "refused":
        sure = not launch.release.extrapolated and _known(launch)
        _refuse("configured", answer.reason, answer.error, answer.ways_out, sure=sure)
    logger.info("blocktable preflight: %s (%s)", answer.verdict, answer.reason)


def _known(launch: Any) -> bool:
    from blocktable.preflight.completion import complete  # noqa: PLC0415

    try:
        return complete(launch)[0].contract.evidence not in ("inferred", "carried")
    except BlockTableError:
        return True  # no contract was needed to refuse


def read_launch(config: Any, platform: Any = None, version: str | None = None) -> Any:
    """Return the launch that a configuration describes, or None where it has no model to serve."""
    from blocktable.contracts import resolve_engine  # noqa: PLC0415
    from blocktable.preflight import Launch  # noqa: PLC0415

    model_config, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if model_config is None or getattr(model_config, "is_attention_free", False):
        return None
    release = resolve_engine(f"vllm=={version or engine_version()}")
    hardware = _hardware(platform or import_module("vllm.platforms").current_platform)
    attention, drafts = config.attention_config, getattr(config, "speculative_config", None)
    ranks = parallel.decode_context_parallel_size
    if release.prefill_ranks_divide:
        ranks *= getattr(parallel, "prefill_context_parallel_size", 1)
    # On a CPU the platform has settled the block size by now; elsewhere the backend still may, where nobody asked.
    settled = cache.user_specified_block_size or hardware == "cpu"
    per_kind = bool(getattr(attention, "backend_per_kind", None))
    backend = None if attention.backend is None or per_kind else attention.backend.name
    return Launch(
        release=release,
        backend=backend,
        max_model_len=model_config.max_model_len,
        block_size=cache.block_size if settled else None,
        cp_size=ranks,
        cp_interleave=parallel.cp_kv_cache_interleave_size,
        lookahead=getattr(drafts, "num_speculative_tokens", None) or 0,
        hardware=hardware,
        model=_model(model_config),
        tensor_parallel=parallel.tensor_parallel_size,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        num_blocks=cache.num_gpu_blocks_override,
        prefix_match_unit=getattr(cache, "prefix_match_unit", None),
    )


def _hardware(platform: Any) -> str | None:
    for name in ("cpu", "rocm", "xpu"):
        if getattr(platform, f"is_{name}")():
            return name
    capability = platform.get_device_capability() if platform.is_cuda() else None
    return None if capability is None else f"{capability.major}.{capability.minor}"


def _model(config: Any) -> Any:
    """Return what the model's configuration says about attention, as vLLM itself reads it."""
    from blocktable.preflight import Model  # noqa: PLC0415

    text = config.hf_text_config
    return Model(
        source=str(config.model),
        kind="mla" if config.use_mla else "gqa",
        head_size=config.get_head_size(),
        heads=text.num_attention_heads,
        kv_heads=config.get_total_num_kv_heads(),
        qk_nope_head_size=getattr(text, "qk_nope_head_dim", None) if config.use_mla else None,
        sparse=bool(config.use_mla and getattr(text, "index_topk", None)),
        state=bool(config.is_hybrid),
        max_model_len=config.max_model_len,
    )


def judge_built(config: Any) -> None:
    """Judge the groups that the model's layers form, each by its real backends and the width that its rows get.

    Raises `PreflightError` where a backend would refuse its table. Cost: some ten milliseconds.
    """
    layers, groups = _groups(config)
    tensors = _tensors(config, layers, groups) if groups else []
    for group in groups:
        _judge_group(config, group, _parts(layers, group), tensors)


def _groups(config: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the model's layers by name, and the groups that their caches form."""
    base = import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
    layers = import_module("vllm.config.vllm").get_layers_from_vllm_config(config, base)
    specs = {}
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is None and (spec := layer.get_kv_cache_spec(config)):
            specs[name] = spec
    return layers, import_module("vllm.v1.core.kv_cache_utils").get_kv_cache_groups(config, specs) if specs else []


def _tensors(config: Any, layers: Mapping[str, Any], groups: list[Any]) -> list[Any]:
    """Return where the caches would lie in memory, in the layout that the engine core is going to choose."""
    layouts = import_module("vllm.v1.attention.backends.utils")
    parts = [part for group in groups for part in _parts(layers, group)]
    names = [one.name for one in layouts.get_supported_kv_cache_layouts({part.backend for part in parts})]
    config, config.cache_config = copy(config), copy(config.cache_config)
    config.cache_config.num_gpu_blocks_override = None
    layouts.resolve_kv_cache_layout(config, [names], [part.kv_cache_spec for part in parts])
    made = import_module("vllm.v1.core.kv_cache_utils").get_kv_cache_config_from_groups(config, groups, 1 << 50)
    return list(made.kv_cache_tensors)


def _parts(layers: Mapping[str, Any], group: Any) -> list[Any]:
    """Return backend and cache of each part of a group, as vLLM's runner divides it."""
    if not group.kv_cache_spec.has_layer_views:  # laid out by their model, without a backend
        return []
    found = {}
    for name in group.layer_names:
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        backend = layers[name].get_attn_backend()
        found[str(backend.get_name()), spec] = SimpleNamespace(backend=backend, kv_cache_spec=spec)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]


def _judge_group(config: Any, group: Any, parts: list[Any], tensors: list[Any]) -> None:
    from blocktable.contracts import Contract, get_contract  # noqa: PLC0415

    spec, interface = group.kv_cache_spec, import_module("vllm.v1.kv_cache_interface")
    if not parts or not isinstance(parts[0].kv_cache_spec, interface.AttentionSpec):
        return  # no backend reads its table
    if isinstance(parts[0].kv_cache_spec, interface.EncoderOnlyAttentionSpec):
        return  # it has none
    length, block, version = config.model_config.max_model_len, spec.block_size, engine_version()
    backends = list({str(part.backend.get_name()): part.backend for part in parts}.values())
    names = [str(backend.get_name()) for backend in backends]
    mine = [one for one in tensors if not set(one.layers).isdisjoint(group.layer_names)]
    if any(one.block_stride > one.layer_stride for one in mine):
        logger.info("blocktable preflight: %s not judged, its blocks lie packed with other layers'", ", ".join(names))
        return
    alone = SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=mine)
    try:
        (kernel,) = import_module("vllm.v1.worker.utils").prepare_kernel_block_sizes(alone, [parts])
    except ValueError as error:
        reason = f"a group of layers has blocks of {block} tokens, and {', '.join(names)} cannot split them"
        _refuse("built", reason, f"ValueError: {error}", _ways(config, names[0], block), sure=True)
        return
    width = import_module("vllm.v1.worker.block_table").get_block_table_width(
        spec.max_num_blocks_per_req(config, length),
        block,
        token_alignment=getattr(spec, "block_table_token_alignment", 128),
    )
    columns = width * (block // kernel)
    ranks = config.parallel_config.decode_context_parallel_size
    for name, backend in zip(names, backends, strict=True):
        try:
            contract = get_contract(name, engine="vllm", version=version)
        except UnknownName:
            contract = Contract.from_backend(backend)  # a backend of the user's own: its sizes are all that it states
        try:
            contract.check_table((1, columns), kernel, max_seq_len=ceil_div(length, ranks))
        except ContractError as error:
            raised = error.values.get("raised")
            text = f"{raised}: {error.message}" if raised else error.message
            reason = f"rows of {columns} blocks of {kernel} tokens, which {name} does not take"
            sure = contract.evidence not in ("inferred", "carried")
            _refuse("built", reason, text, _ways(config, name, block), sure=sure)
    logger.info("blocktable preflight: %s takes rows of %d blocks of %d tokens", ", ".join(names), columns, kernel)


def _ways(config: Any, backend: str, block: int) -> tuple[str, ...]:
    """Return ways out for a group's backend, where the launch as a whole tells any."""
    from blocktable.preflight import judge  # noqa: PLC0415

    try:
        return judge(replace(read_launch(config), backend=backend, block_size=block)).ways_out
    except BlockTableError:
        return ()


def _refuse(stage: str, reason: str, error: str, ways: tuple[str, ...], *, sure: bool) -> None:
    text = describe(reason, error, ways)
    if not sure:
        logger.warning("%s\n  the catalogue is not sure of this, so vLLM goes on", text)
        return
    raise PreflightError(
        text,
        values={"stage": stage, "reason": reason, "error": error, "ways_out": ways},
        remedy=" · ".join(ways),
    )


def describe(reason: str, error: str, ways: tuple[str, ...]) -> str:
    """Return a refusal as users read it: what does not fit, what vLLM would stop with, and what was judged to work."""
    lines = [f"blocktable preflight: this launch would be refused: {reason}"]
    if error:
        lines.append(f"  vLLM would stop with: {error}")
    lines.append(
        f"  ways out, each checked: {' · '.join(ways)}" if ways else "  no way out was found by changing one setting"
    )
    lines.append("  to try it all the same: BLOCKTABLE_VLLM=off")
    return "\n".join(lines)
