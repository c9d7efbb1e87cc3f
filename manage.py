#!/usr/bin/env python
"""Django's command line. `manage.py serve` starts the whole product; every command takes `--data FOLDER`."""

import os
import sys


def data_folder(arguments: list[str]) -> list[str]:
    """The arguments without `--data FOLDER`, which the settings read from the environment before any command exists."""
    rest, values = [], iter(arguments)
    for value in values:
        if value == "--data":
            os.environ["POLYMORPH_DATA"] = next(values, "")
        elif value.startswith("--data="):
            os.environ["POLYMORPH_DATA"] = value.removeprefix("--data=")
        else:
            rest.append(value)
    return rest


def check_folder() -> None:
    """Ends with a sentence when the data folder cannot be used: the settings keep the secret key there."""
    path = os.path.abspath(os.environ.get("POLYMORPH_DATA") or os.path.join(os.path.dirname(__file__), "data"))
    os.environ["POLYMORPH_DATA"] = path
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        sys.exit(f"polymorph: the data folder {path} cannot be made: {error.strerror}. Name another: --data FOLDER.")
    if not os.access(path, os.W_OK | os.X_OK):
        sys.exit(f"polymorph: the data folder {path} cannot be written to. Name another: --data FOLDER.")


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "polymorph_web.settings")
    command_line = data_folder(sys.argv)
    check_folder()
    from django.core.management import execute_from_command_line

    execute_from_command_line(command_line)
