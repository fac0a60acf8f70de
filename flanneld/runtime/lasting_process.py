"""Child process that outlives the daemon. Imported on demand: few daemons start one."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from flanneld.runtime import waits


class LastingProcess:
    """Process in a session of its own: a terminal's Ctrl-C for the daemon does not reach it.

    Its output goes to a descriptor, or into a pipe for ``said``. Raises ``OSError`` if it does not start.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], output: int = subprocess.PIPE
    ) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, or the negative number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def said(self, within: float) -> list[str]:
        """Return the lines that it writes before it closes its output or ends.

        It is killed if it writes nothing ``within`` seconds.
        """
        assert self._process.stdout
        with self._process.stdout as output:
            if waits.readable(output.fileno(), within):
                return output.read().decode(errors="replace").split("\n")[:-1]
        self._process.kill()
        return [f"it was not ready after {within:g} s"]
