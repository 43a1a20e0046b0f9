"""XPress: DFlash whose logits a causal refiner corrects in a few rounds over the whole block.

    x = in_proj [down_h h, down_g mean(h), token_embed prev]
    x[k] += sum over j <= k of mix_l[:, k, j] * x[j]    lane by lane;   x += mlp_down(silu(mlp_gate x) * mlp_up x)
    logits = base + readout x

A round's `prev` are the best tokens of the round before (of the backbone in the first), shifted by one row; row 0 is the anchor, and the
token before the anchor conditions it. With a reduced vocabulary `d2t` is applied between rounds. With `sample_from_anchor` every row drafts
the next token, and the anchor conditions row 0. The layers are DFlash's, and so is the stacked K/V path.

Source: speculators 0.9.0 `models/xpress`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError, LayerBuildError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, TensorSource, unstated
from pytest_specdecode.families.dflash import DFlash
from pytest_specdecode.spec import DraftSpec, Extent, times

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class XPressOptions:
    """What XPress states beyond DFlash.

    Attributes:
        rank: lanes in which the refiner works.
        mlp_ratio: inner width of its MLP over `rank`.
        num_jacobi_passes: rounds at inference.
    """

    rank: Extent = None
    mlp_ratio: Extent = None
    num_jacobi_passes: Extent = None


class XPress(DFlash):
    """XPress in the speculators packaging."""

    name = "xpress"
    title = "XPress"
    packagings: tuple[str, ...] = ("speculators",)
    label = r"XPress"
    own_tensors = ("refiner_head.",)
    tiny: Mapping[str, Any] = {
        "architectures": ["XPressSpeculator"],
        "speculators_model_type": "xpress",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 10, 18],
        "block_size": 8,
        "draft_vocab_size": 256,
        "mask_token_id": 511,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "xpress_rank": 16,
        "xpress_mlp_ratio": 2,
        "num_jacobi_passes": 3,
        "num_target_layers": 20,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "vocab_size": 512,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "layer_types": ["full_attention", "full_attention"],
        },
        "speculators_config": {
            "algorithm": "xpress",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }

    def build_head(self, spec: DraftSpec, source: TensorSource) -> Any:
        """The `Refiner`."""
        from pytest_specdecode.families.building import prefixed
        from pytest_specdecode.layers.linear import known
        from pytest_specdecode.layers.refiner import Refiner

        options = _options(spec)
        sizes = {
            "hidden_size": known(spec.hidden_size, "hidden_size"),
            "vocab_size": known(spec.vocabulary.vocab_size, "vocab_size"),
            "rows": known(spec.vocabulary.head_rows, "vocab_size"),
            "rank": known(options.rank, "xpress_rank"),
            "inner": known(times(options.rank, options.mlp_ratio), "xpress_mlp_ratio"),
            "block_size": known(None if spec.block is None else spec.block.block_size, "block_size"),
        }
        with prefixed("refiner_head"):
            return Refiner(source.under("refiner_head"), **sizes)

    def run_head(self, spec: DraftSpec, head: Any, states: torch.Tensor) -> Any:
        """The bias of one round over a block that is all token 0."""
        return head(states, states.new_zeros(len(states)).long())

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """Both sizes of the refiner must be stated."""
        options = _options(spec)
        return tuple(unstated(xpress_rank=options.rank, xpress_mlp_ratio=options.mlp_ratio))

    def _options(self, view: ConfigView) -> XPressOptions:
        return XPressOptions(
            rank=view.root.extent("xpress_rank"),
            mlp_ratio=view.root.extent("xpress_mlp_ratio"),
            num_jacobi_passes=view.root.extent("num_jacobi_passes"),
        )

    def _head_tensors(self, spec: DraftSpec) -> Iterator[ExpectedTensor]:
        options, hidden, vocabulary = _options(spec), spec.hidden_size, spec.vocabulary
        rank, inner = options.rank, times(options.rank, options.mlp_ratio)
        block = None if spec.block is None else spec.block.block_size
        for name, shape in (
            ("token_embed.weight", (vocabulary.vocab_size, rank)),
            ("down_h.weight", (rank, hidden)),
            ("down_g.weight", (rank, hidden)),
            ("in_proj.weight", (rank, times(3, rank))),
            ("mix_l", (rank, block, block)),
            ("mlp_gate.weight", (inner, rank)),
            ("mlp_up.weight", (inner, rank)),
            ("mlp_down.weight", (rank, inner)),
            ("readout.weight", (vocabulary.head_rows, rank)),
        ):
            yield ExpectedTensor(name=f"refiner_head.{name}", shape=shape)


def _options(spec: DraftSpec) -> XPressOptions:
    if not isinstance(spec.options, XPressOptions):
        raise LayerBuildError("the spec holds no XPress options")
    return spec.options
