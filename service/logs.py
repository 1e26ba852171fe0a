"""The log: one line an event on stderr, as text for people or JSON for machines."""

import logging
import sys
import time
from typing import Any, Literal

import orjson

from .request_id import current_request_id
from .sent_text import on_one_line, told

LONGEST_TRACE = 20_000

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00Z INFO moelet.service.server: message [request id]``."""

    def __init__(self) -> None:
        self.converter = time.gmtime
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%SZ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = on_one_line(super().formatMessage(record))
        request_id = current_request_id.get()
        return f"{text} [{request_id}]" if request_id else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (seconds since 1970), ``level``, ``logger``, ``message``, and
    ``request_id`` and ``exception`` where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": told(record.getMessage()),
        }
        if request_id := current_request_id.get():
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = told(self.formatException(record.exc_info), LONGEST_TRACE)
        return orjson.dumps(entry, default=str).decode()


def configure_logs(log_format: LogFormat, level: LogLevel) -> None:
    """Send all logging of the process to stderr in ``log_format``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for chatty in ("asyncio", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
