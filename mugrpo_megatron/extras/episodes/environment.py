"""The environment variables that a program of `rollout.agent` gets: those of the run, without secrets."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping

SECRET_WORD = re.compile(
    r"(?:^|_)(?:[A-Z0-9]*(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?|PWD|PAT|AUTH|COOKIE)(?:_|$)"
)
"""A word in a variable's name (in capitals) that says that its value is a secret: `HF_TOKEN`, `PGPASSWORD`."""
WORKING_DIRECTORIES = ("PWD", "OLDPWD")
LOGIN = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""A user and a password in an address: `postgres://me:secret@host`."""


def secrets_in(environment: Mapping[str, str], named: Collection[str] = ()) -> list[str]:
    """Names of the variables that a program does not get; it gets those in `named` (`episodes.secrets`) although they
    look like secrets."""
    return sorted(
        name
        for name, value in environment.items()
        if name not in (*named, *WORKING_DIRECTORIES) and (SECRET_WORD.search(name.upper()) or LOGIN.search(value))
    )


def program_path(environment: Mapping[str, str]) -> str:
    """The program's PATH: the folder of this run's interpreter first, so that `python` is this interpreter, with its
    packages."""
    return os.pathsep.join([os.path.dirname(os.path.abspath(sys.executable)), environment.get("PATH", os.defpath)])
