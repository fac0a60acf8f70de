"""Execution of the commands in the network config, and logging of their results."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from msgspec import Struct

from flanneld.backends.contract import DryRun, RunCommand
from flanneld.compat.glog import V
from flanneld.errors import Retryable

log = logging.getLogger(__name__)

#: Characters of a command's output in the log.
_LONGEST_TOLD = 500
#: ``$NAME``, ``${NAME}`` and the shell's special parameters, as in Go's os.Expand.
_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_][A-Za-z0-9_]*|[*#$@!?0-9-]))")


class ConfigCommand(Struct, frozen=True, gc=False):
    """A command, named by its key in the config. Its text may contain a secret and is never logged.

    Without ``shell`` it is split at white space and run directly, as in Go flanneld since 0.28.2.
    """

    name: str
    text: str = ""
    shell: bool = True

    def __bool__(self) -> bool:
        return bool(self.text)


class ConfigCommandFailed(Retryable):
    """Error for a command that failed. ``status`` is its exit status, None after a timeout."""

    def __init__(self, problem: str, remedy: str, status: int | None) -> None:
        super().__init__(problem, remedy)
        self.status = status


class ConfigCommands:
    """Runner of commands through ``Host.run``, each for at most ``time_limit`` seconds."""

    def __init__(self, run: RunCommand, time_limit: float) -> None:
        self._run = run
        self._time_limit = time_limit

    def run(
        self,
        command: ConfigCommand,
        env: Mapping[str, str],
        data: str = "",
        about: str = "",
        *,
        at_exit: bool = False,
    ) -> str:
        """Run a command with ``data`` and a newline as stdin. Return its stdout and stderr.

        Raises ``ConfigCommandFailed``, and ``DryRun`` in a dry run.
        """
        name = command.name + (f" for {about}" if about else "")
        argv = command.text if command.shell else expanded(command.text, {**os.environ, **env})
        try:
            done = self._run(
                argv,
                env,
                f"{data}\n",
                self._time_limit,
                at_exit=at_exit,
                clean=command.shell,
                merged=True,
                name=command.name,
            )
        except DryRun:
            raise
        except Retryable as failure:
            log.log(V(1), "%s failed: %s", name, failure)
            raise ConfigCommandFailed(failure.problem, failure.remedy, None) from None
        output = done.output.strip()
        if done.status:
            log.log(V(1), "%s exited with status %d: %s", name, done.status, told(output))
            remedy = f"it wrote: {told(output)}" if output else "run it by hand with its variables"
            raise ConfigCommandFailed(f"{command.name} exited with status {done.status}", remedy, done.status)
        log.log(V(0 if output else 1), "Ran %s%s", name, f": {told(output)}" if output else "")
        return output


def told(output: str) -> str:
    """Return a command's output as one line for the log."""
    line = " ".join(output.split())
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= _LONGEST_TOLD else f"{line[:_LONGEST_TOLD]}..."


def expanded(text: str, variables: Mapping[str, str]) -> list[str]:
    """Split a command at white space, then expand variables in each word; unknown ones are empty."""
    return [
        _VARIABLE.sub(lambda found: variables.get(found[1] or found[2] or "", ""), word)
        for word in text.split()
    ]
