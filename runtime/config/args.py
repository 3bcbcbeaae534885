"""The options that the user set: frozen, with one field per group of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from runtime.config import command_line, config_file, speculative_config
from runtime.config.option_spec import Outcome
from runtime.config.option_table import Option, Options
from runtime.config.options.cache import CacheArgs, HierarchyArgs
from runtime.config.options.graphs import GraphArgs
from runtime.config.options.http import HttpArgs
from runtime.config.options.kernels import KernelArgs
from runtime.config.options.lora import LoraArgs
from runtime.config.options.media import MediaArgs
from runtime.config.options.model import ModelArgs, OffloadArgs, QuantArgs
from runtime.config.options.moe import MoeArgs
from runtime.config.options.observe import DebugArgs, ObserveArgs
from runtime.config.options.parallel import DisaggregationArgs, ParallelArgs
from runtime.config.options.sampling import SamplingArgs, SpeculativeArgs
from runtime.config.options.schedule import ScheduleArgs
from runtime.config.options.text import TextArgs
from runtime.config.values import from_object, shown
from runtime.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Args:
    """The values of all options, by group: `args.cache.page_size` equals `args.get("page_size")`.

    Use `Args.of` (Python) or `Args.parse` (command line) to make an instance. Both raise
    `ConfigurationError` with one sentence per unknown name or invalid value. `runtime.config.resolve` later refuses
    options that are not supported yet or that this machine cannot fulfil.
    """

    model: ModelArgs = field(default_factory=ModelArgs)
    http: HttpArgs = field(default_factory=HttpArgs)
    text: TextArgs = field(default_factory=TextArgs)
    sampling: SamplingArgs = field(default_factory=SamplingArgs)
    schedule: ScheduleArgs = field(default_factory=ScheduleArgs)
    cache: CacheArgs = field(default_factory=CacheArgs)
    hierarchy: HierarchyArgs = field(default_factory=HierarchyArgs)
    kernels: KernelArgs = field(default_factory=KernelArgs)
    graphs: GraphArgs = field(default_factory=GraphArgs)
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    moe: MoeArgs = field(default_factory=MoeArgs)
    quant: QuantArgs = field(default_factory=QuantArgs)
    lora: LoraArgs = field(default_factory=LoraArgs)
    media: MediaArgs = field(default_factory=MediaArgs)
    speculative: SpeculativeArgs = field(default_factory=SpeculativeArgs)
    offload: OffloadArgs = field(default_factory=OffloadArgs)
    observe: ObserveArgs = field(default_factory=ObserveArgs)
    disaggregation: DisaggregationArgs = field(default_factory=DisaggregationArgs)
    debug: DebugArgs = field(default_factory=DebugArgs)
    explicitly_set: frozenset[str] = frozenset()  # names of the options that the user gave

    @classmethod
    def of(cls, **keywords: Any) -> Self:
        """Make Args from Python keywords: `Args.of(model_path="...", page_size=16)`. Aliases are accepted."""
        refusals: list[str] = []
        values: dict[str, Any] = {}
        for keyword, value in keywords.items():
            try:
                option = _OPTIONS.by_keyword(keyword)
                if option.name in values:
                    raise ConfigurationError(f"{option.name} and {keyword} are the same option; give one of them.")
                values[option.name] = from_object(option, value)
            except ConfigurationError as refusal:
                refusals.extend(refusal.refusals)
        return cls._with_file(values, refusals)

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """Make Args from the words of a command line, without the program's name."""
        refusals: list[str] = []
        return cls._with_file(command_line.read(_OPTIONS, words, refusals), refusals)

    def get(self, name: str) -> Any:
        """Return the value of an option by its name. Raises `KeyError` for an unknown name."""
        return getattr(getattr(self, _OPTIONS[name].group), name)

    def changed(self, name: str) -> bool:
        """Return whether the option's value differs from its default."""
        return self.get(name) != _OPTIONS[name].default

    def keywords(self) -> dict[str, Any]:
        """Return the explicitly set options as keywords: `Args.of(**args.keywords()) == args`."""
        return {option.name: self.get(option.name) for option in _OPTIONS if option.name in self.explicitly_set}

    @classmethod
    def _with_file(cls, values: Mapping[str, Any], refusals: list[str]) -> Self:
        path = values.get("config")
        from_file = config_file.read(_OPTIONS, path, refusals) if path else {}
        if refusals:
            raise ConfigurationError(*refusals)
        given = _with_new_spellings({**from_file, **values})
        values = _with_speculative_config(given)
        made: dict[str, Any] = {}
        for group in fields(cls):
            mine = {name: value for name, value in values.items() if _OPTIONS[name].group == group.name}
            if mine and group.default_factory is not MISSING:
                made[group.name] = group.default_factory(**mine)
        return cls(**made, explicitly_set=frozenset(given))


_OPTIONS = Options(Args)


def _with_speculative_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` plus the options that --speculative-config sets.

    Raises `ConfigurationError` if an option is also set by its own flag.
    """
    config = values.get("speculative_config")
    named = speculative_config.as_options(config) if config else {}
    meant = {name: from_object(_OPTIONS[name], value) for name, value in named.items()}
    for name in meant:
        if name in values:
            raise ConfigurationError(f"{speculative_config.FLAG} sets {_OPTIONS[name].flag} too; give one of them.")
    return {**values, **meant}


def _with_new_spellings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values`, with the options that old spellings set added.

    Raises `ConfigurationError` if `values` has another value for such an option.
    """
    meant: dict[str, Any] = {}
    for name, value in values.items():
        means = _OPTIONS[name].spec.means
        if means is None or not value:
            continue
        successor = _OPTIONS[means[0]]
        if {**values, **meant}.get(successor.name, means[1]) != means[1]:
            raise ConfigurationError(
                f"{_OPTIONS[name].flag} is an old spelling of {successor.flag} {means[1]}, and another value of "
                f"{successor.flag} is given; give one of them."
            )
        meant[successor.name] = means[1]
    return {**values, **meant}


def options() -> tuple[Option, ...]:
    """Return all options, in the order of the groups."""
    return tuple(_OPTIONS)


def not_built(args: Args) -> dict[str, str]:
    """Return the error messages for options whose value is refused or not supported yet, by option name."""
    return {
        option.name: _refusal(option, args.get(option.name))
        for option in _OPTIONS
        if not _is_built(option, args.get(option.name))
    }


def without_effect(args: Args) -> dict[str, str]:
    """Return the warnings for options that are set but have no effect, by option name."""
    return {
        option.name: f"{option.flag} has no effect: {option.spec.reason}."
        for option in _OPTIONS
        if option.spec.outcome is Outcome.INERT and option.name in args.explicitly_set
    }


def _is_built(option: Option, value: Any) -> bool:
    if value == option.default or value in (option.spec.built or ()):
        return True
    return option.spec.outcome is not Outcome.REFUSED and option.spec.built is None


def _refusal(option: Option, value: Any) -> str:
    asked = option.flag if value is True else f"{option.flag} {shown(option, value)}"
    if option.spec.outcome is Outcome.REFUSED:
        return f"{asked} is refused: {option.spec.reason}{_instead(option)}."
    needs = option.spec.needs.get(value, "") if isinstance(value, str) else ""
    if needs:
        return f"{asked} is refused: Penstock has no code for it, and it needs {needs}{_instead(option)}."
    return f"{asked} is not supported yet{_instead(option)}."


def _instead(option: Option) -> str:
    if option.spec.instead:
        return f"; {option.spec.instead}"
    if option.spec.outcome is Outcome.REFUSED:
        return "; leave it out"
    works = [shown(option, value) for value in option.spec.built or () if value is not None]
    return f"; use {' or '.join([', '.join(works[:-1]), works[-1]] if len(works) > 1 else works)}"
