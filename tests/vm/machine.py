"""Runs a command as root in a virtual machine whose kernel has what this host's lacks.

    python -m tests.vm.machine [--limit SECONDS] [--without FEATURE] [--shared FOLDER] [--number N]
        COMMAND [ARGUMENT]...

The command has the caller's folder and environment, one CPU, a loopback interface and no other network. It
sees the host's files, and what it writes is forgotten, except in /run/shared, which is the shared folder. The
status is the command's own, or 125 when the machine did not start, ended under it or was stopped because time
was up.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

HERE = Path(__file__).resolve().parent
MEMORY = "2G"
BROKEN = 125
#: How much longer than on the host things may take in here; see tests/lab/wait.py.
PATIENCE = "10"
#: Variable that tells a process that it runs in the machine.
INSIDE = "FLANNELD_TEST_MACHINE"

#: Where the shared folder is in there.
SHARED = "/run/shared"

#: Features that the kernel can start without, each with the functions that would register it.
FEATURES = {
    "x_tables": ("ip_tables_init", "ip6_tables_init", "nft_compat_module_init"),
    "xt_comment": ("comment_mt_init",),
    "nf_tables": ("nf_tables_module_init",),
}


class MachineError(Exception):
    """The machine could not be built or started, or ended before its command; the message says why."""


@cache
def lacks(feature: str) -> bool:
    """Whether this host's kernel lacks a feature. Raises ``MachineError`` if that cannot be found out."""
    status = subprocess.run([HERE / "probe", feature], check=False).returncode
    if status not in (0, 1):
        raise MachineError(f"cannot tell whether this kernel has {feature}")
    return status == 1


def run(
    command: Sequence[str], *, limit: float = 3600, without: str = "", shared: str = "", number: int = 0
) -> int:
    """Run a command to its end, at most ``limit`` seconds. Raises ``MachineError``.

    Machines of other numbers have other CPUs of the host, as far as there are some.
    """
    built = subprocess.run([HERE / "build"], stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        raise MachineError("the test kernel could not be built")
    stay_on_a_processor(number)
    with tempfile.TemporaryDirectory(prefix="flanneld-vm-") as name:
        exchange = Path(name)
        (exchange / "command").write_text(_script(command))
        options = {
            "exchange": str(exchange),
            "shared": shared,
            "initcall_blacklist": ",".join(FEATURES.get(without, ())),
        }
        _boot(
            built.stdout.strip(),
            exchange,
            limit,
            [f"{name}={value}" for name, value in options.items() if value],
        )
        return _status(exchange)


def stay_on_a_processor(number: int) -> None:
    """Keep this process and its children on one CPU.

    The machine's kernel and its processes, which are traced, wait for each other at each system call. If they
    have to wake each other on another CPU, that takes twice the time and twice the CPU time.
    """
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[number % len(processors)]})


def _script(command: Sequence[str]) -> str:
    variables = {**os.environ, "FLANNELD_TEST_PATIENCE": PATIENCE, INSIDE: "1"}
    # What is compiled in here is forgotten with all else, but serves many a start until then.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    exports = (
        f"export {name}={shlex.quote(value)}" for name, value in variables.items() if name.isidentifier()
    )
    return "\n".join([*exports, f"cd {shlex.quote(str(Path.cwd()))}", f"exec {shlex.join(command)}", ""])


def _status(exchange: Path) -> int:
    with suppress(OSError, ValueError):
        return int((exchange / "status").read_text())
    last_words = (exchange / "log").read_text(errors="replace")[-2000:]
    raise MachineError(f"the machine ended before the command did:\n{last_words}")


def _boot(kernel: str, exchange: Path, limit: float, options: Sequence[str]) -> None:
    with _copied_to(sys.stdout.buffer) as out, _copied_to(sys.stderr.buffer) as err:
        with (exchange / "log").open("wb") as log:
            machine = subprocess.Popen(
                [
                    *_command_line(kernel, exchange, out.fileno(), err.fileno(), log.fileno()),
                    *options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[out.fileno(), err.fileno(), log.fileno()],
                # Without a home it would make a folder of its own where it is started.
                env={**os.environ, "HOME": str(exchange), "TMPDIR": _memory_folder()},
                process_group=0,
            )
        try:
            machine.wait(limit)
        except subprocess.TimeoutExpired:
            raise MachineError(f"stopped after {limit:g} s") from None
        finally:
            # Its processes are processes of the host.
            with suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()


def _command_line(kernel: str, exchange: Path, out: int, err: int, log: int) -> list[str]:
    return [
        kernel,
        f"mem={MEMORY}",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "panic=1",
        "dummy.numdummies=0",
        f"uml_dir={exchange}",
        "con=null",
        f"con0=null,fd:{out}",
        f"con1=null,fd:{err}",
        f"con2=null,fd:{log}",
        "ssl=null",
        "console=tty2",
        f"init={HERE / 'init'}",
    ]


def _memory_folder() -> str:
    """Where the machine's memory is a file, without a name and as large as what has been used of it."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK) else tempfile.gettempdir()


@contextmanager
def _copied_to(target: BinaryIO) -> Iterator[BinaryIO]:
    """A pipe that ends there. The machine makes what it gets non-blocking, for all who share it."""
    read_end, write_end = os.pipe()

    def copy() -> None:
        with os.fdopen(read_end, "rb", buffering=0) as source, suppress(BrokenPipeError):
            while data := source.read(65536):
                target.write(data)
                target.flush()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        with os.fdopen(write_end, "wb") as pipe:
            yield pipe
    finally:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.vm.machine", description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS")
    parser.add_argument("--without", choices=FEATURES, default="", metavar="FEATURE")
    parser.add_argument("--shared", default="", metavar="FOLDER")
    parser.add_argument("--number", type=int, default=0, metavar="N")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    chosen = parser.parse_args()
    if not chosen.command or not shutil.which(chosen.command[0]):
        parser.error("name a command")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(
            chosen.command,
            limit=chosen.limit,
            without=chosen.without,
            shared=chosen.shared,
            number=chosen.number,
        )
    except KeyboardInterrupt:
        return 130
    except MachineError as error:
        print(f"test machine: {error}", file=sys.stderr)
        return BROKEN


if __name__ == "__main__":
    sys.exit(main())
