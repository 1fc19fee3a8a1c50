"""The preflight's second stage asks vLLM's own rules for kernel blocks: real caches, backends made by hand, no engine."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.conformance


@pytest.fixture
def judge(real, monkeypatch):
    """Return a function that judges one group whose backend takes more sizes where it does not see the cache."""
    torch, caches, base = real("torch"), real("vllm.v1.kv_cache_interface"), real("vllm.v1.attention.backend")
    preflight = real("blocktable.integrations.vllm_preflight")
    real("vllm.v1.worker.utils")  # what warns when it is imported, before the warnings count
    monkeypatch.setattr(preflight, "_ways", lambda *_: ())
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=256),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )

    asked = []

    class Backend:
        @staticmethod
        def get_name():
            return "SOMEBODYS_OWN"

        @staticmethod
        def get_supported_kernel_block_sizes(spec=None):
            asked.append(spec)
            return [128] if spec is not None else [base.MultipleOf(16)]

    def run(kind, block, *, packed=False):
        spec = {
            "full": lambda: caches.FullAttentionSpec(block, num_kv_heads=1, head_size=64, dtype=torch.float32),
            "state": lambda: caches.MambaSpec(block, shapes=((4,),), dtypes=(torch.float32,)),
            "encoder": lambda: caches.EncoderOnlyAttentionSpec(
                block, num_kv_heads=1, head_size=64, dtype=torch.float32
            ),
        }[kind]()
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
        layers = {name: SimpleNamespace(get_attn_backend=lambda: Backend) for name in group.layer_names}
        stride = SimpleNamespace(layers=["a", "b"], block_stride=200 if packed else 100, layer_stride=100)
        preflight._judge_group(config, group, preflight._parts(layers, group), [stride])
        return asked

    return run, preflight.PreflightError


def test_a_backend_that_looks_at_the_cache_is_asked_with_it(judge):
    run, refused = judge
    with pytest.raises(refused, match="No common block size for 16"):
        run("full", 16)


@pytest.mark.parametrize(("kind", "packed"), [("state", False), ("encoder", False), ("full", True)])
def test_what_vllm_never_splits_is_not_judged_by_it(judge, kind, packed):
    run, _ = judge
    assert run(kind, 16, packed=packed) == []
