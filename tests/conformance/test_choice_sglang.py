"""What SGLang takes by itself and the page size that it really takes: its own functions, lifted from the unpacked files."""

import ast
import logging
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocktable.contracts import get_contract, resolve_engine
from blocktable.contracts.engines import catalogue
from blocktable.preflight import Launch, Model
from blocktable.preflight.choice import choose

pytestmark = pytest.mark.conformance

HARDWARE = ("8.0", "9.0", "10.0", "10.3", "12.0", "rocm")


@pytest.fixture(scope="module")
def groups():
    folder = Path(sys.prefix, "sglang", "sglang", "srt", "arg_groups")
    if not folder.is_dir():
        pytest.skip("SGLang is not here: tools/peers.sh DIR sglang unpacks it")
    return folder


def lift(file, name, scope):
    """Return one function of a file, run over the names in ``scope`` alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if getattr(node, "name", "") == name)
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    exec(compile(ast.Module([function], []), str(file), "exec"), scope)  # noqa: S102 - the engine's own function
    return scope[name]


def platform(hardware):
    return SimpleNamespace(
        is_hopper_with_cuda_12_3=hardware == "9.0",
        is_sm100=hardware.startswith("10."),
        is_hip=hardware == "rocm",
        has_flashinfer=True,
    )


def test_the_default_backend(groups):
    release = resolve_engine("sglang==0.5.23")
    compared = 0
    for hardware, mla in product(HARDWARE, (False, True)):
        config = SimpleNamespace(speculative_algorithm=None, speculative_eagle_topk=None, tp_size=1)
        scope = {
            "resolving_view": lambda _, config=config: config,
            "resolved_view": lambda _, config=config: config,
            "get_platform": lambda hardware=hardware: platform(hardware),
            "current_platform": SimpleNamespace(is_out_of_tree=lambda: False),
            "is_no_spec_infer_or_topk_one": lambda _: True,
            "is_mps": lambda: False,
        }
        model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
            has_asymmetric_kv=False,
            has_attention_sinks=False,
            get_num_kv_heads=lambda _: 16,
        )
        theirs = lift(groups / "model_override_base.py", "get_default_attn_backend", scope)(None, mla, model_config)
        model = Model(
            source="m",
            family="deepseek_v2" if mla else "llama",
            kind="mla" if mla else "gqa",
            head_size=576 if mla else 128,
            heads=16,
            kv_heads=16,
        )
        ours = choose(Launch(release, None, hardware=hardware, model=model))
        if ours is None:
            assert (hardware, mla) == ("rocm", True)  # by the number of heads
            continue
        compared += 1
        assert ours.backend == theirs, (hardware, mla)
    assert compared == 11


@pytest.mark.parametrize("family", ["llama4", "gpt_oss"])
def test_families_that_declare_a_backend_of_their_own(groups, family):
    release, compared = resolve_engine("sglang==0.5.23"), 0
    for hardware in (*HARDWARE, "xpu"):
        config = SimpleNamespace(attention_backend=None, device="xpu" if hardware == "xpu" else "cuda")
        config.moe_runner_backend, config.dtype, config.quantization = "triton", "bfloat16", None
        facts = platform(hardware)
        facts.is_sm90, facts.is_xpu, facts.has_amx = facts.is_hopper_with_cuda_12_3, hardware == "xpu", False
        scope = {
            "resolving_view": lambda _, config=config: config,
            "is_attention_backend_not_set": lambda _: True,
            "get_platform": lambda facts=facts: facts,
            "logger": logging.getLogger("peer"),
            "is_cpu": lambda: False,
            "is_mps": lambda: False,
            "Dict": dict,
            "Any": object,
        }
        file = groups / "model_overrides" / f"{family}.py"
        theirs = lift(file, f"_{family}_overrides", scope)(None, SimpleNamespace())["attention_backend"]
        name = "llama4_text" if family == "llama4" else family
        model = Model(source="m", family=name, kind="gqa", head_size=128, heads=16, kv_heads=16)
        assert choose(Launch(release, None, hardware=hardware, model=model)).backend == theirs, hardware
        compared += 1
    assert compared == len(HARDWARE) + 1


def test_families_that_declare_none_are_those_that_the_catalogue_lists_together(groups):
    declared = "".join(file.read_text(encoding="utf-8") for file in (groups / "model_overrides").glob("*.py"))
    for architecture in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Phi3"):
        assert f'"{architecture}ForCausalLM"' not in declared
    for file in ("gemma2_gemma3", "glm4_moe", "minimax_m2", "qwen3_moe"):  # these declare other things
        assert "attention_backend" not in (groups / "model_overrides" / f"{file}.py").read_text(encoding="utf-8")


def test_a_cpu(groups):
    model = Model(source="m", family="llama", kind="gqa", head_size=128, heads=16, kv_heads=16)
    ours = choose(Launch(resolve_engine("sglang==0.5.23"), None, hardware="cpu", model=model)).backend
    declared = {}
    scope = {
        "resolving_view": lambda _: SimpleNamespace(device="cpu", attention_backend=None),
        "declare_resolution": lambda *_, **fields: declared.update(fields),
        "is_host_cpu_arm64": lambda: False,
        "Any": object,
    }
    lift(groups / "platform_hook.py", "handle_cpu_backends", scope)(None)
    assert declared["attention_backend"] == ours


def test_every_choice_has_a_name(groups):
    tree = ast.parse((groups / "choices.py").read_text(encoding="utf-8"))
    (listed,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "ATTENTION_BACKEND_CHOICES"
    )
    data = catalogue("sglang")
    assert set(ast.literal_eval(listed)) == set(data.exists) | set(data.aliases)


@pytest.mark.parametrize("backend", ["flashmla", "trtllm_mla", "cutedsl_mla", "trtllm_mha", "hpc_ops", "fa3", "triton"])
def test_the_page_size_that_it_really_takes(groups, backend):
    resolve = lift(groups / "overrides.py", "_mla_backend_page_constraints", {"logger": logging.getLogger("peer")})
    contract = get_contract(f"sglang:{backend}@0.5.23")
    for page_size in range(1, 300):
        view = SimpleNamespace(
            page_size=page_size,
            attention_backend=backend,
            decode_attention_backend=None,
            prefill_attention_backend=None,
            speculative_draft_attention_backend=None,
        )
        assert resolve(view).get("page_size", page_size) == contract.effective_block_size(page_size)
