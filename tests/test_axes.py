"""An axis is whole or it is a trap: listed but not checked, checked but never tried, refused in words that no page explains.

So each entry of `AXES` must have its validator, its strategy, its case in the parametrised test, its check and its lines in
`docs/fused-kv.md`, with the text that is really raised. Whoever adds an axis finds here what is still missing.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from hypothesis import Phase, find, settings

from pytest_specdecode import AXES, FusedKV
from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.errors import FusedKVError
from pytest_specdecode.fused_kv import SOFT_AXES, LayerFacts, mismatches
from pytest_specdecode.strategies import heterogeneous_stacks

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "fused-kv.md").read_text(encoding="utf-8")
LOOKING = settings(database=None, deadline=None, derandomize=True, max_examples=300, phases=[Phase.generate])

#: One layer's facts, and for each axis what a second layer says differently.
FACTS = {
    "num_kv_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "is_neox_style": True,
    "rope_theta": 1e4,
    "rope_scaling": (),
    "hidden_size": 16,
    "dtype": "bfloat16",
    "bias": False,
    "k_norm": "per-head",
    "norm_kind": "rms",
    "v_head_dim": 8,
    "value_scale": 1.0,
    "q_size": 32,
}
OTHER = {
    "num-kv-heads": {"num_kv_heads": 4},
    "head-dim": {"head_dim": 16},
    "rotary-dim": {"rotary_dim": 4},
    "rope-style": {"is_neox_style": False},
    "rope-theta": {"rope_theta": 1e6},
    "rope-scaling": {"rope_scaling": (("factor", 2.0), ("rope_type", "linear"))},
    "hidden-size": {"hidden_size": 32},
    "dtype": {"dtype": "float32"},
    "bias": {"bias": True},
    "k-norm": {"k_norm": "none"},
    "norm-kind": {"norm_kind": "gemma"},
    "v-head-dim": {"v_head_dim": 4},
    "value-scale": {"value_scale": 0.5},
    "q-size": {"q_size": 64},
    "quantization": {"quantization": "fp8"},
}


def rows(heading):
    """The rows of the table below a heading, by their first cell."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {first.strip(" `"): rest for first, *rest in cells}


def one_odd_layer(axis):
    return find(
        heterogeneous_stacks(axis=axis), lambda broken: broken.odd_layer > 0 and plain(broken), settings=LOOKING
    )


def plain(broken):
    """Stated otherwise, not a table that does not follow what is stated."""
    return broken.stack.configs[broken.odd_layer].table_breaks_at is None


def test_axes_are_named_once():
    assert len(set(AXES)) == len(AXES)
    assert not set(AXES) & set(SOFT_AXES)


@pytest.mark.parametrize("axis", AXES)
def test_it_has_a_validator(axis):
    layers = [LayerFacts(**FACTS), LayerFacts(**{**FACTS, **OTHER[axis]})]
    first = next(mismatches(layers, num_kv_heads=2, head_dim=8, rotary_dim=8, is_neox_style=True))
    assert (first.axis, first.layer) == (axis, 1)


@pytest.mark.parametrize("axis", [*AXES, *SOFT_AXES])
def test_it_has_a_strategy(axis):
    assert one_odd_layer(axis).axis == axis


@pytest.mark.parametrize("axis", AXES)
def test_it_has_a_check(axis):
    assert f"fused-kv.{axis}" in REGISTRY


def test_it_has_a_parametrised_case():
    module = load(ROOT / "tests" / "strategies" / "test_heterogeneous_stacks.py")
    test = module.test_one_odd_layer_is_refused_with_its_text_axis_and_layer
    (mark,) = test.pytestmark
    assert mark.args == ("axis", AXES)
    assert tuple(module.TEXTS) == AXES


def test_it_has_a_line_that_says_what_it_means():
    assert tuple(rows("The axes")) == AXES
    assert all(meaning and text for meaning, text in rows("The axes").values())


def test_it_has_a_line_that_says_what_engines_do():
    table = rows("What the engines do when one layer is odd")
    assert tuple(table) == (*AXES, *SOFT_AXES)
    assert all(len(cells) == 3 and all(cells) for cells in table.values())


@pytest.mark.parametrize("axis", AXES)
def test_the_documented_text_is_the_one_that_is_raised(axis):
    broken = one_odd_layer(axis)
    with pytest.raises(FusedKVError) as caught:
        broken.stack.build(FusedKV)
    _, text = rows("The axes")[axis]
    pattern = re.sub(r"\b[EGR]\b", ".+", re.escape(text)).replace("layer\\ L", f"layer {broken.layer}")
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)


def test_the_documented_tests_run():
    *_, block = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    quick = block.replace("deadline=None", "deadline=None, max_examples=20, derandomize=True")
    assert quick != block
    names = {}
    exec(compile(quick, "fused-kv.md", "exec"), names)
    names["test_what_can_be_served_is_accepted"]()
    names["test_what_cannot_is_refused"]()


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
