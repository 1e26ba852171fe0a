"""The log: one line an event on stderr, as text for people or JSON for machines."""

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Literal

import orjson

from .request_id import current_request_id
from .sent_text import json_on_one_line, on_one_line, told

log = logging.getLogger(__name__)

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
    """One JSON object a line: ``time`` (seconds since 1970), ``level``, ``logger``, ``message``,
    ``request_id`` and ``exception`` where there are any, and what else the record brings as ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": told(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if request_id := current_request_id.get():
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = told(self.formatException(record.exc_info), LONGEST_TRACE)
        return json_on_one_line(orjson.dumps(entry, default=str).decode())


def configure_logs(log_format: LogFormat, level: LogLevel) -> None:
    """Send all logging of the process to stderr in ``log_format``, with warnings and what nobody caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    for chatty in ("asyncio", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = log_uncaught
    threading.excepthook = lambda caught: log_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)
    sys.unraisablehook = lambda caught: log_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)


def log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, /) -> None:
    """Log an error that nobody caught; what ends a program on purpose is none."""
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        log.critical("%s that nobody caught", kind.__name__, exc_info=(kind, error or kind(), trace))
