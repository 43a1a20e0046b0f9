"""RoPE as configurations state it, in every spelling.

transformers 4 writes `rope_theta` flat and `rope_scaling` beside it; transformers 5 writes one `rope_parameters`; Gemma keeps one of
those per layer type. Readers look at `rope_parameters` first, then at `rope_scaling`, then at the flat key; every place that states a
theta is kept, so that a check can compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_specdecode.families.config import Section
from pytest_specdecode.spec import Extent, RopeSpec, Stated

#: Keys of a scaling dictionary that are not fields of the scaling itself.
_NOT_SCALING = ("rope_theta", "rope_type", "type", "full_attention", "sliding_attention")


def read_rope(
    section: Section, *, head_dim: Extent, is_neox_style: bool = True, layer_type: str = "full_attention"
) -> RopeSpec:
    """The rotary embedding that `section` states for a layer of `layer_type` with heads of `head_dim`."""
    parameters = section.section("rope_parameters")
    per_type = parameters.section(layer_type)
    scaling = section.section("rope_scaling")
    places = [per_type, parameters, scaling]
    stated = [
        Stated(key=place.path("rope_theta"), value=theta)
        for place in (*places, section)
        if (theta := place.number("rope_theta")) is not None
    ]
    source = next((place for place in places if _scaling_fields(place.values) or _rope_type(place)), None)
    rope_type = (_rope_type(source) if source is not None else None) or "default"
    factor = next(
        (value for place in (*places, section) if (value := place.fraction("partial_rotary_factor")) is not None), None
    )
    rotary_dim = head_dim
    if factor is not None and head_dim is not None and rope_type != "proportional":
        rotary_dim = int(head_dim * factor)
    return RopeSpec(
        theta=float(stated[0].value) if stated else None,
        rope_type=rope_type,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
        scaling={} if source is None or rope_type == "default" else _scaling(source, section, rope_type, factor),
        max_position_embeddings=section.extent("max_position_embeddings"),
        theta_stated=tuple(stated),
    )


def _scaling(source: Section, section: Section, rope_type: str, factor: float | None) -> dict[str, Any]:
    """The scaling's fields, with those that some files state beside the dictionary and not in it."""
    fields = _scaling_fields(source.values)
    original = section.extent("original_max_position_embeddings")
    if original is not None:
        fields.setdefault("original_max_position_embeddings", original)
    if rope_type == "proportional" and factor is not None:
        fields.setdefault("partial_rotary_factor", factor)
    return fields


def _rope_type(place: Section | None) -> str | None:
    return None if place is None else place.text("rope_type", "type")


def _scaling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _NOT_SCALING and value is not None}
