"""What the API server says when it says no: ``Status`` objects with their HTTP status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Answers that can be ordered without a real cause; the words are those of client-go's and the server's own.
_ORDERED = {
    400: ("BadRequest", "the server rejected our request for an unknown reason"),
    401: ("Unauthorized", "Unauthorized"),
    403: ("Forbidden", "forbidden by order of the test"),
    404: ("NotFound", "the server could not find the requested resource"),
    409: (
        "Conflict",
        "Operation cannot be fulfilled: the object has been modified; "
        "please apply your changes to the latest version and try again",
    ),
    410: ("Expired", "The resourceVersion for the provided watch is too old."),
    422: ("Invalid", "invalid by order of the test"),
    429: (
        "TooManyRequests",
        "the server has received too many requests and has asked us to try again later",
    ),
    500: ("InternalError", "Internal error occurred: by order of the test"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
}

_LONG_KEY = (
    "a valid label key must consist of alphanumeric characters, '-', '_' or '.', and must start and end with "
    "an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' "
    "(e.g. 'example.com/MyName')"
)
_EXPIRED_PAGE = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new "
    "list without the continue parameter, or use the continue token in this response to retrieve the "
    "remainder of the results. Continuing with the provided token results in an inconsistent list - objects "
    "that were created, modified, or deleted between the time the first chunk was returned and now may show "
    "up in the list."
)


class Refusal(Exception):
    """A request that fails; ``details`` None leaves the member out, as some errors do."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self._reason = reason
        self._message = message
        self._details = details
        self._metadata = metadata or {}

    def status(self) -> dict[str, Any]:
        """The object of kind Status, its members in the server's order."""
        body: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": dict(self._metadata)}
        body |= {"status": "Failure", "message": self._message}
        body |= {"reason": self._reason} if self._reason else {}
        body |= {} if self._details is None else {"details": dict(self._details)}
        return body | {"code": self.code}

    def retry_after(self) -> int:
        """Seconds for the header Retry-After, 0 for none."""
        return int((self._details or {}).get("retryAfterSeconds", 0))


def ordered(code: int, retry_after: int = 0) -> Refusal:
    """The refusal with this code for which only the test knows the reason."""
    reason, message = _ORDERED.get(code, ("", "by order of the test"))
    return Refusal(code, reason, message, {"retryAfterSeconds": retry_after} if retry_after else None)


def unauthorized() -> Refusal:
    return Refusal(401, "Unauthorized", "Unauthorized")


def forbidden(user: str, verb: str, resource: str, name: str, namespace: str) -> Refusal:
    kind = resource.partition("/")[0]
    subject = f'{kind} "{name}"' if name else kind
    scope = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    message = (
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API group "" {scope}'
    )
    return Refusal(403, "Forbidden", message, ({"name": name} if name else {}) | {"kind": kind})


def not_found(kind: str, name: str) -> Refusal:
    return Refusal(404, "NotFound", f'{kind} "{name}" not found', {"name": name, "kind": kind})


def no_such_path() -> Refusal:
    return Refusal(404, "NotFound", "the server could not find the requested resource", {})


def method_not_allowed() -> Refusal:
    message = "the server does not allow this method on the requested resource"
    return Refusal(405, "MethodNotAllowed", message, {})


def not_acceptable() -> Refusal:
    known = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
    return Refusal(406, "NotAcceptable", f"406: Not Acceptable\n\nAvailable representations: {known}", {})


def unsupported_media_type() -> Refusal:
    return Refusal(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})


def already_exists(kind: str, name: str) -> Refusal:
    return Refusal(409, "AlreadyExists", f'{kind} "{name}" already exists', {"name": name, "kind": kind})


def conflict(kind: str, name: str) -> Refusal:
    message = (
        f'Operation cannot be fulfilled on {kind} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return Refusal(409, "Conflict", message, {"name": name, "kind": kind})


def bad_request(message: str) -> Refusal:
    return Refusal(400, "BadRequest", message)


def bad_version(text: str, *, watch: bool) -> Refusal:
    problem = f'resourceVersion: Invalid value: "{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
    return Refusal(500, "", problem) if watch else bad_request(f"invalid resource version: {problem}")


def invalid(kind: str, name: str, causes: Sequence[tuple[str, str, str]]) -> Refusal:
    """``causes`` are (reason, message, field)."""
    told = list(dict.fromkeys(f"{field}: {message}" for _, message, field in causes))
    listed = [{"reason": reason, "message": message, "field": field} for reason, message, field in causes]
    about = ({"name": name} if name else {}) | ({"kind": kind} if kind else {})
    text = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {text}', about | {"causes": listed})


def bad_annotation_key(name: str, key: str) -> Refusal:
    """The server looks at each key three times and tells of all of them."""
    return invalid(
        "Node",
        name,
        [("FieldValueInvalid", f'Invalid value: "{key}": {_LONG_KEY}', "metadata.annotations")] * 3,
    )


def too_large_version(asked: int, current: int) -> Refusal:
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    return Refusal(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})


def too_old_version(asked: int, oldest: int) -> Refusal:
    return Refusal(410, "Expired", f"too old resource version: {asked} ({oldest})")


def too_old_list() -> Refusal:
    return Refusal(410, "Expired", "The resourceVersion for the provided list is too old.")


def too_old_page(goes_on: str) -> Refusal:
    """``goes_on`` is a token for the rest of the list as it is now."""
    return Refusal(410, "Expired", _EXPIRED_PAGE, metadata={"continue": goes_on})
