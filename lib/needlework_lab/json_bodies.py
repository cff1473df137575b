"""Request bodies: bounded reading, typed fields, and SGLang's error form.

Nothing a client sends may cost more than its size: the body is refused by its announced length before it is read, JSON
that is nested too deeply or holds NaN is refused by one sentence, and every field is looked at before it is used.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, NoReturn, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from needlework_lab.wire import MAX_ROOM

MAX_BODY_BYTES = 32 << 20  # a 65,536-token prompt is about 0.4 MB; the largest body anyone needs is far below this
MAX_DEPTH = 32
NOT_OFFERED = "not_offered"

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


class Body(BaseModel):
    """Fields of one JSON object. Null counts as absent, as in SGLang; unknown fields are ignored, as in SGLang."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @classmethod
    def of(cls, body: dict[str, Any]) -> Self:
        """Raises HttpError(400) about the first field that is wrong."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(part for part in first["loc"] if isinstance(part, str))
        shown = json.dumps(first["input"], default=str)[:60]
        if first["type"] == NOT_OFFERED:
            refuse(f"{name} = {shown}: {first['msg']}", name)
        must = "must be an object" if first["type"] == "model_type" else re.sub(r"^\w+ should", "must", first["msg"])
        place = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
        refuse(f"{name}{place} {must}, not {shown}", name)


def only(allowed: Any, why: str) -> Any:
    """A field that would change the answer in a way the lab does not offer: refused, not ignored."""

    def check(value: Any) -> Any:
        if value != allowed:
            raise PydanticCustomError(NOT_OFFERED, why)  # type: ignore[arg-type]
        return value

    return Annotated[Any, AfterValidator(check)]


def _strings(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    ok = isinstance(values, list) and len(values) <= 16
    if not ok or not all(isinstance(item, str) and 0 < len(item) <= 256 for item in values):
        raise PydanticCustomError("strings", "must be a string or a list of at most 16 strings of 1 to 256 characters")
    return tuple(values)


Name = Annotated[str, Field(max_length=256)]
Room = Annotated[int, Field(ge=0, le=MAX_ROOM)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Strings = Annotated[Any, AfterValidator(_strings)]  # empty ones are refused because they would match anywhere


def token_ids(value: Any, name: str, vocabulary: int) -> list[int] | None:
    """A list of token ids below `vocabulary`, or a list that holds one such list; None stays None."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    ok = isinstance(value, list) and all(type(item) is int and 0 <= item < vocabulary for item in value)
    if value is not None and not ok:
        refuse(f"{name} must be a list of token ids from 0 to {vocabulary - 1}", name)
    return value
