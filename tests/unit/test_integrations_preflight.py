"""The plugin's preflight on configurations made by hand: what a CPU cannot select, and releases that are not installed."""

from types import SimpleNamespace

import pytest

from blocktable.integrations import vllm
from blocktable.integrations import vllm_preflight as preflight


class Platform:
    """Stands in for vLLM's platform."""

    def __init__(self, hardware):
        self.hardware = hardware

    def is_cpu(self):
        return self.hardware == "cpu"

    def is_rocm(self):
        return self.hardware == "rocm"

    def is_xpu(self):
        return self.hardware == "xpu"

    def is_cuda(self):
        return self.hardware[0].isdigit()

    def get_device_capability(self):
        major, minor = map(int, self.hardware.split("."))
        return SimpleNamespace(major=major, minor=minor)


def config(*, backend=None, length=9416, block=32, mla=True, ranks=1, interleave=1, heads=16, head=128, per_kind=None):
    """Return as much of a VllmConfig as the preflight reads."""
    text = SimpleNamespace(num_attention_heads=heads, qk_nope_head_dim=128)
    model = SimpleNamespace(
        model="m",
        hf_text_config=text,
        use_mla=mla,
        is_hybrid=False,
        is_attention_free=False,
        max_model_len=length,
        get_head_size=lambda: 576 if mla else head,
        get_total_num_kv_heads=lambda: 1 if mla else heads,
    )
    name = None if backend is None else SimpleNamespace(name=backend)
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            block_size=block, user_specified_block_size=block is not None, num_gpu_blocks_override=None
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave, tensor_parallel_size=ranks
        ),
        attention_config=SimpleNamespace(backend=name, backend_per_kind=per_kind or {}),
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )


def refusal(made, hardware, version="0.32.0"):
    with pytest.raises(preflight.PreflightError) as caught:
        preflight.judge_configured(made, Platform(hardware), version)
    return caught.value


def test_the_launch_at_9416_is_refused_in_a_release_that_does_not_align():
    error = refusal(config(backend="FLASHINFER_MLA"), "10.0", "0.19.1")
    assert "block_num % (128 / block_size) == 0, got block_num=295 and block_size=32" in error.values["error"]
    assert any("--max-model-len 9344, or 9441 to 9472" in way for way in error.values["ways_out"])
    assert any(way.startswith("vllm>=") for way in error.values["ways_out"])


def test_the_launch_at_9416_starts_in_a_release_that_does():
    preflight.judge_configured(config(backend="FLASHINFER_MLA"), Platform("10.0"), "0.32.0")


def test_a_cpu_takes_no_block_of_16():
    error = refusal(config(block=16, mla=False), "cpu")
    assert "CPU_ATTN" in str(error)
    assert "--block-size 32" in error.values["ways_out"]


def test_b12x_refuses_the_row_that_is_padded_to_an_odd_number_of_its_blocks():
    error = refusal(config(backend="B12X", length=8000, block=64, mla=False), "12.0")
    assert "got 126, expected 1..125" in error.values["error"]


def test_flashinfer_mla_under_context_parallelism_takes_no_interleave():
    error = refusal(config(backend="FLASHINFER_MLA", ranks=2, interleave=16), "10.0")
    assert "interleave" in str(error)
    preflight.judge_configured(config(backend="FLASHINFER_MLA", ranks=2), Platform("10.0"), "0.32.0")


def test_a_refusal_is_one_readable_message_and_a_runtime_error_that_is_no_value_error():
    error = refusal(config(block=16, mla=False), "cpu")
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, ValueError)  # pydantic would wrap it
    lines = str(error).splitlines()
    assert lines[0].startswith("blocktable preflight: this launch would be refused: ")
    assert lines[-1] == "  to try it all the same: BLOCKTABLE_VLLM=off"
    assert len(lines) <= 4


def test_a_release_newer_than_the_catalogue_is_only_warned_of(caplog):
    preflight.judge_configured(config(block=16, mla=False), Platform("cpu"), "0.99.0")
    assert "would be refused" in caplog.text
    assert "vLLM goes on" in caplog.text


def test_backends_named_per_kind_of_layer_are_left_to_the_second_stage():
    made = config(backend="B12X", length=8000, block=64, mla=False, per_kind={"full_attention": "B12X"})
    assert preflight.read_launch(made, Platform("12.0"), "0.32.0").backend is None


def test_a_defect_of_the_preflight_is_said_and_stops_nothing(caplog, monkeypatch):
    def broken(_config):
        raise KeyError("no such field")

    preflight._guarded(broken, None)
    assert "not judged, KeyError('no such field')" in caplog.text
    monkeypatch.setenv("BLOCKTABLE_VLLM_STRICT", "1")
    with pytest.raises(vllm.PluginError, match="no such field"):
        preflight._guarded(broken, None)


def test_what_has_no_model_is_not_judged():
    made = config()
    made.model_config = None
    preflight.judge_configured(made, Platform("10.0"), "0.32.0")
