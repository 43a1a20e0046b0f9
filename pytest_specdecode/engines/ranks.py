"""The rule that engines share about tensor-parallel ranks: query heads divide among them, KV heads divide or are replicated."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pytest_specdecode.engines.base import Refusal, ServingRule
from pytest_specdecode.engines.options import ServeOptions
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import Outcome
from pytest_specdecode.fused_kv.tensor_parallel import why_not_divided
from pytest_specdecode.spec import MLASpec
from pytest_specdecode.target import Target

#: Larger numbers of ranks are not proposed.
_MOST = 64


def heads_divide(families: Collection[str], outcome: Outcome) -> ServingRule:
    """The rule for an engine that serves `families`, which does `outcome` where a draft's heads do not divide."""

    def rule(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
        ranks, spec = serve["tp"], draft.spec
        # With data-parallel attention the ranks of attention are fewer, and how many is not among the options.
        if ranks is None or ranks < 2 or serve["dp-attention"] or spec is None or spec.family not in families:
            return
        for layer in spec.layers:
            heads = getattr(layer.attention, "num_heads", None)
            # A latent row is one KV head that every rank keeps whole.
            kv_heads = 1 if isinstance(layer.attention, MLASpec) else getattr(layer.attention, "num_kv_heads", None)
            if not heads or not kv_heads or (reason := why_not_divided(heads, kv_heads, ranks)) is None:
                continue
            fits = [
                count for count in range(1, min(ranks, _MOST + 1)) if why_not_divided(heads, kv_heads, count) is None
            ]
            yield Refusal(
                topic="algorithm",
                message=f"{reason}, in layer {layer.index} of the draft",
                outcome=outcome,
                option="tp",
                got=ranks,
                due=f"tp of {', '.join(map(str, fits))}",
                fix=f"start with tp={fits[-1]}, or leave the draft on one rank where the engine can",
            )
            return

    return rule
