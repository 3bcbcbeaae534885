"""Arguments: one declaration per option, from which every other form of it is derived.

A group file such as `cache.py` declares options; nothing else has to be touched to add one.
"""

from runtime.args.args import Args, options
from runtime.args.knob import Json, Knob, Outcome, inert, planned
from runtime.args.options import Option
from runtime.args.refusals import not_built, without_effect
from runtime.args.values import kind, shown

__all__ = [
    "Args",
    "Json",
    "Knob",
    "Option",
    "Outcome",
    "inert",
    "kind",
    "not_built",
    "options",
    "planned",
    "shown",
    "without_effect",
]
