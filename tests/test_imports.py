"""What importing costs. Every pytest run in an environment loads the plugin, so each of these would make all of them slower by up to
seconds: torch, triton, numpy, safetensors or hypothesis imported by the package, by the plugin, by collecting, or by checks that read
headers only.
"""

from __future__ import annotations

import importlib.metadata
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


def test_no_hypothesis_entry_point_is_registered() -> None:
    groups = {entry.group for entry in importlib.metadata.distribution("pytest-specdecode").entry_points}
    assert "hypothesis" not in groups
    assert "pytest11" in groups
