"""Calls of orch's own actors: Ray carries bytes, and nothing of what these actors answer is pickled.

A method that is marked with ``called`` is a message: its parameters and its result are msgpack by its annotations. The receiver of one
decodes it, which checks types, ranges and lengths (``core/codec.py``). An error is a message as well. Ray passes ``bytes`` on as they are,
where it would pickle any other object, and every exception. A process that replaces an actor's code can still send a pickled answer, which
Ray unpickles before orch sees it: Ray has no option to refuse one (docs/security.md).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast, get_type_hints

import msgspec

from orchestrator.core.codec import Record, RecordError, Text, from_bytes, to_bytes, usable_from_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

A = TypeVar("A")
F = TypeVar("F", bound="Callable[..., Any]")

_MARK: Final = "_is_called"


class ActorFailedError(Exception):
    """A method failed in its actor for a reason that its class does not declare: see the notes, and the actor's log."""


class InvalidMessageError(Exception):
    """An actor has answered with something that its method never returns: its process is no longer what orch started."""


class Failure(Record):
    """An error of a method: the name and the arguments of one of its class's ``failures``, or of any other, as text."""

    kind: Text
    values: tuple[int | Text | None, ...]
    said: Text


class _Form(NamedTuple):
    """The messages of a method: its arguments, and its reply. ``lenient``: a value of the reply that does not fit is left out."""

    arguments: Any
    reply: Any
    parameters: inspect.Signature
    lenient: bool


def called(method: F) -> F:
    """Mark a method that another process calls."""
    setattr(method, _MARK, True)
    return method


async def answer(target: Any, method: str, message: bytes, failures: tuple[type[Exception], ...] = ()) -> bytes:
    """Call a marked method with the arguments of a message; return its reply. A method that blocks runs in a thread.

    ``failures`` are the errors that a caller handles: they arrive as they were raised.
    """
    cls: Any = type(target)
    try:
        form = _form(cls, method)
        arguments = msgspec.structs.asdict(from_bytes(form.arguments, message))
        function = getattr(target, method)
        if inspect.iscoroutinefunction(function):
            value = await function(**arguments)
        else:
            value = await asyncio.to_thread(function, **arguments)
        return to_bytes(form.reply(value=value))
    except Exception as error:
        return to_bytes({"failure": _failure(error, failures)})


def _failure(error: Exception, failures: tuple[type[Exception], ...]) -> Failure:
    known = next((kind for kind in failures if isinstance(error, kind)), None)
    if known is not None:
        # OSError has its file's name only among the arguments of its copy.
        values = tuple(v if type(v) is int else str(v) for v in error.__reduce__()[1] if v is not None)
        return Failure(kind=known.__name__, values=values, said=str(error))
    said = "".join(traceback.format_exception(error))
    sys.stderr.write(said)
    return Failure(kind="", values=(f"{type(error).__name__}: {error}",), said=said)


def stub(cls: type[A], handle: Any, *, through: str = "answer", failures: tuple[type[Exception], ...] = ()) -> A:
    """Return an object with the marked methods of ``cls``, which call those of Ray's actor ``handle``.

    Its methods raise Ray's errors, ``failures``, ActorFailedError and InvalidMessageError.
    """
    return cast("A", _Stub(cls, handle, through, failures))


def handle_of(actor: Any) -> Any:
    """Return Ray's handle of an actor."""
    return actor.handle


class _Stub:
    def __init__(self, cls: type[Any], handle: Any, through: str, failures: tuple[type[Exception], ...]) -> None:
        self._cls = cls
        self.handle = handle
        self._through = through
        self._failures = failures

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        cls: Any = self._cls
        form = _form(cls, method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            message = to_bytes(form.arguments(**form.parameters.bind(*args, **kwargs).arguments))
            reply = _read(form, await getattr(self.handle, self._through).remote(method, message))
            if reply.failure is None:
                return reply.value
            raise self._error_of(reply.failure)

        return call

    def _error_of(self, failure: Failure) -> Exception:
        for kind in self._failures:
            if kind.__name__ == failure.kind:
                try:
                    return kind(*failure.values)
                except TypeError as mismatch:
                    raise InvalidMessageError(f"{failure.kind}: {mismatch}") from mismatch
        error = ActorFailedError(*failure.values)
        error.add_note(failure.said)
        return error


def _read(form: _Form, data: Any) -> Any:
    if type(data) is not bytes:
        raise InvalidMessageError(f"{form.reply.__name__}: not bytes")
    try:
        reply = (usable_from_bytes if form.lenient else from_bytes)(form.reply, data)
    except RecordError as error:
        raise InvalidMessageError(str(error)) from error
    if reply.value is msgspec.UNSET and reply.failure is None:
        raise InvalidMessageError(f"{form.reply.__name__}: neither a value nor a failure")
    return reply


@functools.cache
def _form(cls: Any, name: str) -> _Form:
    """Return the messages of a method. Raises AttributeError for one that no other process may call."""
    method = getattr(cls, name)
    if not getattr(method, _MARK, False):
        raise AttributeError(f"{cls.__name__}.{name} is not called from other processes")
    hints = get_type_hints(method, include_extras=True)
    # Ray adds a parameter to the methods of an actor's class.
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name in hints]
    fields = [
        (p.name, hints[p.name]) if p.default is p.empty else (p.name, hints[p.name], p.default) for p in parameters
    ]
    result = hints["return"]
    title = f"{cls.__name__}.{name}"
    arguments = msgspec.defstruct(f"{title} arguments", fields, kw_only=True)
    value = ("value", result | msgspec.UnsetType, msgspec.UNSET)
    lenient = isinstance(result, type) and "unusable" in getattr(result, "__struct_fields__", ())
    reply = msgspec.defstruct(f"{title} reply", [value, ("failure", Failure | None, None)])
    return _Form(arguments, reply, inspect.Signature(parameters), lenient)
