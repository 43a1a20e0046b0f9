"""What the library knows of one serving engine.

Three kinds of statement, each with its source: what the engine takes a setting to be (`Reads`), which keys it passes over (`Ignores`), and
what it does about a fault, which is named by a slug (`known`). What is not known is said to be unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_specdecode.engines.options import ServeOptions
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import Outcome, OutcomeKind, Severity
from pytest_specdecode.spec import DraftSpec
from pytest_specdecode.target import Target

#: An outcome, or a function of the draft that gives one.
Known = Outcome | Callable[[DraftSpec], Outcome]

#: The settings that statements may be about, the same for all engines, each with the form of its value. A check that asks for another is
#: a defect, and so is a statement about another.
SETTINGS: Mapping[str, str] = {
    "taps": "ids of the states entering layers (a layer's output is its id plus 1), in the order in which fc reads them: list of int",
    "taps-count": "number of taps that fc is built for: int",
    "rope-theta": "base: float",
    "rope-scaling": "as `fused_kv.stack.normal_scaling` gives it: tuple of pairs, empty where positions are not scaled",
    "is-neox-style": "halves (True) or interleaved pairs: bool",
    "partial-rotary-factor": "share of a head that rotates: float",
    "norm-before-residual": "the residual is the normed hidden state: bool",
    "norm-before-fc": "one norm over the joined taps: bool",
    "fc-norm": "one norm per tap: bool",
    "norm-output": "the recycled state is taken after the final norm: bool",
    "qk-norm": "q and k are normed per head: bool",
    "qkv-bias": "q, k and v have biases: bool",
    "fc-bias": "fc has a bias: bool",
    "layers": "the largest number of layers it takes: int, or None where there is no bound",
    "block-size": "rows of a block: int",
    "mask-token-id": "id of the mask token: int",
    "mask-token": "text of the mask token, which the target's tokenizer is asked for: str",
    "sample-from-anchor": "row 0 already drafts: bool",
    "is-causal": "whether rows of a block look back only: tuple of bool, one per layer",
    "sliding-window": "tokens seen, the row itself included, or None: tuple, one per layer",
    "value-scale": "factor on V: float",
    "draft-vocab-size": "rows of the draft's head: int",
    "tie-word-embeddings": "the embedding is taken as the head: bool",
    "markov-rank": "width of the Markov head: int",
    "markov-head-type": "`vanilla`, `gated` or `rnn`: str",
    "confidence-head": "whether a confidence head is built: bool",
    "combine": "what a prediction layer's projection reads: `embed-first`, `hidden-first`, or a `sum` of two projections: str",
    "dtype": "in which weights are held where the server is not told: str",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What an engine takes a setting of one draft to be.

    Attributes:
        value: the value it uses.
        place: the key it comes from, or empty where the engine supplies it.
        source: where that is known from.
        refused: what the engine says where it stops at the value, or empty.
    """

    value: Any
    place: str = ""
    source: str = ""
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return self.refused
        return f"takes {self.value!r} from {self.place}" if self.place else f"takes {self.value!r}, its own"


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Where an engine looks for one setting.

    Attributes:
        setting: the setting's name, the same for all engines, such as `rope-theta`, `taps`, `norm-before-residual`.
        places: dotted keys of `config.json`, in the engine's order; the first that is there and not null counts. Empty: it never looks.
        default: what it uses where no place states the setting; a function is asked with the draft.
        take: what it makes of a stated value, with the draft; None: the value itself.
        families: the families it reads so; None for all.
        when: a further condition.
        refuses: what the engine says to the value that it took, where it stops at it; else None.
        source: file of the engine, issue or pull request.
    """

    setting: str
    places: tuple[str, ...] = ()
    default: Any = None
    take: Callable[[Any, Draft], Any] | None = None
    families: tuple[str, ...] | None = None
    when: Callable[[Draft], bool] | None = None
    refuses: Callable[[Any, Draft], str | None] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if self.setting not in SETTINGS:
            raise ValueError(f"no setting is called {self.setting!r}; SETTINGS lists them")

    def holds_for(self, draft: Draft) -> bool:
        """Whether `draft` is read this way."""
        spec = draft.spec
        if self.families is not None and (spec is None or spec.family not in self.families):
            return False
        return self.when is None or self.when(draft)

    def read(self, draft: Draft) -> Reading:
        """What the engine takes from `draft`'s configuration."""
        for place in self.places:
            value = at(draft.checkpoint.config, place)
            if value is not None:
                return self._reading(value if self.take is None else self.take(value, draft), place, draft)
        return self._reading(self.default(draft) if callable(self.default) else self.default, "", draft)

    def _reading(self, value: Any, place: str, draft: Draft) -> Reading:
        refused = None if self.refuses is None else self.refuses(value, draft)
        return Reading(value=value, place=place, source=self.source, refused=refused or "")


@dataclass(frozen=True, kw_only=True)
class Ignores:
    """A key of `config.json` that an engine passes over without a word.

    Attributes:
        key: dotted key.
        instead: what it does instead, in a few words.
        families: the families it is passed over in; None for all.
        harmless: the stated values with which nothing is lost.
        when: a further condition.
        source: file of the engine, issue or pull request.
    """

    key: str
    instead: str
    families: tuple[str, ...] | None = None
    harmless: tuple[Any, ...] = ()
    when: Callable[[Draft], bool] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Misnames:
    """Names of tensors that an engine's loader does not follow although a reader of the family would.

    Attributes:
        pattern: found in the names as they are stored.
        fault: slug under which each engine states what it does about them.
        message: what they are, in one line that names no engine.
        due: the names in their place: a replacement for what `pattern` found, as `re.sub` takes it, or a list.
        families: the families whose loader it is.
        fix: how to export instead.
        severity: as the check's finding has it.
    """

    pattern: str
    fault: str
    message: str
    due: str | tuple[str, ...]
    families: tuple[str, ...]
    fix: str = ""
    severity: Severity = "error"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What an engine says to the options it is started with.

    Attributes:
        topic: which check shows it: `algorithm`, `draft-tokens`, `block-size` (more rows than were trained), `kv-cache-dtype`,
            `context-length` (more positions than the draft has), `table-growth` (a scaled rotary table that is made longer).
        message: what is wrong, in one line that names no engine.
        outcome: what this engine does: it stops, falls back, serves wrong, or that is not known.
        option: the option that would have to change.
        got, due: the option's value and what would do.
        fix: how to start the server instead.
        doubtful: it may be right all the same.
    """

    topic: str
    message: str
    outcome: Outcome
    option: str = ""
    got: Any = None
    due: Any = None
    fix: str = ""
    doubtful: bool = False


class Declined(str):
    """Why an engine does not fill the context's K/V of a draft by its fused path, in its own words where it has some.

    A plain string is as one that is `logged`.

    Attributes:
        how: `logged`, or `silent` where it takes the slower way without a word, `stops` where it has no other, `absent` where it has no
            fused path for any such draft.
    """

    how: Literal["logged", "silent", "stops", "absent"]

    def __new__(cls, reason: str, how: Literal["logged", "silent", "stops", "absent"]) -> Declined:
        """The reason, and how the engine takes it."""
        found = super().__new__(cls, reason)
        found.how = how
        return found


#: A rule about the options an engine is started with: the draft, its target where it was given, and the options.
ServingRule = Callable[[Draft, Target | None, ServeOptions], Iterator[Refusal]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One serving engine.

    Attributes:
        name: as on the command line.
        title: for people.
        version: what the statements were read from.
        known: outcome by fault slug.
        reads: where it looks for each setting; the first that holds for a draft counts.
        ignores: keys that it passes over.
        serving: its rules about the options it is started with.
        fused_path: why it will not fill the context's K/V of a draft by its fused path (`Declined`), or None where it will; None as a
            whole where that is not known.
        captures: which states it hands a draft in a target that is known, where that is not what it reads of `taps` without one; None
            where it is, and None as a whole where no target differs.
        labels: the `architectures` entries under which it serves a plain draft, by family; families that are not listed are not known.
        misnames: names of tensors that its loaders do not follow.
        no_nulls: the keys at which a null stops it, for a draft; None where that is not known.
    """

    name: str
    title: str
    version: str
    known: Mapping[str, Known]
    reads: tuple[Reads, ...] = ()
    ignores: tuple[Ignores, ...] = ()
    serving: tuple[ServingRule, ...] = ()
    fused_path: Callable[[Draft], str | None] | None = None
    captures: Callable[[Draft, Target], Reading | None] | None = None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    misnames: tuple[Misnames, ...] = ()
    no_nulls: Callable[[Draft], frozenset[str]] | None = None
    _by_setting: dict[str, tuple[Reads, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self.reads:
            self._by_setting[rule.setting] = (*self._by_setting.get(rule.setting, ()), rule)

    def outcome(self, fault: str, spec: DraftSpec | None) -> Outcome:
        """What this engine does about `fault` in a draft that is `spec`."""
        known = self.known.get(fault)
        if known is None or (spec is None and not isinstance(known, Outcome)):
            return Outcome(outcome="unknown")
        if isinstance(known, Outcome):
            return known
        assert spec is not None
        return known(spec)

    def reading(self, setting: str, draft: Draft) -> Reading | None:
        """What this engine takes `setting` of `draft` to be, or None where that is not known.

        Raises:
            ValueError: a setting that is not in `SETTINGS`.
        """
        if setting not in SETTINGS:
            raise ValueError(f"no setting is called {setting!r}; SETTINGS lists them")
        return next((rule.read(draft) for rule in self._by_setting.get(setting, ()) if rule.holds_for(draft)), None)

    def looks_in(self, setting: str, draft: Draft) -> tuple[str, ...] | None:
        """Every key that it may take `setting` of such a draft from, or None where nothing is known of it."""
        family = None if draft.spec is None else draft.spec.family
        rules = [rule for rule in self._by_setting.get(setting, ()) if rule.families is None or family in rule.families]
        return tuple(dict.fromkeys(place for rule in rules for place in rule.places)) if rules else None

    def ignored(self, draft: Draft) -> list[Ignores]:
        """The keys of `draft`'s configuration that this engine passes over at a loss."""
        found = []
        for item in self.ignores:
            value = at(draft.checkpoint.config, item.key)
            if value is None or value in item.harmless:
                continue
            if item.families is not None and (draft.spec is None or draft.spec.family not in item.families):
                continue
            if item.when is None or item.when(draft):
                found.append(item)
        return found


def at(config: Mapping[str, Any], place: str) -> Any:
    """The value at the dotted key `place`, or None where it is not there."""
    value: Any = config
    for part in place.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def stops(message: str, source: str = "") -> Outcome:
    """The engine refuses the draft."""
    return Outcome(outcome="stops", message=message, source=source)


def falls_back(message: str, source: str = "") -> Outcome:
    """The engine logs a line and takes a slower way."""
    return Outcome(outcome="falls back", message=message, source=source)


def serves_wrong(message: str, source: str = "") -> Outcome:
    """The engine serves the draft wrong and says nothing."""
    return Outcome(outcome="serves wrong", message=message, source=source)


def fine(message: str = "", source: str = "") -> Outcome:
    """The engine serves the draft right."""
    return Outcome(outcome="fine", message=message, source=source)


#: The outcomes that make a draft unfit for an engine.
UNFIT: tuple[OutcomeKind, ...] = ("stops", "serves wrong")
