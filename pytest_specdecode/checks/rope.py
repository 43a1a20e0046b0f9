"""Is the rotary embedding stated, everywhere the same?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check, require_layers
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import RopeSpec


@check(
    "rope.theta-stated",
    title="rope_theta is stated somewhere",
    why="Engines fill in 10000 or 1000000; the wrong base costs little on short prompts and everything on long ones.",
)
def theta_stated(context: Context) -> Iterator[Finding]:
    """The layers for which no place states a base."""
    ropes = _ropes(context)
    silent = [index for index, rope in enumerate(ropes) if rope.theta is None]
    if silent:
        whole = len(silent) == len(ropes)
        yield context.fail(
            "rope_theta is not stated" + ("" if whole else f" for layers {', '.join(map(str, silent))}"),
            where="config.json: rope_theta",
            got=None,
            due="the base that the draft was trained with",
            fix="state rope_theta, flat or in rope_parameters",
            fault="theta-missing",
        )


@check(
    "rope.theta-agrees",
    title="all places that state rope_theta agree",
    why="Readers look in different places first, so two values are two drafts.",
    needs=("config",),
)
def theta_agrees(context: Context) -> Iterator[Finding]:
    """Disagreement inside the file; a difference from the target is a warning."""
    ropes = _ropes(context)
    stated = {item.key: item.value for rope in ropes for item in rope.theta_stated}
    if not stated:
        raise Inconclusive("rope_theta is not stated; see rope.theta-stated")
    for rope in ropes:
        if len({item.value for item in rope.theta_stated}) > 1:
            yield context.fail(
                "rope_theta is stated with different values",
                where=f"config.json: {', '.join(item.key for item in rope.theta_stated)}",
                got={item.key: item.value for item in rope.theta_stated},
                due="one value",
                fix="leave the trained one, or write it to every place",
                fault="theta-disagrees",
            )
            break
    target = None if context.target is None else _target_theta(context.target)
    if target is not None and all(rope.theta != target for rope in ropes):
        yield context.warn(
            "rope_theta is not the target's; right where the draft was trained so",
            where=f"config.json: {next(iter(stated))}",
            got=next(iter(stated.values())),
            due=target,
        )


def _ropes(context: Context) -> list[RopeSpec]:
    require_layers(context)
    ropes = [layer.attention.rope for layer in context.spec.layers if layer.attention is not None]
    if not ropes:
        raise Skip("no layer of this draft has attention, so nothing rotates")
    return ropes


def _target_theta(config: object) -> float | None:
    places: list[object] = [config]
    if isinstance(config, dict):
        places += [config.get("rope_parameters"), config.get("text_config")]
        text = config.get("text_config")
        if isinstance(text, dict):
            places.append(text.get("rope_parameters"))
    for place in places:
        theta = place.get("rope_theta") if isinstance(place, dict) else None
        if isinstance(theta, (int, float)) and not isinstance(theta, bool):
            return float(theta)
    return None
