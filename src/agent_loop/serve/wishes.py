"""Request parameters that a program may send although they cannot be honoured."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from msgspec import structs
from pydantic import ValidationError

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ConfigError, RequestError, UnsupportedParameter
from agent_loop.serve.chat import check_calls
from agent_loop.serve.chat_requests import ChatCompletionRequest
from agent_loop.serve.fields import Fault, RequestModel, parameter_of
from agent_loop.servers.base import Ability, unsupported_params
from agent_loop.servers.pool import ServerPool
from agent_loop.trajectory import Incident, IncidentKind

RequestModelT = TypeVar("RequestModelT", bound=RequestModel)

_INDEX = re.compile(r"\[\d+\]")
COMPARED = frozenset({"response_format"})
"""Parameters that may be dropped without being wishes, because each completion is compared with them."""
_REQUEST_NAMES = {"json_schema": "response_format"}
"""Names in requests of sampling parameters that are called otherwise there."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The parameters that a program may send although they cannot be honoured: `accept_as_wish` of its loop.

    Args:
        names: Names as in the request's body, such as `response_format`. The name of a field of a nested object is
            `text.format`, without the indices of lists.
    """

    names: Collection[str] = ()
    are_offered: bool = True
    """Whether errors advise to add a parameter to the wishes."""

    def read(self, model: type[RequestModelT], body: Any) -> tuple[RequestModelT, Sequence[Incident]]:
        """Return the request of a body, without the parameters that are wishes and cannot be honoured."""
        incidents: list[Incident] = []
        while True:
            try:
                return model.model_validate(body), incidents
            except ValidationError as invalid:
                fault = Fault.of(invalid, body, known=model)
            # The path of the fault is a wish, or the beginning of the path.
            lengths = range(1, len(fault.path) + (not fault.is_missing))
            parts = [fault.path[:length] for length in lengths]
            wish = next((part for part in parts if _dotted(part) in self.names), None)
            if fault.wish in self.names:
                wish = fault.path
            if wish is None:
                raise self.hinted(fault.error, name=fault.wish)
            incidents.append(dropped(fault.wish or _dotted(wish), reason=str(fault.error)))
            body = _without(body, wish)

    def granted(
        self, request: ChatCompletionRequest, *, template: ChatTemplate, pool: ServerPool
    ) -> tuple[ChatCompletionRequest, Sequence[Incident]]:
        """Return the request without the wishes that the model's format or the servers do not support.

        A `response_format` that is not supported is dropped too, since the completion is compared with it.
        """
        incidents: list[Incident] = []
        while True:
            try:
                check_calls(request, template)
                _check_abilities(request, pool)
            except RequestError as error:
                name = parameter_of(error)
                if name not in self.names and name not in COMPARED:
                    raise self.hinted(error) from None
                incidents.append(dropped(name, reason=str(error)))
                request = request.model_copy(update={name: None})
                continue
            return request, [*incidents, *_unknown_to_template(request, template)]

    def hinted(self, error: RequestError, *, name: str = "") -> RequestError:
        """Return the error of an unsupported parameter with the advice to accept it as a wish."""
        name = name or _INDEX.sub("", error.param or "")
        if not self.are_offered or not isinstance(error, UnsupportedParameter) or not name:
            return error
        hint = " To ignore it, add" if str(error).endswith("?") else "; to ignore it, add"
        message = f"{error}{hint} {name} to accept_as_wish of the loop's entry"
        return UnsupportedParameter(message, param=error.param, code=error.code)


NO_WISHES = Wishes()


def wishes_of(names: Sequence[str]) -> Wishes:
    """Return the wishes with these names."""
    given: Any = names
    if not isinstance(given, list | tuple) or not all(
        isinstance(name, str) for name in cast(list[Any], given)
    ):
        raise ConfigError(f"accept_as_wish is {given!r:.80}; give a list of names of request parameters")
    return Wishes(frozenset(names))


def _check_abilities(request: ChatCompletionRequest, pool: ServerPool) -> None:
    """Refuse parameters that not all servers support."""
    params = structs.replace(request.sampling_params(max_tokens=None, choice=0), seed=None)
    abilities = [ability for ability in Ability if pool.all_have(ability)]
    for name in unsupported_params(params, abilities):
        name = _REQUEST_NAMES.get(name, name)
        raise UnsupportedParameter(
            f"{name} is not supported by the servers of the model; leave it out", param=name
        )


def _unknown_to_template(request: ChatCompletionRequest, template: ChatTemplate) -> Iterator[Incident]:
    """Yield an incident for each hint to the model that the chat template cannot render."""
    if request.reasoning_effort is not None and not template.mentions("reasoning_effort"):
        yield dropped("reasoning_effort", reason="the chat template does not know reasoning_effort")
    if request.verbosity not in (None, "medium"):
        yield dropped("verbosity", reason="no chat template knows it")


def dropped(name: str, *, reason: str) -> Incident:
    """Return the incident of a parameter that has no effect."""
    return Incident(IncidentKind.DROPPED_PARAMETER, f"{name} was ignored: {reason}")


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in path if not isinstance(part, int))


def _without(body: Any, path: Sequence[Any]) -> Any:
    """Return a copy of nested lists and mappings without the value at a path."""
    first, *rest = path
    if isinstance(body, list):
        changed = list(cast(list[Any], body))
        changed[first : first + 1] = [_without(changed[first], rest)] if rest else []
        return changed
    changed = dict(cast(Mapping[Any, Any], body))
    value = changed.pop(first)
    return {**changed, first: _without(value, rest)} if rest else changed
