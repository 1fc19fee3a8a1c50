"""The plugin's entry point without vLLM: modes, idempotence, honest failure, nothing heavy imported."""

import os
import subprocess
import sys

import pytest

from blocktable.integrations import _patches, vllm, vllm_drift


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(vllm, "_registered", False)
    monkeypatch.delenv("BLOCKTABLE_VLLM", raising=False)
    monkeypatch.delenv("BLOCKTABLE_VLLM_STRICT", raising=False)
    monkeypatch.setenv(vllm.RAY_COPIES, "")
    yield
    _patches.undo()


@pytest.fixture
def problems(monkeypatch):
    """Pretend that each mode has a problem, and collect which modes were asked for."""
    asked = []

    def problem(mode):
        asked.append(mode)
        return "a hook moved"

    monkeypatch.setattr(vllm, "_problem", problem)
    return asked


def test_modes():
    assert vllm.read_modes("") == ()
    assert vllm.read_modes("tables,preflight, observe") == ("preflight", "tables", "observe")
    assert vllm.read_modes("tables,off") == ()
    with pytest.raises(vllm.PluginError, match="'tabels', which is no mode"):
        vllm.read_modes("tabels")


def test_the_preflight_is_all_that_installing_does(problems):
    vllm.register()
    assert problems == ["preflight"]


def test_it_registers_once_in_a_process(problems):
    vllm.register()
    vllm.register()
    assert problems == ["preflight"]


@pytest.mark.parametrize(
    ("before", "after"), [("", "BLOCKTABLE_"), ("MY_,TWO_", "MY_,TWO_,BLOCKTABLE_"), ("BLOCKTABLE_", "BLOCKTABLE_")]
)
@pytest.mark.parametrize("word", ["off", "tables", "tabels"])
def test_ray_is_told_to_carry_what_was_set(problems, monkeypatch, before, after, word):
    monkeypatch.setenv(vllm.RAY_COPIES, before)
    monkeypatch.setenv("BLOCKTABLE_VLLM", word)
    vllm.register()
    assert os.environ[vllm.RAY_COPIES] == after


def test_ray_is_told_nothing_where_nothing_was_set(problems, monkeypatch):
    for name in [name for name in os.environ if name.startswith(vllm.PREFIX)]:
        monkeypatch.delenv(name)
    vllm.register()
    assert not os.environ[vllm.RAY_COPIES]


def test_what_cannot_be_had_is_said_in_one_line_and_vllm_goes_on(problems, caplog, monkeypatch):
    monkeypatch.setenv("BLOCKTABLE_VLLM", "tables")
    vllm.register()
    assert [record.getMessage() for record in caplog.records] == [
        "blocktable tables: a hook moved; vLLM runs without it"
    ]


def test_a_wrong_word_is_said_too(caplog, monkeypatch):
    monkeypatch.setenv("BLOCKTABLE_VLLM", "tabels")
    vllm.register()
    assert "'tabels', which is no mode" in caplog.text


def test_strict_refuses_to_start(problems, monkeypatch):
    monkeypatch.setenv("BLOCKTABLE_VLLM", "tables")
    monkeypatch.setenv("BLOCKTABLE_VLLM_STRICT", "1")
    with pytest.raises(vllm.PluginError, match="a hook moved"):
        vllm.register()


def test_a_release_outside_the_tested_range_is_a_problem(monkeypatch):
    monkeypatch.setattr(vllm, "engine_version", lambda: "0.31.0")
    assert "0.31.0 is outside the releases it was tested with" in vllm._problem("tables")


def test_the_entry_point_imports_nothing_heavy():
    code = (
        "import sys; import blocktable.integrations.vllm; "
        "print([m for m in ('torch', 'numba', 'numpy', 'vllm', 'rich', 'packaging') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SOURCE = {
    "config/vllm.py": "class VllmConfig:\n def __post_init__(self): ...\n"
    "def get_layers_from_vllm_config(vllm_config, layer_type, layer_names=None): ...",
    "model_executor/model_loader/utils.py": "def initialize_model(vllm_config, *, prefix='', model_class=None, model_config=None): ...",
    "model_executor/model_loader/base_loader.py": "def load(): initialize_model()",
    "v1/worker/utils.py": "def prepare_kernel_block_sizes(kv_cache_config, attn_groups): ...",
    "v1/core/kv_cache_utils.py": "def get_kv_cache_groups(vllm_config, kv_cache_spec): ...\n"
    "def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory): ...",
    "v1/attention/backends/utils.py": "def get_supported_kv_cache_layouts(backends): ...\n"
    "def resolve_kv_cache_layout(vllm_config, supported_layouts, kv_cache_specs=None): ...",
}


@pytest.fixture
def release(tmp_path):
    """Return a folder with as much of a vLLM as the preflight relies on."""
    for name, text in SOURCE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_nothing_moved(release):
    assert vllm_drift.moved(release, "preflight") == []


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("config/vllm.py", "class VllmConfig: ...", "config/vllm.py has no VllmConfig.__post_init__"),
        ("v1/worker/utils.py", "def prepare_kernel_block_sizes(size): ...", "takes (size), not (kv_cache_config"),
        ("model_executor/model_loader/base_loader.py", "def load(): make()", "does not call initialize_model"),
    ],
)
def test_what_moved_is_named(release, file, text, says):
    (release / file).write_text(text)
    assert any(says in sentence for sentence in vllm_drift.moved(release, "preflight"))


def test_a_file_that_is_gone_is_named(release):
    (release / "v1/core/kv_cache_utils.py").unlink()
    assert vllm_drift.moved(release, "preflight") == [
        "v1/core/kv_cache_utils.py has no get_kv_cache_groups",
        "v1/core/kv_cache_utils.py has no get_kv_cache_config_from_groups",
    ]


def test_a_body_is_the_same_but_for_comments_and_docstring(tmp_path):
    def digest(body):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        path.write_text(f"class Pool:\n def take(self):\n{body}")
        return vllm_drift._bodies(path)["Pool.take"]

    plain = digest("  return self.free.pop()\n")
    assert digest('  """Take.\n\n  One."""\n  # the last\n  return self.free.pop()\n') == plain
    assert digest("  return self.free.pop(0)\n") != plain


def test_a_body_that_changed_is_named(tmp_path):
    (tmp_path / "pool.py").write_text("def take(free): return free.pop()\n")
    (told,) = vllm_drift._changed(tmp_path, {"pool.py": {"take": "0"}})
    assert told == "pool.py: take is not the one that was tested"
    assert list(vllm_drift._changed(tmp_path, {"pool.py": {"give": "0"}})) == ["pool.py has no give"]


def test_a_member_nobody_knows_is_named(release):
    (release / "runner.py").write_text(
        "def go(self):\n self.input_batch.block_table.shuffle_rows(3)\n self.input_batch.block_table.clear()"
    )
    assert list(vllm_drift.strangers(release, "block_table", {"clear"})) == [
        "runner.py:2 touches block_table.shuffle_rows"
    ]
