"""The declarations of all sampling parameters.

Other parts use these declarations: the JSON checks of every API and the names in their errors (`serve.calls.sampling`),
the check of `--preferred-sampling-params`, the defaults from generation_config.json, docs/sampling.md, and the arrays
that pass one value per row to the sampler (`ROW_ARRAYS`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, NamedTuple, get_type_hints

from runtime.errors import InvalidRequest
from runtime.grammar_spec import Grammar, Kind

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_PATTERNS = 8
MAX_STOP_PATTERN_CHARS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_INT32 = 2**31 - 1
MAX_DRY_WINDOW = 8192
MAX_BREAKERS = 16
MAX_BREAKER_CHARS = 40
TOP_K_OFF = 2**30  # top_k value for "off"; larger than any vocabulary

Api = Literal["native", "chat", "completions"]
APIS: Mapping[Api, str] = {  # API -> its route
    "native": "/generate",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The names of a parameter in one API, and its default in this API if that differs."""

    # Names in JSON requests. If a request sets several of them, the first one counts. Empty: the parameter's own name.
    names: tuple[str, ...] = ()
    default: Any = ...  # `...`: the parameter's own default
    low: float | None = None  # lower limit in this API; None: the parameter's own lower limit


class RowArray(NamedTuple):
    """How a parameter is passed to the sampler: as an array with one value per sampled position."""

    dtype: Literal["float32", "int32"]
    neutral: float  # value without effect; rows with the parameter's default have this value
    when_greedy: bool = False  # whether greedy rows use the parameter too; if not, they get the neutral value


EVERYWHERE: Mapping[Api, Taken] = dict.fromkeys(APIS, Taken())
NATIVE: Mapping[Api, Taken] = {"native": Taken()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """The declaration of a parameter, without its name, type and default."""

    help: str = field(kw_only=False)
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False  # whether `low` itself is out of range
    apis: Mapping[Api, Taken] = field(default_factory=lambda: EVERYWHERE)
    json: Any = None  # type annotation of its JSON value, if that differs (see `serve.calls.decode`)
    read: Callable[[Any], Any] | None = None  # converts the JSON value to the parameter's type
    from_model: bool = False  # whether generation_config.json may set the default (OpenAI APIs)
    row_array: RowArray | None = None

    @property
    def limits(self) -> str:
        """The allowed range in words, or an empty text if there is no limit."""
        if self.high < MAX_INT32:
            return f"in {'(' if self.above_low else '['}{self.low:.15g}, {self.high:.15g}]"
        return f"at least {self.low:.15g}" if self.low > -math.inf and self.high == MAX_INT32 else ""

    def check(self, name: str, value: float) -> None:
        """Raise `InvalidRequest`, which names the parameter, if the number is out of range."""
        if math.isfinite(value) and self.low <= value <= self.high and not (self.above_low and value == self.low):
            return
        words = f"at most {self.high}" if self.high >= MAX_INT32 and value > self.high else self.limits
        raise InvalidRequest(f"{name} must be {words or f'at least {self.low:.15g}'}, not {value}.", param=name)


def _stops(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _biases(value: Mapping[str, float]) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias must name tokens by their ids, not {key[:80]!r}.", param="logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _max_drafts(value: int | bool) -> int | None:
    """Return the maximum number of draft tokens. None is the server's own number, which the client requests by True."""
    return (None if value else 0) if isinstance(value, bool) else value


def _top_k(value: int) -> int:
    """Return top_k. 0 means all tokens, as in vLLM and transformers."""
    return value or -1


def _schema_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _also_called(name: str, *others: str) -> Mapping[Api, Taken]:
    """Accept the parameter by its own name, and in the OpenAI APIs also by the names of vLLM and llama.cpp."""
    return {api: Taken() if api == "native" else Taken(names=(name, *others)) for api in APIS}


def param(default: Any, help: str, **spec: Any) -> Any:
    """Declare a parameter: `top_k: int = param(-1, "Keep ...", low=-1)`. Keywords are the fields of `ParamSpec`."""
    made: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(**made, metadata={"spec": ParamSpec(help, **spec)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that decide how tokens are chosen and when generation ends. Names are those of the native API.

    Raises `InvalidRequest`, which names the parameter, if a value is out of range.
    """

    max_new_tokens: int | None = param(
        128,
        "Tokens to generate at most; null: until the context ends; 0: only the prompt is computed.",
        low=0,
        high=MAX_INT32,
        apis={
            "native": Taken(),
            "chat": Taken(names=("max_tokens", "max_completion_tokens"), default=None, low=1),
            "completions": Taken(names=("max_tokens",), default=16),
        },
    )
    min_new_tokens: int = param(
        0,
        "Tokens to generate at least: until then the end of the text and stop_token_ids are forbidden.",
        low=0,
        high=MAX_INT32,
        apis={
            "native": Taken(),
            "chat": Taken(names=("min_tokens",)),
            "completions": Taken(names=("min_tokens",)),
        },
    )
    temperature: float = param(
        1.0,
        "Divides the logits; below 1e-6 the likeliest token is taken.",
        low=0,
        high=1e3,
        apis={"native": Taken(), "chat": Taken(default=0.7), "completions": Taken(default=1.0)},
        from_model=True,
        row_array=RowArray("float32", 1.0),
    )
    top_n_sigma: float = param(
        -1.0,
        "Keep tokens whose logit is at least the largest logit minus this many standard deviations of the logits; "
        "-1 or 0: all.",
        low=-1,
        high=1e3,
        row_array=RowArray("float32", -1.0),
    )
    typical_p: float = param(
        1.0,
        "Keep the tokens whose surprise is nearest to the entropy, until their probabilities together reach this; "
        "1: all.",
        low=0,
        high=1,
        above_low=True,
        apis=_also_called("typical_p", "typical"),
        row_array=RowArray("float32", 1.0),
    )
    top_k: int = param(
        -1,
        "Keep so many of the likeliest tokens; -1 or 0: all.",
        low=-1,
        high=MAX_INT32,
        json=int,
        read=_top_k,
        from_model=True,
        row_array=RowArray("int32", TOP_K_OFF),
    )
    top_p: float = param(
        1.0,
        "Keep the likeliest tokens whose probabilities together reach this; 1: all.",
        low=0,
        high=1,
        above_low=True,
        from_model=True,
        row_array=RowArray("float32", 1.0),
    )
    min_p: float = param(
        0.0,
        "Keep tokens with at least this part of the largest probability.",
        low=0,
        high=1,
        from_model=True,
        row_array=RowArray("float32", 0.0),
    )
    xtc_probability: float = param(
        0.0,
        "Probability that XTC (exclude top choices) applies to a token's choice. It drops all candidates with at least "
        "the probability xtc_threshold, except the least likely of them; 0: never.",
        low=0,
        high=1,
        row_array=RowArray("float32", 0.0),
    )
    xtc_threshold: float = param(
        0.1,
        "Least probability of the tokens that XTC drops; above 0.5 it drops none.",
        low=0,
        high=1,
        row_array=RowArray("float32", 0.1),
    )
    dry_multiplier: float = param(
        0.0,
        "Strength of DRY, which penalises tokens that would continue a repetition: `dry_multiplier * dry_base ** "
        "(repeated tokens - dry_allowed_length)` is subtracted from their logits; 0: off.",
        low=0,
        high=100,
    )
    dry_base: float = param(1.75, "Growth of DRY's penalty with each repeated token.", low=1, high=100)
    dry_allowed_length: int = param(
        2, "Repetitions shorter than so many tokens are not penalised by DRY.", low=1, high=MAX_INT32
    )
    dry_penalty_last_n: int = param(
        -1,
        f"Last tokens of the prompt and the output that DRY searches; -1: the last {MAX_DRY_WINDOW}; 0: none.",
        low=-1,
        high=MAX_DRY_WINDOW,
    )
    dry_sequence_breakers: tuple[str, ...] = param(
        ("\n", ":", '"', "*"),
        f"Up to {MAX_BREAKERS} texts that end a repetition. Every token that contains such a text counts as one, and "
        "so does the last token of a text that takes several.",
        json=list[str],
        read=tuple,
    )
    frequency_penalty: float = param(
        0.0,
        "Subtracted from a token's logit for each time that it was generated.",
        low=-2,
        high=2,
        row_array=RowArray("float32", 0.0, when_greedy=True),
    )
    presence_penalty: float = param(
        0.0,
        "Subtracted from the logit of a token that was generated.",
        low=-2,
        high=2,
        row_array=RowArray("float32", 0.0, when_greedy=True),
    )
    repetition_penalty: float = param(
        1.0,
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        low=1e-3,
        high=2,
        from_model=True,
        row_array=RowArray("float32", 1.0, when_greedy=True),
    )
    stop: tuple[str, ...] = param(
        (),
        f"Texts that end the output, up to {MAX_STOPS} of 1 to {MAX_STOP_CHARS} characters.",
        json=str | list[str],
        read=_stops,
    )
    stop_regex: tuple[str, ...] = param(
        (),
        f"Regular expressions that end the output at their first match, up to {MAX_STOP_PATTERNS} of 1 to "
        f"{MAX_STOP_PATTERN_CHARS} characters, without anchors; matches have up to 1024 characters.",
        json=str | list[str],
        read=_stops,
    )
    stop_token_ids: frozenset[int] = param(
        frozenset(),
        f"Further token ids that end the output, up to {MAX_STOPS}.",
        json=list[int],
        read=frozenset,
    )
    ignore_eos: bool = param(
        False, "Neither the end of the text nor stop_token_ids end the output; stop strings still do."
    )
    n: int = param(1, "Choices to generate.", low=1, high=MAX_CHOICES)
    seed: int | None = param(
        None,
        "The same seed and prompt give the same tokens.",
        low=-(2**63),
        high=2**64 - 1,
        apis={**EVERYWHERE, "native": Taken(names=("seed", "sampling_seed"))},
        json=int,
    )
    logit_bias: Mapping[int, float] = param(
        {},
        f"Added to the logits of tokens, up to {MAX_BIASES}, named by their ids.",
        json=dict[str, float],
        read=_biases,
    )
    allowed_token_ids: frozenset[int] | None = param(
        None,
        "The only tokens that may be generated, named by their ids. Without an end-of-text id among them, the output "
        "ends only at a stop or at max_new_tokens.",
        json=list[int],
        read=frozenset,
    )
    bad_words: tuple[str, ...] = param(
        (),
        f"Words that are never generated, up to {MAX_BAD_WORDS}, alone and after a space; each must be a "
        "single token of the model.",
        json=list[str],
        read=tuple,
    )
    json_schema: str | None = param(
        None,
        "JSON schema, as an object or a text, that the output is an instance of; see "
        "[structured output](structured-output.md). At most one of this and the five below.",
        apis=_also_called("json_schema", "guided_json"),
        json=str | dict[str, Any],
        read=_schema_text,
    )
    regex: str | None = param(
        None, "Regular expression that the whole output matches.", apis=_also_called("regex", "guided_regex")
    )
    ebnf: str | None = param(
        None,
        "Grammar in EBNF (GBNF) for the output, from `root` on.",
        apis=_also_called("ebnf", "guided_grammar", "grammar"),
    )
    structural_tag: str | None = param(
        None,
        "Free text in which triggers begin tags that hold JSON.",
        json=str | dict[str, Any],
        read=_schema_text,
    )
    choice: tuple[str, ...] | None = param(
        None,
        "The texts of which the output is one.",
        apis=_also_called("choice", "guided_choice"),
        json=list[str],
        read=tuple,
    )
    lark: str | None = param(None, "Grammar in llguidance's dialect of Lark for the output, from `start` on.")
    custom_logit_processor: str | None = param(
        None, "Name of a function of --logits-processors, which changes the logits before each token."
    )
    custom_params: Mapping[str, Any] | None = param(
        None, "JSON object for the function that custom_logit_processor names.", json=dict[str, Any]
    )
    skip_special_tokens: bool = param(True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = param(True, "Put spaces between special tokens in the text.")
    no_stop_trim: bool = param(
        False,
        "Keep the stop string or token that ended the text in the text.",
        apis=_also_called("no_stop_trim", "include_stop_str_in_output"),
    )
    deterministic: bool = param(
        False,
        "Refuse the request where its tokens and log-probabilities may depend on other requests, chunks or cached "
        "prefixes, for example on a GPU. Elsewhere nothing changes.",
    )
    stream_interval: int | None = param(
        None,
        "Tokens between two events of a stream; default: that of --stream-interval.",
        low=1,
        high=MAX_INT32,
        apis=NATIVE,
    )
    speculative: int | None = param(
        None,
        "Drafts that one step may verify, at most as many as the server allows; false or 0: none. They change only "
        "the speed.",
        low=0,
        high=MAX_INT32,
        json=int | bool,
        read=_max_drafts,
    )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1

    def non_neutral_values(self) -> list[tuple[str, float]]:
        """Return (name, value) for each row array whose value in this request is not the neutral one."""
        greedy = self.greedy
        return [
            (name, value)
            for name, array in ROW_ARRAYS.items()
            if (value := getattr(self, name)) != _ROW_DEFAULTS[name] and (array.when_greedy or not greedy)
        ]

    def __post_init__(self) -> None:
        for name, spec in _RANGED:
            value = getattr(self, name)
            if value is not None:
                spec.check(name, value)
        if self.top_k == 0:
            raise InvalidRequest("top_k must be -1 (off) or at least 1, not 0.", param="top_k")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({self.max_new_tokens}).",
                param="min_new_tokens",
            )
        self._check_stops()
        self._check_tokens()
        self._check_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest(f"At most {MAX_STOPS} stops are allowed.", param="stop")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"A stop string must have 1 to {MAX_STOP_CHARS} characters.", param="stop")

        if len(self.stop_regex) > MAX_STOP_PATTERNS:
            raise InvalidRequest(f"At most {MAX_STOP_PATTERNS} stop_regex are allowed.", param="stop_regex")
        if not all(0 < len(text) <= MAX_STOP_PATTERN_CHARS for text in self.stop_regex):
            raise InvalidRequest(
                f"A stop_regex must have 1 to {MAX_STOP_PATTERN_CHARS} characters.", param="stop_regex"
            )

    def _check_tokens(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"At most {MAX_BAD_WORDS} bad_words are allowed.", param="bad_words")
        for word in self.bad_words:
            if not 0 < len(word) <= MAX_BAD_WORD_CHARS:
                raise InvalidRequest(
                    f"One of bad_words must have 1 to {MAX_BAD_WORD_CHARS} characters.", param="bad_words"
                )

        if len(self.dry_sequence_breakers) > MAX_BREAKERS:
            raise InvalidRequest(
                f"At most {MAX_BREAKERS} dry_sequence_breakers are allowed.", param="dry_sequence_breakers"
            )
        if not all(0 < len(text) <= MAX_BREAKER_CHARS for text in self.dry_sequence_breakers):
            raise InvalidRequest(
                f"One of dry_sequence_breakers must have 1 to {MAX_BREAKER_CHARS} characters.",
                param="dry_sequence_breakers",
            )

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias may name at most {MAX_BIASES} tokens.", param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            if math.isnan(bias) or not -1e6 <= bias <= 1e6:
                raise InvalidRequest(f"logit_bias of token {token_id} is not a usable number.", param="logit_bias")


NOT_BUILT = (  # parameters that no API supports yet; requests may only set them to 0, which turns them off
    "mirostat", "mirostat_mode", "top_a", "epsilon_cutoff",
    "eta_cutoff", "smoothing_factor", "dynatemp_range", "no_repeat_ngram_size",
)  # fmt: skip
GRAMMARS: tuple[Kind, ...] = ("json_schema", "regex", "ebnf", "structural_tag", "choice", "lark")


def grammars_of(sampling: SamplingParams) -> list[Grammar]:
    """Return the grammars that the parameters specify. (A request may have only one.)"""
    found = []
    for kind in GRAMMARS:
        value = getattr(sampling, kind)
        if value is not None:
            source = value if isinstance(value, str) else json.dumps(value)
            found.append(Grammar(kind, source))
    return found


class Parameter(NamedTuple):
    """A declared parameter."""

    name: str
    json: Any  # type annotation of its JSON value
    default: Any
    spec: ParamSpec

    def names_in(self, api: Api) -> tuple[str, ...]:
        """Return the parameter's names in an API, the preferred one first.

        Empty if the API does not have the parameter.
        """
        taken = self.spec.apis.get(api)
        return () if taken is None else taken.names or (self.name,)

    def default_in(self, api: Api) -> Any:
        taken = self.spec.apis.get(api)
        return self.default if taken is None or taken.default is ... else taken.default


@cache
def parameters() -> tuple[Parameter, ...]:
    """Return all parameters in the order of their declaration."""
    hints = get_type_hints(SamplingParams)
    found = []
    for declared in fields(SamplingParams):
        spec = declared.metadata["spec"]
        default = declared.default_factory() if callable(declared.default_factory) else declared.default
        found.append(Parameter(declared.name, spec.json or hints[declared.name], default, spec))
    return tuple(found)


_RANGED = tuple((p.name, p.spec) for p in parameters() if p.spec.low > -math.inf)
# Parameters that the sampler gets as arrays. A step omits arrays that are neutral for all rows.
ROW_ARRAYS: Mapping[str, RowArray] = {p.name: p.spec.row_array for p in parameters() if p.spec.row_array}
_ROW_DEFAULTS = {p.name: p.default for p in parameters() if p.spec.row_array}
# Parameters that generation_config.json may set.
FROM_MODEL = tuple(p.name for p in parameters() if p.spec.from_model)
