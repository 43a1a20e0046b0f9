"""Values that a file may hold and arithmetic cannot take: each is a `LayerBuildError` with the key, never another exception.

What goes wrong without this file: a checkpoint that makes a check break in place of failing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_specdecode import DraftError, check_draft, testing
from pytest_specdecode.errors import LayerBuildError, StackRangeError
from pytest_specdecode.families import load
from pytest_specdecode.layers import Linear, RMSNorm, RotaryEmbedding
from pytest_specdecode.spec import RopeSpec

YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("field", "value"), [("beta_fast", -1), ("beta_fast", 1e-308), ("beta_slow", 1e308), ("beta_slow", -2.0)]
)
def test_yarn_turns_out_of_any_range(field: str, value: float) -> None:
    rope = RopeSpec(
        theta=1e6, rope_type="yarn", rotary_dim=32, scaling={**YARN, field: value}, max_position_embeddings=64
    )
    with pytest.raises(LayerBuildError, match=field):
        RotaryEmbedding(rope, 32)


def test_a_bias_in_no_computed_dtype_is_named() -> None:
    with pytest.raises(LayerBuildError, match=r"fc\.weight: the bias is uint8"):
        Linear(torch.ones(2, 3), torch.ones(2, dtype=torch.uint8), name="fc.weight")


def test_a_bias_in_another_float_dtype_is_loaded_in_the_weights() -> None:
    linear = Linear(torch.ones(2, 3).bfloat16(), torch.tensor([0.5, -1.0]), name="fc.weight")
    assert linear(torch.zeros(1, 3).bfloat16()).tolist() == [[0.5, -1.0]]


def test_an_eight_bit_norm_is_refused() -> None:
    with pytest.raises(LayerBuildError, match="16 bits or more"):
        RMSNorm(torch.ones(4).to(torch.float8_e4m3fn), 1e-6)


def test_a_checkpoint_with_such_values_fails_and_nothing_breaks(tmp_path: Path) -> None:
    scaling = {**YARN, "type": "yarn", "beta_fast": -1, "mscale": 1.0, "mscale_all_dim": 1.0}
    report = check_draft(testing.write_tiny(tmp_path, "eagle3-mla", rope_scaling=scaling))
    assert report["layers.build"].status == "failed"
    assert "beta_fast" in report["layers.build"].findings[0].where
    assert not [result for result in report if "the check itself broke" in result.message]


@pytest.mark.parametrize("position", [1 << 22, 10**8, 1 << 40, (1 << 62) + 1])
def test_a_position_that_no_table_is_made_for(tmp_path: Path, position: int) -> None:
    """The error is one line, and no table is grown towards it."""
    from pytest_specdecode.checkpoint import Checkpoint

    stack = load(Checkpoint.open(testing.write_tiny(tmp_path, "dflash"))).fused_kv()
    with pytest.raises(StackRangeError, match=f"max_position={position}, cache_len="):
        stack.compute(torch.zeros(1, stack.hidden_size), torch.tensor([position]))
    assert issubclass(StackRangeError, DraftError)
