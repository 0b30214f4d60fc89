"""Objects of the user's own modules: ``python:pkg.module:name`` as the value of a flag."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.standard_error import visible

PREFIX = "python:"
# Files whose frames come before the user's own in a traceback.
_OURS = ("<frozen importlib", __file__, importlib.__file__)


def is_python_spec(text: str | None) -> bool:
    """Whether a flag names an object of a module instead of an entry of a table."""
    return text is not None and text.startswith(PREFIX)


def load_python(spec: str, flag: str) -> Any:
    """Import the object of a flag's value ``python:pkg.module:name``; the module may lie in the current directory.

    Raises:
        ConfigurationError: the form is wrong, there is no such module or name, or the import raised an error; the
            message then begins with the traceback.
    """
    module_name, _, path = spec.removeprefix(PREFIX).partition(":")
    if not path or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise ConfigurationError(
            f"{flag} {spec}: write it as python:pkg.module:name, which is name in the file pkg/module.py"
        )
    found: Any = _module(module_name, f"{flag} {spec}")
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{flag} {spec}: {module_name} has no {path}: is the name right?")
        found = getattr(found, part)
    return found


def own_traceback(error: BaseException, ours: tuple[str, ...] = _OURS) -> str:
    """Return the traceback of an error, without frames in front whose file names begin with one of ``ours``."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def in_words(error: BaseException) -> str:
    """Return type and message of an error on one line of at most about 300 characters."""
    last = traceback.format_exception_only(type(error), error)[-1]
    words = visible(" ".join(last.split()))
    return words if len(words) <= 300 else words[:300] + "..."


def _module(name: str, user: str) -> ModuleType:
    here = os.getcwd()
    # torchrun leaves the current directory out when it starts a file.
    if not {"", here} & set(sys.path):
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            remedy = "start the run in the folder that holds it, or name that folder in PYTHONPATH"
            if name.endswith(".py"):
                remedy = f"leave out .py, as in python:{name.removesuffix('.py')}:name"
            raise ConfigurationError(f"{user}: there is no module {error.name}: {remedy}") from error
        raise ConfigurationError(_import_failed(user, name, error)) from error
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise ConfigurationError(_import_failed(user, name, error)) from error


def _import_failed(user: str, name: str, error: BaseException) -> str:
    return f"{own_traceback(error)}\n{user}: {name} cannot be imported, it raises {in_words(error)}"
