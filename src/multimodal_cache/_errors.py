"""One error for many callers: each raises one of its own."""

from __future__ import annotations

import contextlib
import types
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)

_HEAP_TYPE = 1 << 9  # of a class's flags: made at run time, as by a class statement
_MISSING = object()


class Failure:
    """What ``encode`` raised, for those who waited for it.

    To raise an error adds to its traceback. Were it one object for all, each traceback would
    grow with the number of waiters, and would hold the frames of all. So each gets a copy, whose
    ``__cause__`` is one more copy, which nobody raises: it has the traceback inside ``encode``.
    Reported as trio #466 and mars #2748.

    Args:
        error: As it was caught, before it is raised again.

    Raises:
        Exception: It can't be copied; of any type, since its class may do anything.
    """

    def __init__(self, error: Exception) -> None:
        cause = copy_error(error)
        cause.__cause__, cause.__context__ = error.__cause__, error.__context__
        cause.__suppress_context__ = error.__suppress_context__
        self._cause = cause.with_traceback(error.__traceback__)

    def new_error(self) -> Exception:
        """Returns an error for one caller to raise."""
        error = copy_error(self._cause)
        error.__cause__ = self._cause
        return error


def copy_error(error: E) -> E:
    """Returns an equal error, without traceback, cause and context.

    It is made as unpickling would, but without the constructor: that may take other arguments
    than those in ``args``, or make others of them.

    Raises:
        Exception: It can't be copied.
    """
    cls = base = type(error)
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__  # type: ignore[assignment]  # object isn't a heap type
    copied = base.__new__(cls, *error.args)
    if type(copied) is not cls:
        raise TypeError(f"{base.__name__}.__new__ makes a {type(copied).__name__}")
    for name, value in _members(error).items():
        if getattr(copied, name, _MISSING) is not value:  # an unset one may read as None
            with contextlib.suppress(AttributeError, TypeError):  # for reading only
                object.__setattr__(copied, name, value)
    vars(copied).update(vars(error))
    notes = getattr(error, "__notes__", None)  # since Python 3.11
    if notes:
        vars(copied)["__notes__"] = [*notes]  # its own list
    copied.args = error.args
    return copied


def _members(error: Exception) -> dict[str, Any]:
    """Returns what an instance keeps outside of its ``__dict__``."""
    return {
        name: getattr(error, name)
        for base in type(error).__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(error, name)
    }
