"""The formats of JSON Schema as regular expressions for `expressions.full`.

An expression matches only valid texts, but not always all valid texts. Every format in a draft of JSON Schema is in
`FORMATS` or `NOT_ENFORCED`. Other names are annotations, which do not limit values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from runtime.grammar.patterns import expressions

_ODD_LEAPS = "0[48]|[2468][048]|[13579][26]"  # last two digits of leap years, without 00
_LEAP_YEAR = f"(?:[0-9]{{2}}(?:{_ODD_LEAPS})|(?:{_ODD_LEAPS})00)"  # without the year 0, which Python does not accept
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
# A label from its third character on. The third and fourth characters must not both be hyphens, because no expression
# can check the text after `xn--`.
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
    """Return a pattern for IPv6 addresses (RFC 4291).

    An address has eight groups. One run of zero groups may be omitted. An IPv4 address may replace the last two groups.
    """
    shapes = [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:", f":(?::{_H16}){{1,7}}", "::"]
    shapes += [f"(?:{_H16}:){{{left}}}(?::{_H16}){{1,{7 - left}}}" for left in range(1, 7)]
    shapes += [f"(?:{_H16}:){{6}}{_IPV4}", f"::(?:{_H16}:){{0,5}}{_IPV4}"]
    return f"(?:{'|'.join(shapes)})"


_LOCAL = "|".join(  # at most 64 characters in total, so the maximum length of a part depends on the number of dots
    f"(?:{_ATEXT}{{1,{size}}}\\.){{{dots}}}{_ATEXT}{{1,{size}}}" for dots, size in enumerate((64, 31, 20, 15))
)
# Regular expressions without nested groups, references, braces and complex classes.
_REGEX_CHARACTER = r"(?:[a-zA-Z0-9 _,:;<>=!@#%&~'`/-]|\\[dDwWsS.*+?^$()|/])"
_REGEX_CLASS = r"\[\^?(?:[a-zA-Z0-9_.:/@%+]|0-9|a-z|A-Z|\\[dws])+\]"
_REGEX_ATOMS = rf"(?:(?:{_REGEX_CHARACTER}|\.|{_REGEX_CLASS})[*+?]?)*"
_REGEX = rf"\^?{_REGEX_ATOMS}(?:\((?:\?:)?{_REGEX_ATOMS}(?:\|{_REGEX_ATOMS})*\)[*+?]?{_REGEX_ATOMS})*"
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
    "regex": f"{_REGEX}\\$?",
    "uri-reference": f"(?:{_SCHEME}:{_HIER}|{_RELATIVE}){_TAIL}",
    "iri-reference": f"(?:{_SCHEME}:{_HIER}|{_RELATIVE}){_TAIL}",
    "json-pointer": _POINTER,
    "ipv4network": f"{_IPV4}(?:/(?:3[0-2]|[12]?[0-9]))?",
    "ipv4interface": f"{_IPV4}(?:/(?:3[0-2]|[12]?[0-9]))?",
    "ipv6network": f"{_ipv6()}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
    "ipv6interface": f"{_ipv6()}(?:/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9]))?",
    "ipvanyaddress": f"(?:{_IPV4}|{_ipv6()})",
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}
# Formats that are refused. Fewer than one in a thousand published schemas uses them.
NOT_ENFORCED = frozenset({"uri-template", "color", "relative-json-pointer"})
MAX_LENGTHS: Mapping[str, int] = {
    "hostname": 253,
    "idn-hostname": 253,
    "host-name": 253,
    "email": 254,
    "idn-email": 254,
}
# Bits of the integer formats of OpenAPI and pydantic. int64 has 54 bits, because float64 is exact only up to 2^53.
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
    """Return the regular expression of a format for the backend, or None if the name is not in `FORMATS`."""
    source = FORMATS.get(name)
    return None if source is None else expressions.full(source)
