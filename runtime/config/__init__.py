"""The options of an engine, and the plan that is made from them.

`options/` declares each option once, in one file per subject. Flags, Python keywords and help texts derive from these
declarations. `resolve/` makes the plan from the options, the machine and the model.
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
