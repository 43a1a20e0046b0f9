"""Write the checkpoints that the examples and the README use: three good ones, and one broken copy per common fault.

    python examples/make_checkpoints.py

Everything is made from fixed seeds, so a second run writes the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pytest_specdecode import testing

HERE = Path(__file__).parent


def main() -> None:
    """Write all checkpoints."""
    good = HERE / "checkpoints"
    testing.write_tiny(good / "dflash-tiny", "dflash", seed=1)
    testing.write_tiny(good / "eagle3-tiny", "eagle3", seed=2)
    testing.write_tiny(good / "kimi-eagle3-mla-tiny", "eagle3-mla", seed=3)

    broken = HERE / "broken"
    whole = testing.tiny_config("eagle3-mla")
    without_rank = {key: value for key, value in whole.items() if key != "q_lora_rank"}
    testing.write_checkpoint(
        broken / "kimi-no-q-lora-rank", without_rank, testing.random_tensors(whole, "eagle3-mla", seed=3)
    )
    testing.write_tiny(broken / "dflash-uneven-kv-heads", "dflash", seed=1, edit=halve_kv_heads_of_layer_1)
    testing.write_tiny(broken / "eagle3-no-lm-head", "eagle3", seed=2, edit=drop_head)


def halve_kv_heads_of_layer_1(tensors: dict[str, torch.Tensor]) -> None:
    """Leave layer 1 with one KV head where the configuration and layer 0 have two."""
    for name in ("k_proj", "v_proj"):
        key = f"layers.1.self_attn.{name}.weight"
        tensors[key] = tensors[key][: tensors[key].shape[0] // 2]


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    """Leave out the head that the configuration announces."""
    del tensors["lm_head.weight"]


if __name__ == "__main__":
    main()
