"""`blocktable check`: whether a launch will be refused for its block tables, and what would mend it."""

import json
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from blocktable.cli import launch as lines
from blocktable.cli.flags import CACHE_DTYPES, parse_bytes, parse_count, parse_length
from blocktable.cli.output import Row, print_rows
from blocktable.contracts import Release, resolve_engine
from blocktable.contracts.hardware import capability
from blocktable.errors import ArgumentError
from blocktable.preflight import (
    Connector,
    Draft,
    Group,
    Judgement,
    Launch,
    Memory,
    Model,
    find_release,
    judge,
    read_model,
    worst,
)

__all__ = ["command", "options"]

_EXIT: Final[Mapping[str, int]] = {"accepted": 0, "refused": 1, "unknown": 3}
_LABEL: Final[Mapping[str, str]] = {"accepted": "accepted", "refused": "refused", "unknown": "not known"}
_COLOUR: Final[Mapping[str, str]] = {"accepted": "green", "refused": "red", "unknown": "yellow"}


def options(parser: ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Say whether a launch would be refused for its block tables, before any weight is loaded. Two sides meet: the "
        "width that the engine's release allocates per row, and what the attention kernel of that release accepts. A "
        "refusal comes with the error that the server would stop with, and with ways out, each of them judged too."
    )
    parser.epilog = "exit status: 0 accepted, 1 refused, 2 wrong usage or input, 3 not known, naming the missing fact"
    add = parser.add_argument
    add(
        "--engine",
        metavar="RELEASE",
        help="the release that allocates, such as vllm==0.19.1 or flashinfer==0.7.2; "
        "without it the vLLM installed here, else the newest in the catalogue",
    )
    add(
        "--with",
        dest="kernels",
        action="append",
        default=[],
        metavar="RELEASE",
        help="a kernel package in place of the one that the release pins, such as flashinfer==0.7.2",
    )
    add(
        "--backend",
        "--attention-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="an attention backend; may be repeated or a list with commas: each is judged",
    )
    add("--gpu", metavar="NAME", help="such as h100, b200, rtx-pro-6000, mi300x or cpu, or a compute capability")
    add(
        "--model",
        metavar="PATH",
        help="a folder with a config.json, or that file; with --gpu it tells which backend runs where none is named",
    )
    add("--max-model-len", "--context-length", metavar="TOKENS", help="the longest request; 9k is 9000, 9K is 9216")
    add("--block-size", "--page-size", metavar="TOKENS", help="without it, what the release takes by itself")
    add(
        "--cp-size",
        "--decode-context-parallel-size",
        "-dcp",
        metavar="RANKS",
        help="ranks over which a row is split; 1 without it",
    )
    add("--lookahead", metavar="TOKENS", help="speculative tokens ahead of a request; 0 without it")
    add("--tensor-parallel-size", "-tp", metavar="RANKS", help="ranks over which the heads are split; 1 without it")
    add(
        "--gpu-memory",
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        help="what one GPU has for the KV cache, weights and all else aside, such as 40GiB: how many blocks and requests fit",
    )
    add("--num-gpu-blocks-override", metavar="BLOCKS", help="the blocks of the pool, in place of what the memory gives")
    add("--kv-cache-dtype", metavar="DTYPE", help="such as fp8; the model's own without it")
    add("--json", dest="as_json", action="store_true", help="print one JSON object")
    add("--quiet", "-q", action="store_true", help="print nothing: the exit status is the answer")
    add(
        "launch",
        nargs=REMAINDER,
        metavar="-- vllm serve MODEL …",
        help="a launch line, as words or as one quoted string; the options before it win over what it says",
    )


def command(
    *,
    engine: str | None,
    kernels: Sequence[str],
    backend: Sequence[str],
    gpu: str | None,
    model: str | None,
    max_model_len: str | None,
    block_size: str | None,
    cp_size: str | None,
    lookahead: str | None,
    tensor_parallel_size: str | None,
    gpu_memory: str | None,
    num_gpu_blocks_override: str | None,
    kv_cache_dtype: str | None,
    as_json: bool,
    quiet: bool,
    launch: Sequence[str],
) -> int:
    """Judge every backend named, show the answers, and return the exit code of the one that decides."""
    words = launch[1:] if launch[:1] == ["--"] else launch
    line = lines.read_launch(words) if words else lines.Launch()
    length = line.max_model_len if max_model_len is None else parse_length(max_model_len)
    block = line.block_size if block_size is None else parse_count(block_size, "--block-size")
    drafts = line.speculative_tokens if lookahead is None else parse_count(lookahead, "--lookahead", least=0)
    ranks = None if cp_size is None else parse_count(cp_size, "--cp-size")
    split = line.tensor_parallel if tensor_parallel_size is None else parse_count(tensor_parallel_size, "-tp")
    memory = line.memory if gpu_memory is None else _gpu_memory(gpu_memory)
    override = num_gpu_blocks_override
    blocks = line.num_blocks if override is None else parse_count(override, "--num-gpu-blocks-override")
    dtype = _cache_dtype((kv_cache_dtype or line.kv_dtype).lower(), line.engine)
    versions = _kernel_versions(kernels)
    hardware = line.device if gpu is None else capability(gpu)
    (known, unread), drafted = _model(model, line), _draft(line)
    answers = []
    named: list[str | None] = [*_split(backend)]
    for name in named or [line.backend]:
        started = None if line.engine == "vllm" else line.engine
        release, assumed = find_release(engine or line.release or started, None if words else name)
        if line.release and not engine and "==" not in line.release:
            assumed = (f"{release}, the newest in the catalogue, since the image's tag names no release",)
        if words and release.engine != line.engine:
            title = {"vllm": "vLLM", "sglang": "SGLang"}[line.engine]
            raise ArgumentError(
                f"the launch line starts {title}, not {release.engine}", remedy=f"give --engine {line.engine}==VERSION"
            )
        answer = judge(
            Launch(
                release=release,
                backend=name,
                max_model_len=length,
                block_size=block,
                cp_size=ranks or _ranks(line, release),
                cp_interleave=line.interleave,
                lookahead=drafts,
                kernels=versions,
                hardware=hardware,
                model=known,
                unread=unread,
                tensor_parallel=split,
                max_num_seqs=line.max_num_seqs,
                num_blocks=blocks,
                prefix_match_unit=line.prefix_match_unit,
                memory=memory,
                kv_dtype=dtype,
                dtype=line.dtype,
                conv_dtype=line.conv_dtype,
                state_dtype=line.state_dtype,
                batched_tokens=line.batched_tokens,
                pipeline_parallel=line.pipeline_parallel,
                partition=_partition(line),
                async_scheduling=line.async_scheduling,
                prefix_caching=line.prefix_caching,
                chunked_prefill=line.chunked_prefill,
                one_group=line.one_group,
                unordered=_unordered(line, hardware),
                altered=_altered(line, hardware),
                draft=drafted,
                connector=_connector(line),
                shared_ranks=split if line.tensor_parallel_given and line.prefill_context_parallel == 1 else None,
            )
        )
        answer = replace(answer, assumed=(*assumed, *answer.assumed, *_wanted(line), *_ignored(line, answer)))
        answers.append(_without_backend(answer, line) if answer.backend is None else answer)
    if as_json:
        print(_as_json(answers))  # noqa: T201 - a command's output
    elif not quiet:
        print_rows([row for answer in answers for row in _rows(answer)])
    return _EXIT[worst(answers).verdict]


def _gpu_memory(text: str) -> int:
    """Read the size of a KV cache; a bare number counts bytes, which nobody means by 80."""
    size = parse_bytes(text, "--gpu-memory")
    if text.strip().isdigit() and size < 2**20:
        raise ArgumentError(
            f"--gpu-memory {text}: a bare number counts bytes",
            values={"--gpu-memory": text},
            remedy=f"write {text}GiB, or another unit",
        )
    return size


def _cache_dtype(dtype: str, engine: str) -> str:
    """Return the dtype of a KV cache if vLLM has one of that name; SGLang's names are its own."""
    if engine == "vllm" and dtype not in CACHE_DTYPES:
        raise ArgumentError(
            f"no KV cache dtype {dtype!r}",
            values={"--kv-cache-dtype": dtype},
            remedy=f"one of {', '.join(CACHE_DTYPES)}",
        )
    return dtype


def _split(names: Sequence[str]) -> list[str]:
    return [name.strip() for one in names for name in one.split(",") if name.strip()]


def _kernel_versions(specs: Sequence[str]) -> dict[str, str]:
    releases = [resolve_engine(spec) for spec in _split(specs)]
    return {release.engine: release.version for release in releases}


def _model(path: str | None, line: lines.Launch) -> tuple[Model | None, str]:
    """Read the model named, or the one of the launch line where that lies in a folder here; else say why it cannot be judged."""
    named = line.model if path is None and line.model and _is_here(line.model) else path
    return (None, "") if named is None else _read(named, line.overrides)


def _read(path: str, overrides: Mapping[str, Any]) -> tuple[Model | None, str]:
    try:
        return read_model(path, overrides), ""
    except ArgumentError as error:
        if "unread" not in error.values:
            raise
        return None, f"{path}: {error.values['unread']}"


def _is_here(path: str) -> bool:
    return Path(path, "config.json").is_file()


def _connector(line: lines.Launch) -> Connector | None:
    """Return the connector of the line; its chunk where that is a fact of the line and not of another server."""
    if line.connector is None:
        return None
    name = str(line.connector.get("kv_connector") or "a KV connector")
    extra = line.connector.get("kv_connector_extra_config")
    chunk = extra.get("block_size") if isinstance(extra, dict) and name.startswith("Offloading") else None
    if name.startswith("LMCacheMP"):
        chunk = line.environment.get("LMCACHE_CHUNK_SIZE")
    return Connector(name, None if chunk is None else parse_count(str(chunk), f"the chunk of {name}"))


def _draft(line: lines.Launch) -> Draft:
    path = line.draft_model
    return Draft(
        method=line.draft_method,
        model=_read(path, {})[0] if path and _is_here(path) else None,
        backend=line.draft_backend,
        kv_dtype=line.draft_kv_dtype,
        ranks=line.draft_ranks,
        trees=line.draft_trees,
    )


def _ranks(line: lines.Launch, release: Release) -> int:
    return line.decode_context_parallel * (line.prefill_context_parallel if release.prefill_ranks_divide else 1)


def _wanted(line: lines.Launch) -> Iterator[str]:
    ranks = line.decode_context_parallel
    if line.tensor_parallel_given:
        return
    if line.prefill_context_parallel == 1 and line.tensor_parallel % ranks:
        yield f"a --tensor-parallel-size that {ranks} divides; vLLM refuses {line.tensor_parallel}"


def _partition(line: lines.Launch) -> tuple[int, ...]:
    """Return the layers of each pipeline stage, where a variable of the launch says them."""
    name = "VLLM_PP_LAYER_PARTITION"
    text, stages = line.environment.get(name), line.pipeline_parallel
    if not text or stages == 1:
        return ()
    parts = tuple(parse_count(part, name) for part in text.split(","))
    if len(parts) != stages:
        raise ArgumentError(f"{name}={text} names {len(parts)} stages, and there are {stages}", values={name: text})
    return parts


def _unordered(line: lines.Launch, hardware: str | None) -> str:
    """Return what changes the order in which vLLM tries backends on that hardware, "" for nothing."""
    if line.backend_per_kind:
        return "--attention-config, with one per kind of layer,"
    switches = (
        "VLLM_MLA_DISABLE",
        *(name for name in line.environment if "ROCM_USE_AITER" in name and hardware == "rocm"),
    )
    return next((name for name in switches if line.environment.get(name, "0").lower() not in ("", "0", "false")), "")


def _altered(line: lines.Launch, hardware: str | None) -> tuple[str, str]:
    """Return a pattern of the backends that a field of --attention-config makes others than the catalogue has, and that field."""
    version = line.attention.get("flash_attn_version")
    own = {"9": 3, "10": 4}.get((hardware or "").partition(".")[0], 2)
    if version is not None and (version != own or hardware is None):
        return "FLASH_ATTN.*", f"flash_attn_version {version}"
    if line.attention.get("use_trtllm_attention") is False:
        return "FLASHINFER", "use_trtllm_attention false"
    if line.attention.get("hisparse_config"):
        return ".*SPARSE.*", "hisparse_config"
    return "", ""


def _ignored(line: lines.Launch, answer: Judgement) -> Iterator[str]:
    if line.env_backend and answer.backend:
        yield f"nothing of VLLM_ATTENTION_BACKEND={line.env_backend}, which vLLM ignores since 0.15"


def _without_backend(answer: Judgement, line: lines.Launch) -> Judgement:
    """Say more exactly why no backend is known."""
    if not line.env_backend or line.backend_per_kind:
        return answer
    why = f"VLLM_ATTENTION_BACKEND={line.env_backend} is ignored by vLLM since 0.15; write --attention-backend"
    return replace(answer, missing=(f"backend (--backend): {why}", *answer.missing[1:]))


def _as_json(answers: Sequence[Judgement]) -> str:
    objects = [_object(answer) for answer in answers]
    deciding = objects[answers.index(worst(answers))]
    return json.dumps(deciding if len(objects) == 1 else deciding | {"judgements": objects}, ensure_ascii=False)


def _group(group: Group) -> str:
    layers = "" if group.layers is None else f" of {group.layers} layers"
    text = f"{group.kind}{layers}: {group.width} blocks of {group.block_size}"
    if group.kernel_block_size not in (None, group.block_size):
        text += f", {group.kernel_width} kernel blocks of {group.kernel_block_size}"
    return text + (f" ({group.backend})" if group.backend else "")


def _memory(answer: Judgement, memory: Memory) -> str:
    parts = [f"{memory.bytes_per_token:,} bytes per token, {memory.bytes_per_block:,} per block of {answer.block_size}"]
    if memory.num_blocks is not None:
        parts.append(f"{memory.num_blocks:,} blocks")
    if memory.blocks_per_request is not None:
        parts.append(f"{memory.blocks_per_request:,} for {answer.max_model_len:,} tokens")
    if memory.requests is not None:
        parts.append(f"{memory.requests:.2f}x requests of that length at once")
    parts += [f"not known: {missing}" for missing in memory.missing]
    return "; ".join(parts)


def _object(answer: Judgement) -> dict[str, Any]:
    memory, groups = answer.memory, answer.groups
    return vars(answer) | {
        "error": answer.error or None,
        "memory": memory and memory._asdict(),
        "groups": [group._asdict() for group in groups],
    }


def _rows(answer: Judgement) -> Iterator[Row]:
    yield Row(f"{_LABEL[answer.verdict]:<9}", answer.reason, _COLOUR[answer.verdict])
    for missing in answer.missing:
        yield Row("", f"missing: {missing}")
    if answer.error:
        yield Row("", f"the server would stop with: {answer.error}")
    if answer.ways_out:
        yield Row("", f"ways out, each checked: {' · '.join(answer.ways_out)}")
    elif answer.verdict == "refused":
        yield Row("", "no way out was found by changing one setting")
    if answer.padding:
        yield Row("", f"padding: {answer.padding} of {answer.kernel_width} kernel blocks per row")
    if len(answer.groups) > 1:
        yield Row("", f"groups: {'; '.join(map(_group, answer.groups))}")
    if answer.memory:
        yield Row("", f"memory: {_memory(answer, answer.memory)}")
    if answer.assumed:
        yield Row("", f"assumed: {'; '.join(answer.assumed)}")
