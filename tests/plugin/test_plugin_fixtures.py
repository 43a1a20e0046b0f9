"""The fixtures in a user's tests. Caught here: a fixture that @given refuses; one that is built once per test, or that a test can spoil
for the next; a stacked path whose values are not the reference's; a skip without the way out; --draft-require that lets a skip pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]

EVERY = (
    "draft",
    "draft_spec",
    "draft_layers",
    "fused_kv",
    "fused_kv_reference",
    "draft_context",
    "make_draft_layers",
    "make_fused_kv",
)


def test_the_stacked_path_is_near_the_reference_under_given(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch
        from hypothesis import given, settings, strategies as st

        seen = set()

        @settings(deadline=None, max_examples=5, database=None)
        @given(tokens=st.integers(1, 4), seed=st.integers(0, 99))
        def test_it(draft_spec, fused_kv, fused_kv_reference, draft_layers, tokens, seed):
            seen.add(id(fused_kv))
            generator = torch.Generator().manual_seed(seed)
            ctx = torch.randn(tokens, draft_spec.hidden_size, generator=generator).bfloat16()
            positions = torch.arange(tokens) + seed
            written = {}
            fused_kv.materialize(ctx, positions, lambda layer, k, v: written.update({layer: (k, v)}))
            k, v = fused_kv_reference(ctx, positions)
            assert k.dtype == v.dtype == torch.float64
            assert k.shape == (len(draft_layers), tokens, 2, 32)
            for layer, (got_k, got_v) in written.items():
                # Two bfloat16 roundings: of the projection, and of the result.
                torch.testing.assert_close(got_k.double(), k[layer], rtol=2**-6, atol=2**-6)
                torch.testing.assert_close(got_v.double(), v[layer], rtol=2**-7, atol=2**-7)
            assert sorted(written) == [0, 1]

        def test_one_object_for_the_session(fused_kv, draft_layers):
            assert seen == {id(fused_kv)}
            assert draft_layers[0].self_attn.k_norm.weight.dtype == torch.bfloat16
        """
    )
    outcomes = run("--deselect=draft-model").parseoutcomes()
    assert (outcomes["passed"], outcomes.get("failed", 0)) == (2, 0)


def test_factories_give_fresh_objects(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        import torch
        from pytest_specdecode import DraftError

        def test_layers(make_draft_layers, draft_layers):
            first, second = make_draft_layers(), make_draft_layers(dtype=torch.float64)
            assert second[0].self_attn.k_norm.weight.dtype == torch.float64
            with torch.no_grad():
                first[0].self_attn.k_norm.weight.zero_()
            assert draft_layers[0].self_attn.k_norm.weight.any()
            assert make_draft_layers()[0].self_attn.k_norm.weight.any()

        def test_stack(make_fused_kv, make_draft_layers, fused_kv):
            assert make_fused_kv() is not fused_kv
            assert make_fused_kv(dtype=torch.float32, max_position_hint=16).dtype == torch.float32
            layers = make_draft_layers()
            layers[1].self_attn.num_kv_heads = 3
            with pytest.raises(DraftError, match="num_kv_heads"):
                make_fused_kv(layers)
        """
    )
    outcomes = run("--deselect=draft-model").parseoutcomes()
    assert (outcomes["passed"], outcomes.get("failed", 0)) == (2, 0)


def test_without_a_model_tests_are_skipped_and_told_how_to_give_one(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("".join(f"def test_{name}({name}): pass\n" for name in EVERY))
    result = run("-rs", model=None)
    result.assert_outcomes(skipped=len(EVERY))
    result.stdout.fnmatch_lines(
        ["SKIPPED *no draft model: give one with --draft-model=DIR, or with draft_model in the ini file"]
    )


@pytest.mark.parametrize("want", ["model", "all", "gpu,model"])
def test_required_models_are_failures_where_they_are_absent(run: Run, pytester: pytest.Pytester, want: str) -> None:
    pytester.makepyfile("".join(f"def test_{name}({name}): pass\n" for name in EVERY))
    result = run(f"--draft-require={want}", model=None)
    assert result.ret == 1
    result.assert_outcomes(errors=len(EVERY))
    result.stdout.fnmatch_lines(["--draft-require=model: no draft model: give one with *"])


def test_the_target_is_skipped_or_required(run: Run, pytester: pytest.Pytester, eagle3: Path) -> None:
    pytester.makepyfile("def test_it(draft_target): assert draft_target['vocab_size'] == 512")
    result = run("-rs", model=None)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no target: give its directory with --draft-target=DIR*"])
    run("--draft-require=target", model=None).assert_outcomes(errors=1)
    run(f"--draft-target={eagle3}", model=None).assert_outcomes(passed=1)


def test_a_family_without_a_stacked_path_skips_with_its_reason(
    run: Run, pytester: pytest.Pytester, eagle3: Path
) -> None:
    pytester.makepyfile(
        """
        def test_stack(fused_kv): pass
        def test_reference(fused_kv_reference): pass
        def test_make(make_fused_kv): pass
        def test_layers(draft_layers): assert len(draft_layers) == 1
        """
    )
    result = run("--deselect=draft-model", "-rs", model=eagle3)
    assert result.parseoutcomes()["skipped"] == 3
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["SKIPPED *eagle3-tiny has no stacked K/V path: *"])


def test_a_test_runs_once_per_draft(run: Run, pytester: pytest.Pytester, eagle3: Path) -> None:
    pytester.makepyfile("def test_it(draft_spec): print('family', draft_spec.family)\ndef test_plain(): pass")
    result = run(f"--draft-model={eagle3}", "--deselect=draft-model", "-v", "-s")
    result.stdout.fnmatch_lines(["*::test_it[[]dflash-tiny] family dflash"])
    result.stdout.fnmatch_lines(["*::test_it[[]eagle3-tiny] family eagle3"])
    assert result.parseoutcomes()["passed"] == 3


def test_a_narrower_fixture_of_the_user_may_use_them(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def heads(draft_spec):
            return [layer.attention.num_kv_heads for layer in draft_spec.layers]

        class TestMine:
            @pytest.mark.parametrize("index", [0, 1])
            def test_it(self, heads, index):
                assert heads[index] == 2
        """
    )
    result = run("--deselect=draft-model", "-v")
    result.stdout.fnmatch_lines(["*::TestMine::test_it[[]*dflash-tiny*] PASSED*"])
    assert result.parseoutcomes()["passed"] == 2
