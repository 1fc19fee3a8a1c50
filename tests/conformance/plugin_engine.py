"""Run vLLM's engine several times over the same requests and print, per run, what came out; a process of its own.

    python plugin_engine.py '[{"mode": "off", "model": "llama", ...}, {"mode": "tables", ...}]'

A run's ``mode`` is BLOCKTABLE_VLLM. ``plant`` makes something wrong: one ``slot`` of each step, the last block of each
``hit`` of the prefix cache, the ``order`` in which cached blocks are evicted. ``processes`` runs the engine in processes
of its own, where the plugin comes by its entry point alone; without it only the workers of
several ranks have their own. ``small`` is for Triton's interpreter. ``trace`` is a file of requests of which the first
``count`` are served, their lengths divided by 64. A ``rough`` run serves that many requests, some of which are cut off,
some more urgent than others, and resets the prefix cache in between; where our pool is in this process, it is recounted at
each step. Without ``again`` the requests are served once, else a second time in reverse order. Other fields are the
engine's own arguments.
"""

import gc
import hashlib
import itertools
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

PROMPTS = (3, 50, 170, 400, 300, 64, 255, 220)  # tokens; every second one begins with the same 256
ANSWERS = (40, 36, 30, 44, 28, 50, 33, 41)


def models():
    """Return the folder of tiny models, in the environment that runs them."""
    return Path(sys.prefix) / "models"


def make_model(name):
    """Save a model of random weights, large enough ones that each wrong key or value changes what comes out."""
    import torch
    import transformers as hf

    folder = models() / name
    if (folder / "config.json").exists():
        return folder
    if name == "smollm2":
        return convert_smollm2(folder)
    common = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 16384,
        "initializer_range": 0.08,
    }
    grouped = {**common, "num_attention_heads": 4, "num_key_value_heads": 2}
    latent = {
        **common,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    made = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "deepseek": lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**latent)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**grouped, sliding_window=64)),
        "hybrid": lambda: hf.MistralForCausalLM(
            hf.MistralConfig(**grouped, sliding_window=64, layer_types=["sliding_attention", "full_attention"])
        ),
    }[name]
    torch.manual_seed(0)
    made().to(torch.bfloat16).save_pretrained(folder)
    return folder


def convert_smollm2(folder):
    """Save SmolLM2 in the format that vLLM reads; as it was loaded, it refuses to be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (file,) = (Path(sys.prefix) / "smollm2").glob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    dropped = ("quantization_config", "model_type", "architectures", "transformers_version", "_name_or_path")
    config = {key: value for key, value in loaded.config.to_dict().items() if key not in dropped}
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=False)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three fruits.",
    "How many legs has a spider?",
    "Give me a title for a story about a lighthouse.",
    "What do bees make?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
)


def chats(folder):
    """Return real chats that share a system prompt, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    system = "You are a helpful assistant who answers briefly, kindly and truthfully. " * 8
    made = []
    for question in QUESTIONS:
        said = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        made.append({"prompt_token_ids": list(ids)})
    return made


def prompts():
    draw = random.Random(7)  # noqa: S311 - test data
    shared = [draw.randrange(5, 31000) for _ in range(256)]
    made = []
    for i, length in enumerate(PROMPTS):
        tail = [draw.randrange(5, 31000) for _ in range(length)]
        made.append({"prompt_token_ids": shared + tail if i % 2 else tail})
    return made


def traced(path, count):
    """Return the first requests of a trace: its hash ids stand for 512 tokens each, here for 8."""
    asked, lengths = [], []
    with Path(path).open(encoding="utf-8") as lines:
        for line in itertools.islice(lines, count):
            one = json.loads(line)
            tokens = [5 + (31 * block + 7 * i * i) % 31000 for block in one["hash_ids"] for i in range(8)]
            asked.append({"prompt_token_ids": tokens[: max(1, one["input_length"] // 64)]})
            lengths.append(max(1, one["output_length"] // 64))
    return asked, lengths


def warm_up(worker):
    """Run a rank once by itself: without a compiler vLLM's CPU worker does not, and later ranks lack a buffer for it."""
    worker.model_runner._dummy_run(8)


def worker_facts(worker):
    """What one worker says of itself: the class of its tables, the findings of its observer, how many observers it has."""
    from blocktable.integrations import vllm_observe, vllm_tables

    reports = vllm_observe.reports()
    counts = {law: count for report in reports[-1:] for law, count in dict(report.counts).items()}
    return vllm_tables.in_use(worker.model_runner), counts, len(reports)


def pool_facts():
    """What the pools of this process are, and whether their steps are shortened; every block is free again in each."""
    from blocktable.integrations import vllm_pool

    managers = vllm_pool.managers()
    for manager in managers:
        manager.block_pool.check([])  # no request is left to own one
    return [[vllm_pool.in_use(manager), "allocate_slots" in vars(manager)] for manager in managers]


def recounted(original, manager):
    """Recount a pool at the start of a step: each block has as many owners as there are rows that hold it."""
    original(manager)
    rows = [row for one in manager.coordinator.single_type_managers for row in one.req_to_blocks.values()]
    manager.block_pool.check([*rows, *(blocks for _, blocks in manager.deferred)])
    manager.recounts = getattr(manager, "recounts", 0) + 1


def serve_roughly(llm, params, count):
    """Serve requests of two prefixes on an engine that is too small for them; return what came out of each."""
    draw, engine, came = random.Random(11), llm.llm_engine, {}  # noqa: S311 - test data
    shared = [[draw.randrange(5, 31000) for _ in range(n)] for n in (8, 40)]
    numbers = iter(range(count))
    step = 0
    while step < 20 or engine.has_unfinished_requests():
        for number in itertools.islice(numbers, draw.randrange(4)):
            prompt = draw.choice(shared) + [draw.randrange(5, 31000) for _ in range(draw.randrange(1, 16))]
            asked = params(max_tokens=draw.randrange(70, 110), temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(
                str(number), {"prompt_token_ids": prompt}, asked, arrival_time=float(number), priority=draw.randrange(3)
            )
        for one in engine.step():
            came[one.request_id] = [list(one.outputs[0].token_ids), one.num_cached_tokens, one.finished]
        step += 1
        alive = sorted(name for name, (_, _, finished) in came.items() if not finished)
        if step % 23 == 0 and alive:
            gone = draw.choice(alive)
            engine.abort_request([gone])
            came[gone][2] = True
        if step % 61 == 0:
            engine.reset_prefix_cache(reset_running_requests=step % 2 == 0)
    engine.step()
    return [came[name] for name in sorted(came, key=int)]


def run(mode, model, plant="", processes=False, small=False, trace=None, count=600, again=True, rough=0, **engine):
    os.environ["BLOCKTABLE_VLLM"] = mode
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    if {"tensor_parallel_size", "pipeline_parallel_size"} & set(engine):  # by itself vLLM wants a NUMA node per rank
        first, *_, last = sorted(os.sched_getaffinity(0)) * 2
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{first}|{last}"
    from vllm import LLM, SamplingParams

    from blocktable.integrations import _patches, vllm, vllm_observe, vllm_pool

    vllm_observe._watched.clear()
    vllm_pool._made.clear()
    if not processes:  # the entry point was called once, with another mode
        vllm._registered = False
        vllm.register()
    if plant:
        {"slot": plant_wrong_slot, "hit": plant_wrong_hit, "order": plant_wrong_order}[plant]()
    given = {
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        "seed": 0,
    }
    began = time.monotonic()
    llm = LLM(model=str(make_model(model)), **(given | engine))
    loaded = time.monotonic() - began
    if "pipeline_parallel_size" in engine:
        llm.collective_rpc(warm_up)
    asked, lengths = chats(make_model(model)) if model == "smollm2" else prompts(), ANSWERS
    if small:
        asked, lengths = asked[5:], [n // 4 for n in ANSWERS[5:]]
    if trace:
        asked, lengths = traced(trace, count)
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False) for n in lengths]
    if not processes and vllm_pool.managers():
        (manager,) = vllm_pool.managers()
        manager.deferred = llm.llm_engine.engine_core.engine_core.scheduler.deferred_frees
        _patches.wrap(type(manager), "new_step_starts", recounted)
    began = time.monotonic()
    if rough:
        rows = serve_roughly(llm, SamplingParams, rough)
        return finish(llm, mode, rows, [round(loaded, 1), round(time.monotonic() - began, 1)])
    waves = [llm.generate(asked, params, use_tqdm=False)]
    if again and not trace:
        waves.append(llm.generate(asked[::-1], params[::-1], use_tqdm=False))
    rows = [[list(one.outputs[0].token_ids), one.num_cached_tokens or 0] for wave in waves for one in wave]
    return finish(llm, mode, rows, [round(loaded, 1), round(time.monotonic() - began, 1)])


def finish(llm, mode, rows, seconds):
    """Stop the engine and return what is to be compared; a row has an answer's token ids and how many were cached."""
    from blocktable.integrations import _patches, vllm_pool

    metrics = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
    facts = llm.collective_rpc(worker_facts)
    ids = [row[0] for row in rows]
    found = {
        "mode": mode,
        "tables": sorted({name for name, *_ in facts}),
        "findings": {law: count for _, counts, _ in facts for law, count in counts.items()},
        "observers": sum(count > 0 for *_, count in facts),
        "pools": pool_facts(),
        "recounts": sum(getattr(manager, "recounts", 0) for manager in vllm_pool.managers()),
        "preemptions": metrics.get("vllm:num_preemptions"),
        "cached": sum(row[1] for row in rows),
        "distinct": len({token for row in ids for token in row}),
        "digest": hashlib.sha256(repr(ids).encode()).hexdigest()[:16],
        "hits": hashlib.sha256(repr([row[1] for row in rows]).encode()).hexdigest()[:16],
        "seconds": seconds,
    }
    _patches.undo()
    close(llm)
    return found


def plant_wrong_slot():
    """Make the first slot of each step lie in the neighbouring place of its block."""
    from blocktable.integrations import _patches, vllm_tables

    def wrong(original, tables, *arguments, **named):
        found = original(tables, *arguments, **named)
        slots = tables._slots if found is None else found
        slots[0, 0] ^= 1
        return found

    second = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    _patches.wrap(vllm_tables._ours("v2" if second else "v1"), "compute_slot_mappings" if second else "_map", wrong)


def plant_wrong_hit():
    """Let the last block of each hit of the prefix cache be the one before it."""
    from blocktable.integrations import _patches, vllm_pool_blocks

    def wrong(original, pool, *arguments):
        found = original(pool, *arguments)
        return [*found[:-1], found[-2]] if len(found) > 1 else found

    _patches.wrap(vllm_pool_blocks.Pool, "longest_hit", wrong)


def plant_wrong_order():
    """Let a request's blocks be evicted from its first on."""
    from blocktable.integrations import _patches, vllm_pool_blocks

    def wrong(original, pool, blocks):
        original(pool, list(blocks)[::-1])

    _patches.wrap(vllm_pool_blocks.Pool, "free_blocks", wrong)


def close(llm):
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    wanted = json.loads(sys.argv[1])
    os.environ["BLOCKTABLE_VLLM"] = "off"
    for one in wanted:
        sys.stdout.write(f"RUN {json.dumps(run(**one))}\n")
        sys.stdout.flush()
