"""What importing costs. Every pytest run in an environment loads the plugin, so each of these would make all of them slower by up to
seconds: torch, triton, numpy, safetensors or hypothesis imported by the package, by the plugin, by collecting, or by checks that do not say
that they need tensors.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "triton", "numpy", "hypothesis", "safetensors", "transformers")

PRINT_LOADED = f"import sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "pytest_specdecode",
        "pytest_specdecode.plugin",
        "pytest_specdecode.plugin.collection",
        "pytest_specdecode.plugin.reporting",
        "pytest_specdecode.plugin.suite",
        "pytest_specdecode.api",
        "pytest_specdecode.checks",
        "pytest_specdecode.families",
        "pytest_specdecode.engines",
        "pytest_specdecode.engines.subjects",
        "pytest_specdecode.report",
        "pytest_specdecode.fused_kv",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    assert python(f"import {module}; {PRINT_LOADED}") == "[]"


def test_the_plugin_loads_no_other_part_of_the_package() -> None:
    code = "import pytest_specdecode.plugin, sys; print([m for m in sys.modules if m.startswith('pytest_specdecode')])"
    parts = ["", ".plugin", ".plugin.fixtures", ".plugin.options"]
    assert sorted(eval(python(code))) == [f"pytest_specdecode{part}" for part in parts]


def test_an_ordinary_run_loads_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"import sys\ndef test_it(): assert not set({HEAVY!r}) & set(sys.modules)")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_collecting_and_judging_headers_loads_no_torch(pytester: pytest.Pytester, tmp_path: Path) -> None:
    from pytest_specdecode.testing import write_tiny

    write_tiny(tmp_path / "draft", "dflash")
    pytester.makeconftest(
        f"""
        import sys

        def pytest_unconfigure():
            print("heavy:", sorted(set({HEAVY!r}) & set(sys.modules)))
        """
    )
    model = f"--draft-model={tmp_path / 'draft'}"
    for args in (["--collect-only", "-q"], ["--draft-checks=files,config,rope,taps,vocabulary,dflash"]):
        # Hypothesis's own plugin imports hypothesis for its summary.
        result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", model, "--draft-device=auto", *args)
        assert result.ret == 0
        result.stdout.fnmatch_lines(["heavy: [[]]"])


_WITHOUT_VALUES = """
import sys
from pathlib import Path
from pytest_specdecode import check_draft
from pytest_specdecode.checks import REGISTRY
chosen = [id for id, item in REGISTRY.items() if "tensors" not in item.needs]
for path in sorted(Path(sys.argv[1]).iterdir()):
    for id in chosen:
        result = check_draft(path, sys.argv[2], checks=[id], serve="context-length=4096 tp=2")[id]
        loaded = {"torch", "numpy", "safetensors"} & set(sys.modules)
        assert not loaded, f"{id} of {path.name} imports {sorted(loaded)}"
        print(path.name, id, result.status)
"""


def _write_with_scales_and_copies(path: Path, family: str) -> None:
    """The tiny draft with all that a check might want to read a value of: scales of the cache, and a copy of each tensor that is tied."""
    import torch

    from pytest_specdecode import testing

    tied = {"tie_weights": True} if family == "mlp-speculator" else {}
    config = testing.tiny_config(family, **tied)
    tensors = testing.random_tensors(config, family)
    for tensor in testing.expected_tensors(config, family)[1]:
        if tensor.same_as is not None:
            tensors[tensor.name] = tensors[tensor.same_as].clone()
    tables = [tensors.get(name) for name in ("embed_tokens.weight", "lm_head.weight")]
    if tables[0] is not None and tables[1] is not None and tables[0].shape == tables[1].shape:
        tensors["lm_head.weight"] = tables[0].clone()
        config = {**config, "tie_word_embeddings": True}
    for name, dtype in (("k_scale", torch.bfloat16), ("v_scale", torch.float32)):
        tensors[f"layers.0.self_attn.attn.{name}"] = torch.tensor(0.5, dtype=dtype)
    testing.write_checkpoint(path, config, tensors, rename=testing.stored_names(config, family))


def test_no_check_that_does_without_tensors_imports_torch(tmp_path: Path) -> None:
    """On every family, beside a target and with serving options; no check is so declared for want of looking."""
    from pytest_specdecode.families import FAMILIES

    for family in FAMILIES:
        _write_with_scales_and_copies(tmp_path / "drafts" / family.name, family.name)
    (tmp_path / "target").mkdir()
    config = {"model_type": "qwen3", "hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 16, "rope_theta": 5e5}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    places = [str(tmp_path / name) for name in ("drafts", "target")]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_VALUES, *places], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = {tuple(line.split()[:2]): line.split()[2] for line in done.stdout.splitlines()}
    assert said["dflash", "weights.scales"] == said["eagle3", "weights.scales"] == "warned"
    assert said["mlp-speculator", "weights.unexpected"] == "passed"


def test_no_hypothesis_entry_point_is_registered() -> None:
    groups = {entry.group for entry in importlib.metadata.distribution("pytest-specdecode").entry_points}
    assert "hypothesis" not in groups
    assert "pytest11" in groups
