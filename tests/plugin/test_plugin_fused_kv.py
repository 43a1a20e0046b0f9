"""--draft-fused-kv: somebody's own stacked path in the place of ours.

What goes wrong without this file: a class that is named and not run; a traceback where its name is wrong; a class that only an installed
package could hold; a report that does not say whose numbers it holds; fixtures that still give ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.tensor  # noqa: F401 - an inner run would import it, and it cannot be imported twice

Run = Callable[..., pytest.RunResult]

CHECKS = "--draft-checks=fused-kv.matches-reference,fused-kv.odd-layers,fused-kv.calls"

MINE = """
    from pytest_specdecode import FusedKV
    from pytest_specdecode.fused_kv import facts_of

    class Mine(FusedKV):
        team = "kernels"

    class Trusting(FusedKV):
        def _validated(self, layers):
            return tuple(facts_of(layer) for layer in layers)

    class Refusing:
        def __init__(self, *args):
            raise ValueError("no fused path for these layers: built without it")

    class Outer:
        Inner = Mine

    number = 7
"""


@pytest.fixture(autouse=True)
def _our_paths(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(our_paths=MINE)


def _refused(result: pytest.RunResult, *texts: str) -> None:
    assert result.ret == 4
    (line,) = [line for line in (*result.outlines, *result.errlines) if line]
    assert line.startswith("ERROR: --draft-fused-kv=")
    for text in texts:
        assert text in line


def test_a_class_beside_the_tests_is_run_and_named(run: Run, pytester: pytest.Pytester) -> None:
    result = run(CHECKS, "--draft-fused-kv=our_paths:Mine", "--draft-report=r.json", "draft-model")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["draft-fused-kv: our_paths:Mine", "*fused-kv.odd-layers: our_paths:Mine: refuses 15 of 15 axes"]
    )
    (draft,) = json.loads((pytester.path / "r.json").read_text())["drafts"]
    assert draft["fused_kv"] == "our_paths:Mine"


def test_what_it_serves_wrong_fails_the_run(run: Run) -> None:
    result = run(CHECKS, "--draft-fused-kv=our_paths:Trusting", "draft-model")
    assert result.ret == 1
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*our_paths:Trusting serves layers that differ in rope-theta (*) wrong: layer 1: K is*"]
    )


def test_a_refusal_is_shown_in_its_own_words(run: Run) -> None:
    result = run(CHECKS, "--draft-fused-kv=our_paths:Refusing", "draft-model")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*refuses this draft's layers: ValueError: no fused path for these layers: built without it"]
    )


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("", ["is empty"]),
        ("sglnag", ["did you mean sglang"]),
        ("nowhere_at_all:Path", ["nowhere_at_all", "cannot be imported"]),
        ("our_paths:Mien", ["no attribute 'Mien'", "did you mean 'Mine'"]),
        ("our_paths:number", ["int", "cannot be called"]),
        ("our_paths", ["no fused-KV path is called"]),
    ],
)
def test_a_bad_value_is_one_line_and_status_4(run: Run, value: str, texts: list[str]) -> None:
    _refused(run(f"--draft-fused-kv={value}"), *texts)


def test_a_module_that_breaks_is_one_line(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(breaks="raise RuntimeError('no GPU\\nhere')")
    _refused(run("--draft-fused-kv=breaks:Path"), "RuntimeError: no GPU here")


def test_an_engine_that_is_not_installed_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_specdecode.engines.subjects import installed

    monkeypatch.setattr(installed, "_folder", lambda package: None)
    installed.sglang_helper.cache_clear()
    _refused(run("--draft-fused-kv=sglang"), "sglang is not installed", "pip install")


def test_the_ini_twin_is_read_from_the_rootdir_and_beaten_by_the_command_line(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\ndraft_fused_kv = our_paths:Outer.Inner\n")
    result = run("--draft-checks=fused-kv.matches-reference", "draft-model")
    result.stdout.fnmatch_lines(["draft-fused-kv: our_paths:Outer.Inner"])
    result = run("--draft-checks=fused-kv.matches-reference", "--draft-fused-kv=ours", "draft-model")
    result.stdout.fnmatch_lines(["draft-fused-kv: ours"])


def test_without_a_draft_nothing_was_judged(run: Run) -> None:
    result = run("--draft-fused-kv=our_paths:Mine", model=None)
    result.stdout.fnmatch_lines(["WARNING: --draft-fused-kv: no draft was judged, since --draft-model=DIR is missing"])


def test_the_fixtures_give_the_named_path(run: Run, pytester: pytest.Pytester) -> None:
    """With what a test of ours may ask for, and what the class itself has."""
    pytester.makepyfile(
        """
        import torch
        from our_paths import Mine

        def test_it(fused_kv, make_fused_kv, fused_kv_reference):
            assert type(fused_kv.subject) is type(make_fused_kv().subject) is Mine
            assert fused_kv.team == "kernels"
            context = torch.randn(2, fused_kv.hidden_size).to(fused_kv.device, fused_kv.dtype)
            k, v = fused_kv.compute(context, torch.tensor([3, 900]))
            due = fused_kv_reference(context, torch.tensor([3, 900]))
            assert (k - due[0]).abs().max() < 0.05
            assert v.shape == due[1].shape == (fused_kv.num_layers, 2, fused_kv.num_kv_heads, fused_kv.head_dim)
            assert fused_kv.compute(context[:0], torch.tensor([], dtype=torch.int64))[0].shape == (2, 0, 2, 32)
        """
    )
    file = "test_the_fixtures_give_the_named_path.py"
    run("--draft-fused-kv=our_paths:Mine", "--deselect=draft-model", file).assert_outcomes(passed=1, deselected=None)


def test_a_fixture_fails_in_the_words_of_a_refusal(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(fused_kv): pass")
    result = run("--draft-fused-kv=our_paths:Refusing", "--deselect=draft-model")
    result.assert_outcomes(errors=1, deselected=None)
    result.stdout.fnmatch_lines(
        ["*our_paths:Refusing does not serve the layers of dflash-tiny: ValueError: no fused path for these layers: *"]
    )


def test_a_kernel_of_its_own_is_interpreted(run: Run, pytester: pytest.Pytester) -> None:
    """Launched by the class itself, with triton's own brackets."""
    pytester.makepyfile(
        with_kernel="""
        import torch, triton
        import triton.language as tl
        from pytest_specdecode import FusedKV

        @triton.jit
        def shifted(source, out, n, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(source + at, mask=at < n), mask=at < n)

        @triton.jit
        def past_the_end(source, out, n, BLOCK: tl.constexpr):
            at = tl.arange(0, BLOCK)
            tl.store(out + at, tl.load(source + at, mask=at <= n), mask=at < n)

        class Right(FusedKV):
            kernel = shifted

            def compute(self, ctx_hidden, positions):
                if len(positions):
                    copy = torch.empty_like(positions)
                    self.kernel[(1,)](positions.contiguous(), copy, len(positions), BLOCK=32)
                    positions = copy
                return super().compute(ctx_hidden, positions)

        class Beyond(Right):
            kernel = past_the_end
        """
    )
    pytester.makepyfile(
        """
        import torch

        def test_it(fused_kv):
            fused_kv.compute(torch.zeros(2, fused_kv.hidden_size).to(fused_kv.dtype), torch.tensor([3, 900]))
        """
    )
    file = "test_a_kernel_of_its_own_is_interpreted.py"
    run(CHECKS, "--draft-fused-kv=with_kernel:Right", "draft-model", file).assert_outcomes(passed=4)
    result = run(CHECKS, "--draft-fused-kv=with_kernel:Beyond", "draft-model")
    result.stdout.fnmatch_lines(
        ["*breaks on this draft's layers: KernelMemoryError: past_the_end: load of 8 bytes out of*"]
    )


def test_workers_run_the_named_path(run: Run, pytester: pytest.Pytester, dflash: Path) -> None:
    pytest.importorskip("xdist")
    result = pytester.runpytest_subprocess(
        *("-n", "1", f"--draft-model={dflash}", "--draft-checks=fused-kv.matches-reference", "draft-model"),
        "--draft-fused-kv=our_paths:Refusing",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*our_paths:Refusing refuses this draft's layers: *"])
