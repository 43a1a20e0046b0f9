"""How an engine's path is found by name and loaded by itself. No engine is needed here: the packages are written by the tests.

Failure modes this file exists to catch: the engine's whole package imported for one file; a stand-in left in `sys.modules`, where a later
import of the engine finds it; a package that is not there, or a file that moved, shown as an ImportError of something else; a name that
nobody gave resolved to something that cannot be called; a fault of the adapter that is put down to the engine; a page that lacks a row.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from published import SGLANG_GAPS, VLLM, VLLM_GAPS, SGLang, fixed_cases, unit_layer

from pytest_specdecode.engines.subjects import fused_kv_class, installed, vllm_context
from pytest_specdecode.errors import DraftError, MissingDependencyError
from pytest_specdecode.fused_kv import FusedKV
from pytest_specdecode.numerics import NumericsError

ROOT = Path(__file__).resolve().parent.parent.parent
HELPER = "sglang/kernels/ops/speculative/fused_kv_materialize.py"
KERNEL = "vllm/models/beam/nvidia/dflash2_context_ops.py"


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """What was loaded before is looked for again, and what a test loads is not taken for an engine's."""
    caches = (installed.sglang_helper, vllm_context._store_context_kv)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a package of one file, whose `__init__` must not run, in front of whatever is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(file: str, text: str) -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in [each for each in path.parents if tmp_path in each.parents]:
            (parent / "__init__.py").write_text("raise RuntimeError('the package was imported')")
        path.write_text(textwrap.dedent(text))
        return path

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == tmp_path:
            del sys.modules[name]


def loaded(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


# --- names --------------------------------------------------------------------------------------------------------------------------------


def test_ours_is_fused_kv() -> None:
    assert fused_kv_class("ours") is FusedKV


def test_a_module_and_an_attribute(site) -> None:
    site("mine.py", "class Outer:\n    class Path: ...\n")
    assert fused_kv_class("mine:Outer.Path").__qualname__ == "Outer.Path"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sglnag", "no fused-KV path is called 'sglnag'; did you mean sglang?"),
        ("", "no fused-KV path is called ''; give ours, sglang, vllm or MODULE:CLASS"),
        ("mine", "no fused-KV path is called 'mine'; give ours, sglang, vllm or MODULE:CLASS"),
        (":Path", "no fused-KV path is called ':Path'"),
        ("mine:", "no fused-KV path is called 'mine:'"),
        (
            "absent:Path",
            "module absent of 'absent:Path' cannot be imported: ModuleNotFoundError: No module named 'absent'",
        ),
        ("broken:Path", "module broken of 'broken:Path' cannot be imported: ZeroDivisionError: division by zero"),
        ("exits:Path", "module exits of 'exits:Path' cannot be imported: SystemExit: 7"),
        ("skips:Path", "module skips of 'skips:Path' cannot be imported: Skipped: not here"),
        ("lazy:Path", "'lazy:Path': 'Path' cannot be had: RuntimeError: lazy Path"),
        ("mine.py:Path", "No module named 'mine.py'; 'mine' is not a package; MODULE is a dotted name, not a file"),
        ("absent:Path", "; is its directory on sys.path?"),
        ("needs:Path", "No module named 'no_such_thing'"),
        ("..mine:Path", "module ..mine of '..mine:Path' cannot be imported"),
        ("mine:Pathe", "'mine:Pathe': mine has no attribute 'Pathe'; did you mean 'Path'?"),
        ("mine:Path.inner", "'mine:Path.inner': Path has no attribute 'inner'"),
        ("mine:NUMBER", "'mine:NUMBER' is int, which cannot be called; a class is due"),
    ],
)
def test_one_clear_error_for_each_name_that_leads_nowhere(site, name: str, says: str) -> None:
    site("mine.py", "NUMBER = 3\nclass Path: ...\n")
    site("broken.py", "1 / 0\n")
    site("exits.py", "raise SystemExit(7)\n")
    site("skips.py", "import pytest\npytest.skip('not here', allow_module_level=True)\n")
    site("lazy.py", "def __getattr__(name):\n    raise RuntimeError(f'lazy {name}')\n")
    site("needs.py", "import no_such_thing\n")
    with pytest.raises(DraftError) as caught:
        fused_kv_class(name)
    assert says in str(caught.value)
    # Only where it is the module itself that was not found.
    assert ("sys.path" in str(caught.value)) is name.startswith("absent")


# --- files --------------------------------------------------------------------------------------------------------------------------------


def test_one_file_is_loaded_and_nothing_stays(site) -> None:
    path = site(
        HELPER,
        """
        from sglang.kernels.ops.speculative import beside
        from .beside import NUMBER
        import sglang.kernels
        class FusedKVMaterializeHelper:
            number = NUMBER + beside.NUMBER
        """,
    )
    (path.parent / "beside.py").write_text("NUMBER = 4")
    found = fused_kv_class("sglang")
    assert found.number == 8
    assert found.__module__ == HELPER.replace("/", ".").removesuffix(".py")
    assert loaded("sglang") == []


def test_an_engine_that_was_imported_stays_as_it_was(site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site(HELPER, "import sglang\nassert not hasattr(sglang, 'mark')\nclass FusedKVMaterializeHelper: ...\n")
    whole = ModuleType("sglang")
    whole.__path__ = [str(path.parents[3])]
    whole.mark = True
    monkeypatch.setitem(sys.modules, "sglang", whole)
    fused_kv_class("sglang")
    assert loaded("sglang") == ["sglang"]
    assert sys.modules["sglang"] is whole


def test_the_older_place_is_found(site) -> None:
    site("sglang/srt/speculative/triton_ops/fused_kv_materialize.py", "class FusedKVMaterializeHelper: old = True")
    assert fused_kv_class("sglang").old


def test_triton_stands_in_where_vllm_wraps_it(site) -> None:
    site(KERNEL, "from vllm.triton_utils import tl, triton\ndef store_context_kv(): ...\n")
    assert fused_kv_class("vllm") is vllm_context.VLLMContextKV
    assert loaded("vllm") == []


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_package_that_is_not_installed_is_named_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        MissingDependencyError, match=f"{name} is not installed.*pip install --no-deps {name}=="
    ) as caught:
        fused_kv_class(name)
    assert caught.value.key == name


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("sglang/elsewhere.py", "", "has no sglang/kernels/ops/speculative/fused_kv_materialize.py or sglang/srt/"),
        (HELPER, "class Renamed: ...", "fused_kv_materialize.py has no FusedKVMaterializeHelper"),
        (
            HELPER,
            "import sglang.srt.absent",
            "does not load by itself (ModuleNotFoundError: No module named 'sglang.srt",
        ),
        (HELPER, "raise ValueError('no GPU')", "does not load by itself (ValueError: no GPU)"),
    ],
)
def test_a_file_that_is_not_as_it_was_is_named(site, file: str, text: str, says: str) -> None:
    site(file, text)
    with pytest.raises(MissingDependencyError) as caught:
        fused_kv_class("sglang")
    assert says in str(caught.value)
    assert "pip install --no-deps sglang==0.5.23" in str(caught.value)
    assert loaded("sglang") == []


def test_importing_the_names_imports_no_torch() -> None:
    code = "import sys, pytest_specdecode.engines.subjects; print({'torch', 'triton', 'sglang', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- the adapter around vLLM's function ---------------------------------------------------------------------------------------------------


def stored_eagerly(kv, weight, positions, rope, cache_ptrs, slots, cache, eps, scale_ptrs=None):
    """What vLLM's function is documented to do, in plain torch: `cache` is all layers' memory, and each pointer says where one starts."""
    tokens, layers, _, _, dim = kv.shape
    page = cache.shape[2]
    for layer in range(layers):
        first = (int(cache_ptrs[layer]) - cache.data_ptr()) // cache.element_size() // cache.stride(0)
        key, value = kv[:, layer, 0].float(), kv[:, layer, 1]
        key = key * torch.rsqrt(key.square().mean(-1, keepdim=True) + eps) * weight[layer].float()
        key = key.to(kv.dtype).float()
        cos, sin = rope[positions][:, None].float().chunk(2, dim=-1)
        one, two = key.chunk(2, dim=-1)
        key = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)
        for token in range(tokens):
            at = int(slots[token])
            row = cache[first + at // page, :, at % page]
            row[:, :dim], row[:, dim:] = key[token], value[token]


class Adapter(VLLM):
    known_gaps = VLLM_GAPS

    @staticmethod
    def build(*args, **kwargs):
        return vllm_context.VLLMContextKV(*args, **kwargs)


HELD = {name: run for name, run in fixed_cases(Adapter).items() if name not in VLLM_GAPS and name != "far-offsets"}


@pytest.mark.parametrize("name", HELD)
def test_the_adapter_holds_what_vllm_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eager function in the kernel's place. There is no kernel whose offsets could wrap."""
    monkeypatch.setattr(vllm_context, "_store_context_kv", lambda: stored_eagerly)
    HELD[name]()


def test_the_adapter_takes_layer_0s_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With K so small that another epsilon is seen: right where all layers have one, whichever it is, and wrong in layer 1 where not."""
    monkeypatch.setattr(vllm_context, "_store_context_kv", lambda: stored_eagerly)
    for eps in (1e-6, 1e-3):
        Adapter().test_serves_or_rejects(shape={"epsilons": (eps, eps)})
    with pytest.raises(NumericsError, match="layer=1"):
        Adapter().test_serves_or_rejects(shape={"epsilons": (1e-3, 1e-6)})


def test_the_adapter_refuses_what_vllm_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the head that is turned, which the kernel would turn whole."""
    monkeypatch.setattr(vllm_context, "_store_context_kv", lambda: stored_eagerly)
    with pytest.raises(NotImplementedError, match="turns whole heads: rotary_dim is 6, head_dim is 16"):
        Adapter().test_serves(shape={"rotary_dim": 6})


def test_the_adapter_grows_a_table_up_to_its_length_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    monkeypatch.setattr(vllm_context, "_store_context_kv", lambda: lambda *args: rows.append(args[3].shape[0]))
    layer = unit_layer(0, head_dim=4, hidden_size=2)
    path = vllm_context.VLLMContextKV([layer], layer.self_attn.rotary_emb, 2, 4, torch.device("cpu"))
    assert layer.self_attn.rotary_emb.cos_sin_cache.shape[0] == 256
    for position in (3, 300, 5000):
        path.materialize(torch.ones(1, 2), torch.tensor([position]), lambda *_: None)
    assert rows[0] == 256
    assert 300 < rows[1] <= 4096
    assert rows[2] == 4096


# --- the page -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engines_page", ROOT / "tools" / "engines_page.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_engines_has_every_row_and_reason(
    engines_page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be said of it without the engines; the figures are held against a run where the packages are fetched."""
    monkeypatch.setattr(engines_page, "missing", lambda subject: True)
    assert list(engines_page.faults(engines_page.PAGE.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "says"),
    [
        ("interpreted", "compiled", "its first paragraphs are not the tool's"),
        (
            "| `one-token` | holds |  |  |\n",
            "",
            "SGLang: FusedKVMaterializeHelper: the rows are not the contract's: ['one-token']",
        ),
        ("| `one-token` | holds |", "| `one-token` | crashed |", "one-token is crashed, which is not what is declared"),
        ("offsets are 32 bits wide |", "offsets are short |", "the reason of far-offsets is not the one declared"),
        ("sglang 0.5.23,", "sglang 0.5.22,", "not measured with 0.5.23"),
        ("## vLLM: store_context_kv", "## vLLM", "no section on vLLM: store_context_kv"),
    ],
)
def test_a_page_that_is_not_current_is_seen(
    engines_page: ModuleType, monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str, says: str
) -> None:
    monkeypatch.setattr(engines_page, "missing", lambda subject: True)
    text = engines_page.PAGE.read_text(encoding="utf-8")
    assert pattern in text
    assert says in "\n".join(engines_page.faults(text.replace(pattern, replacement, 1)))


def test_gaps_are_properties() -> None:
    assert set(SGLANG_GAPS) <= set(SGLang.properties())
    assert set(VLLM_GAPS) <= set(VLLM.properties())
