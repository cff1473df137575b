"""Request bodies: bounded reading, typed fields, and SGLang's error form.

Nothing a client sends may cost more than its size: the body is refused by its announced length before it is read, JSON
that is nested too deeply or holds NaN is refused by one sentence, and every field is looked at before it is used.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

MAX_BODY_BYTES = 32 << 20  # a 65,536-token prompt is about 0.4 MB; the largest body anyone needs is far below this
MAX_DEPTH = 32

ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    499: "ClientClosedRequest",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class HttpError(Exception):
    """A refusal or failure that the client is told in one sentence."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """The error object of SGLang's OpenAI routes (sglang srt/entrypoints/openai/protocol.py, ErrorResponse)."""
        kind = ERROR_TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {"object": "error", "message": self.message, "type": kind, "param": self.param, "code": self.status}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status)


def refuse(message: str, param: str | None = None, status: int = 400) -> NoReturn:
    raise HttpError(status, message, param)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _depth_ok(value: Any) -> bool:
    level, seen = [value], 0
    while level:
        seen += 1
        if seen > MAX_DEPTH:
            return False
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
    return True


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object from bytes; raises HttpError(400) saying what is wrong."""
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except RecursionError:
        refuse(f"the JSON body is nested deeper than {MAX_DEPTH} levels")
    except UnicodeDecodeError:
        refuse("the body is not valid UTF-8")
    except ValueError as error:
        refuse(f"the body is not valid JSON: {str(error)[:160]}")
    if not isinstance(value, dict):
        refuse("the body must be a JSON object")
    if not _depth_ok(value):
        refuse(f"the JSON body is nested deeper than {MAX_DEPTH} levels")
    return value


async def read_object(request: Request) -> dict[str, Any]:
    """Read and parse a body, never more than MAX_BODY_BYTES; an empty body is an empty object."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit():
        refuse("the content-length header is not a number")
    if int(announced[:20]) > MAX_BODY_BYTES:
        refuse(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                refuse(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
            parts.append(part)
    except ClientDisconnect:
        refuse("the client closed the connection before the body was complete", status=499)
    return parse_object(b"".join(parts))


class Fields:
    """Typed reading of one JSON object. Null counts as absent, as in SGLang; unknown fields are ignored, as in
    SGLang.
    """

    def __init__(self, body: dict[str, Any], where: str = ""):
        self.body, self.where = body, where

    def _name(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def _wrong(self, name: str, wanted: str) -> NoReturn:
        shown = json.dumps(self.body.get(name), default=str)[:60]
        refuse(f"{self._name(name)} must be {wanted}, not {shown}", param=self._name(name))

    def raw(self, name: str) -> Any:
        return self.body.get(name)

    def text(self, name: str, default: str | None = None, *, limit: int = 1 << 10) -> str | None:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > limit:
            self._wrong(name, f"a string of at most {limit} characters")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int | None = None, *, low: int, high: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self._wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def strings(self, name: str, *, most: int = 16, limit: int = 256) -> tuple[str, ...]:
        """One string or a list of strings; empty strings are refused because they would match anywhere."""
        value = self.body.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        ok = isinstance(values, list) and len(values) <= most
        if not ok or not all(isinstance(item, str) and 0 < len(item) <= limit for item in values):
            self._wrong(name, f"a string or a list of at most {most} strings of 1 to {limit} characters")
        return tuple(values)

    def ids(self, name: str, vocabulary: int) -> list[int] | None:
        """A list of token ids below `vocabulary`."""
        value = self.body.get(name)
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < vocabulary for item in value):
            refuse(f"{self._name(name)} must be a list of token ids from 0 to {vocabulary - 1}", param=self._name(name))
        return value

    def child(self, name: str) -> Fields:
        value = self.body.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self._wrong(name, "an object")
        return Fields(value, self._name(name))

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse a field that would change the answer in a way the lab does not offer, instead of ignoring it."""
        value = self.body.get(name)
        if value is not None and value not in allowed:
            refuse(f"{self._name(name)} = {json.dumps(value, default=str)[:60]}: {why}", param=self._name(name))
