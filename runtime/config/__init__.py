"""Arguments: one declaration per option, from which every other form of it is derived.

A group file such as `cache.py` declares options; nothing else has to be touched to add one.
"""

from runtime.config.args import Args, options
from runtime.config.option_spec import Json, OptionSpec, Outcome, inert, planned
from runtime.config.option_table import Option
from runtime.config.refusals import not_built, without_effect
from runtime.config.values import kind, shown

__all__ = [
    "Args",
    "Json",
    "Option",
    "OptionSpec",
    "Outcome",
    "inert",
    "kind",
    "not_built",
    "options",
    "planned",
    "shown",
    "without_effect",
]
