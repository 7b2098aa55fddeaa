"""Finding an application's `Jobs` by ``module:attribute``."""

from __future__ import annotations

import importlib
import os
import sys

from jobq._errors import ConfigError
from jobq._jobs import Jobs


def split_application(text: str) -> tuple[str, str]:
    """Return module and attribute.

    Raises:
        ConfigError: it is not ``module:attribute``.
    """
    module, colon, attribute = text.partition(":")
    if not (module and colon and attribute) or "/" in module or module.endswith(".py"):
        raise ConfigError(f"{text!r}: write MODULE:ATTRIBUTE, such as myapp.jobs:jobs")
    return module, attribute


def load_jobs(text: str) -> Jobs:
    """Import the module and return its `Jobs`; modules of the current folder are found, too.

    Raises:
        ConfigError: there is no such module or attribute, or it is no `Jobs`. What else goes wrong
            in the module itself is raised as it is.
    """
    module_name, attribute = split_application(text)
    here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the application itself wants
        raise ConfigError(
            f"there is no module {error.name!r} in {here} or among the installed packages;"
            " run it from the project's folder, or set PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"module {module_name!r} has no {attribute!r}{_jobs_in(module_name)}")
        found = getattr(found, part)
    if not isinstance(found, Jobs):
        raise ConfigError(
            f"{text} is a {type(found).__name__}, and a worker needs a jobq.Jobs{_jobs_in(module_name)}"
        )
    return found


def _jobs_in(module_name: str) -> str:
    names = [name for name, value in vars(sys.modules[module_name]).items() if isinstance(value, Jobs)]
    return f"; did you mean {module_name}:{names[0]}?" if names else ""
