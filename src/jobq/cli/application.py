"""Finding an application's `Jobs` by ``module:attribute``."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from jobq._errors import ConfigError
from jobq._kinds.jobs import Jobs
from jobq._messages import shown


class ApplicationError(Exception):
    """The application's own module ended its import in some way of its own; the text says how."""


def split_application(text: str) -> tuple[str, str]:
    """Return module and attribute.

    Raises:
        ConfigError: it is not ``module:attribute``.
    """
    module, colon, attribute = text.partition(":")
    named = colon and all(module.split(".")) and all(attribute.split("."))
    if not (named and text.isprintable()) or "/" in module or module.endswith(".py"):
        raise ConfigError(f"{shown(text)}: write MODULE:ATTRIBUTE, such as myapp.jobs:jobs")
    return module, attribute


def load_jobs(text: str) -> Jobs:
    """Import the module and return its `Jobs`; modules of the current folder are found, too.

    Raises:
        ConfigError: there is no such module or attribute, or it is no `Jobs`.
        ApplicationError: what else went wrong in the module itself.
    """
    module_name, attribute = split_application(text)
    here = _current_folder()
    if here not in sys.path:
        sys.path.insert(0, here)
    found = _import(text, module_name, here)
    for part in attribute.split("."):
        found = _member(text, found, part)
    if not isinstance(found, Jobs):
        raise ConfigError(
            f"{text} is a {type(found).__name__}, and a worker needs a jobq.Jobs{_jobs_in(module_name)}"
        )
    return found


def _import(text: str, module_name: str, here: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _told(text, error) from error  # a module that the application itself wants
        raise ConfigError(
            f"there is no module {error.name!r} in {here} or among the installed packages;"
            " run it from the project's folder, or set PYTHONPATH"
        ) from error
    except BaseException as error:  # also what sys.exit() and the like raise
        raise _told(text, error) from error


def _member(text: str, found: object, part: str) -> object:
    try:
        member: object = getattr(found, part)
    except AttributeError:
        module_name, _, attribute = text.partition(":")
        raise ConfigError(f"module {module_name!r} has no {attribute!r}{_jobs_in(module_name)}") from None
    except BaseException as error:
        raise _told(text, error) from error
    return member


def _current_folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - sys.path holds strings
    except OSError as error:
        raise ConfigError(f"the current folder is gone: {error}") from error


def _told(text: str, error: BaseException) -> ApplicationError:
    """Say how an import ended, with the part of the traceback that is the application's own."""
    if isinstance(error, SystemExit):
        return ApplicationError(
            f"{text} cannot be imported: it ends the process, by SystemExit({shown(error.code)})"
        )
    frame = error.__traceback__
    while frame is not None and _is_machinery(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    lines = traceback.format_exception(type(error), error, frame)
    return ApplicationError(f"{text} cannot be imported:\n{''.join(lines).rstrip()}")


def _is_machinery(filename: str) -> bool:
    return filename in (__file__, importlib.__file__) or filename.startswith("<frozen importlib")


def _jobs_in(module_name: str) -> str:
    members: dict[str, object] = getattr(sys.modules.get(module_name), "__dict__", {})
    names = [name for name, value in members.items() if isinstance(value, Jobs)]
    return f"; did you mean {module_name}:{names[0]}?" if names else ""
