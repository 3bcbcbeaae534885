"""The formats of JSON Schema as regular expressions that hold exactly the valid texts, or fewer.

Written for `patterns.full`. Every format of a draft of JSON Schema is here or in `INTEGER_BITS`; other names
are annotations there, and limit nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from runtime.grammar import patterns

_ODD_LEAPS = "0[48]|[2468][048]|[13579][26]"  # the years of a century, without its first, that are leap years
_LEAP_YEAR = f"(?:[0-9]{{2}}(?:{_ODD_LEAPS})|(?:{_ODD_LEAPS})00)"  # the year 0 is left out, as Python does
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_CLOCK}:[0-5][0-9](?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"  # RFC 3339, without leap seconds
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_OCTET}\\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"
_LETTER, _INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
# Without two hyphens in the third and fourth place: what stands behind xn-- has rules that no expression can say.
_FROM_THIRD = f"(?:{_INNER}{_LETTER}|(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})"
_LABEL = f"{_LETTER}(?:{_INNER}?{_LETTER}|{_INNER}{_FROM_THIRD})?"
_ATEXT = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_PCHAR = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_SEGMENTS = f"(?:/{_PCHAR}*)*"
_HOST = "(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})*"
_AUTHORITY = f"(?:(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{{2}})*@)?{_HOST}(?::[0-9]{{0,5}})?"
_TAIL = f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_SCHEME = "[a-zA-Z][a-zA-Z0-9+.-]*"
_HIER = f"(?://{_AUTHORITY}{_SEGMENTS}|/(?:{_PCHAR}+{_SEGMENTS})?|{_PCHAR}+{_SEGMENTS}|)"
_RELATIVE = (
    f"(?://{_AUTHORITY}{_SEGMENTS}|/(?:{_PCHAR}+{_SEGMENTS})?"
    f"|(?:[a-zA-Z0-9._~!$&'()*+,;=@-]|%[0-9a-fA-F]{{2}})+{_SEGMENTS}|)"
)
_POINTER = '(?:/(?:[^~/"\\\\\\x00-\\x1f]|~[01])*)*'
_HOURS = "(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DAYS = "(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"


def _ipv6() -> str:
    """RFC 4291: eight groups, of which one run of zeros may be left out; the last two may be written as IPv4."""
    shapes = [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:", f":(?::{_H16}){{1,7}}", "::"]
    shapes += [f"(?:{_H16}:){{{left}}}(?::{_H16}){{1,{7 - left}}}" for left in range(1, 7)]
    shapes += [f"(?:{_H16}:){{6}}{_IPV4}", f"::(?:{_H16}:){{0,5}}{_IPV4}"]
    return f"(?:{'|'.join(shapes)})"


_LOCAL = "|".join(  # 64 characters at most
    f"(?:{_ATEXT}{{1,{size}}}\\.){{{dots}}}{_ATEXT}{{1,{size}}}" for dots, size in enumerate((64, 31, 20, 15))
)
_LITERAL = r"(?:[\x21\x23\x24\x26\x28-\x3b\x3d\x3f-\x5b\x5d\x5f\x61-\x7a\x7e]|%[0-9a-fA-F]{2})"  # RFC 6570
_VARIABLE = (
    "(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})+(?:\\.(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})+)*(?:\\*|:[1-9][0-9]{0,3})?"
)
_TEMPLATE = f"(?:{_LITERAL}|\\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*"
# Of regular expressions: no groups within groups, references, braces or classes of more than plain characters.
_REGEX_CHARACTER = r"(?:[a-zA-Z0-9 _,:;<>=!@#%&~'`/-]|\\[dDwWsS.*+?^$()|/])"
_REGEX_CLASS = r"\[\^?(?:[a-zA-Z0-9_.:/@%+]|0-9|a-z|A-Z|\\[dws])+\]"
_REGEX_ATOMS = rf"(?:(?:{_REGEX_CHARACTER}|\.|{_REGEX_CLASS})[*+?]?)*"
_REGEX = rf"\^?{_REGEX_ATOMS}(?:\((?:\?:)?{_REGEX_ATOMS}(?:\|{_REGEX_ATOMS})*\)[*+?]?{_REGEX_ATOMS})*"
_COLORS = (
    "aqua|black|blue|fuchsia|gray|green|lime|maroon|navy|olive|orange|purple|red|silver|teal|white|yellow"
)
_NAME = f"{_LABEL}(?:\\.{_LABEL})*"
_EMAIL = f"(?:{_LOCAL})@{_NAME}"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:T{_HOURS})?|T{_HOURS}|[0-9]{{1,9}}W)",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _NAME,
    "idn-hostname": _NAME,
    "host-name": _NAME,
    "ipv4": _IPV4,
    "ip-address": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": f"{_SCHEME}:{_HIER}{_TAIL}",
    "iri": f"{_SCHEME}:{_HIER}{_TAIL}",
    "url": f"{_SCHEME}:{_HIER}{_TAIL}",
    "uri-template": _TEMPLATE,
    "regex": f"{_REGEX}\\$?",
    "color": f"(?:{_COLORS}|#(?:[0-9a-fA-F]{{3}}){{1,2}})",
    "uri-reference": f"(?:{_SCHEME}:{_HIER}|{_RELATIVE}){_TAIL}",
    "iri-reference": f"(?:{_SCHEME}:{_HIER}|{_RELATIVE}){_TAIL}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
    "ipv4network": f"{_IPV4}(?:/(?:3[0-2]|[12]?[0-9]))?",
    "ipv4interface": f"{_IPV4}(?:/(?:3[0-2]|[12]?[0-9]))?",
    "ipv6network": f"{_ipv6()}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
    "ipv6interface": f"{_ipv6()}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
    "ipvanyaddress": f"(?:{_IPV4}|{_ipv6()})",
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
MAX_LENGTHS: Mapping[str, int] = {
    "hostname": 253,
    "idn-hostname": 253,
    "host-name": 253,
    "email": 254,
    "idn-email": 254,
}
# Of OpenAPI and pydantic: bounds of numbers.
INTEGER_BITS: Mapping[str, int] = {
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 54,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
}


@cache
def format_regex(name: str) -> str | None:
    """For the backend; None where the name is no format that limits texts."""
    source = FORMATS.get(name)
    return None if source is None else patterns.full(source)
