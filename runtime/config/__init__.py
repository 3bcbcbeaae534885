"""Options and the plan: one declaration per option, from which every other form of it is derived.

`options/` declares them, one file per subject; nothing else has to be touched to add one. `resolve/` makes the
plan of what was set, of the machine and of the model.
"""

from runtime.config.args import Args, not_built, options, without_effect
from runtime.config.option_spec import Json, OptionSpec, Outcome
from runtime.config.option_table import Option
from runtime.config.values import in_its_words, kind, shown

__all__ = [
    "Args",
    "Json",
    "Option",
    "OptionSpec",
    "Outcome",
    "in_its_words",
    "kind",
    "not_built",
    "options",
    "shown",
    "without_effect",
]
