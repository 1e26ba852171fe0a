"""Text from unknown hands, made fit to be told again: in an answer, on one line of a log, and not without end."""

import re

LONGEST = 2000
"""Characters of a message that are told; names of adapters and parameters are well below."""

_LATE_CONTROLS = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def utf8(text: str) -> str:
    """``text`` with lone surrogates, as in file names that are not UTF-8, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def told(text: str, longest: int = LONGEST) -> str:
    """``text`` in ``utf8``, its middle left out where it is longer than ``longest`` characters."""
    if len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} … {text[-half:]}"
    return utf8(text)


def on_one_line(text: str) -> str:
    """``text`` with its control characters escaped, so that nobody can write lines into a log."""
    return _CONTROLS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def json_on_one_line(json: str) -> str:
    """JSON without the characters beyond ASCII that some readers end a line at."""
    return _LATE_CONTROLS.sub(lambda match: f"\\u{ord(match.group()):04x}", json)
