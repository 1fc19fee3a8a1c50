"""The order in which the installed vLLM tries backends, lifted from its source, against the catalogue's."""

import ast
import importlib.util
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from blocktable.contracts import resolve_engine
from blocktable.preflight import Launch, Model
from blocktable.preflight.choice import tried

pytestmark = pytest.mark.conformance


class Names:
    """Stands in for the registry: a member is its own name."""

    def __getattr__(self, name):
        return name


@pytest.fixture
def priorities(real):
    real("vllm")
    file = Path(importlib.util.find_spec("vllm").origin).parent / "platforms" / "cuda.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if getattr(node, "name", "") == "_get_backend_priorities")
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    function.body = [node for node in function.body if not isinstance(node, ast.ImportFrom)]
    real_test = real("vllm.utils.torch_utils").is_quantized_kv_cache
    scope = {"AttentionBackendEnum": Names(), "is_quantized_kv_cache": real_test, "cache": cache}
    exec(compile(ast.Module([function], []), str(file), "exec"), scope)  # noqa: S102 - the engine's own function
    return scope["_get_backend_priorities"]


def test_everytried(priorities, vllm_version):
    release = resolve_engine(f"vllm=={vllm_version}")
    for hardware, mla, heads, head_size, kv_dtype in product(
        ("8.0", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"),
        (False, True),
        (1, 16, 17, 128),
        (128, 512, 576),
        ("auto", "bfloat16", "fp8", "nvfp4", "int8_per_token_head", "turboquant_k8v4"),
    ):
        major, minor = map(int, hardware.split("."))
        theirs = priorities(
            use_mla=mla,
            device_capability=SimpleNamespace(major=major, minor=minor),
            num_heads=heads,
            head_size=head_size,
            kv_cache_dtype=kv_dtype,
        )
        model = Model(source="m", kind="mla" if mla else "gqa", head_size=head_size, heads=heads, kv_heads=heads)
        ours = tried(Launch(release, None, hardware=hardware, model=model, kv_dtype=kv_dtype))
        assert list(ours) == theirs, (hardware, mla, heads, head_size, kv_dtype)
