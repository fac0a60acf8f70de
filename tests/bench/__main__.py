"""Run the measurements: ``.venv/bin/python -m tests.bench --help``."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.bed import Bed, make_bed
from tests.bench.cluster import MOST_PEERS
from tests.bench.figures import Measure, Samples, Subject
from tests.bench.process import MachineLoad
from tests.bench.report import Results
from tests.bench.trial import Settings, live
from tests.lab import CommandError, EtcdError, own_command, peer_command

BACKENDS = ("vxlan", "host-gw")
#: What is measured on a node without peers, and on one with some.
ALONE = {Measure.START, Measure.LATENCY, Measure.RSS, Measure.IDLE}
AMONG_PEERS = {Measure.BULK, Measure.RSS, Measure.IDLE}
LOOK = 0.3  # seconds for which the machine is watched before each start
FAILURES = (AssertionError, CommandError, EtcdError, OSError)


class Bench:
    """A whole run. ``broken`` says whether some life of a daemon did not go well."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.results = Results()
        self.broken = False
        self._chosen = chosen
        self._settings = Settings(idle_seconds=chosen.idle_seconds, events=chosen.events)
        peer = shlex.split(chosen.peer) if chosen.peer else peer_command()
        self._commands = {"ours": own_command()} | ({"peer": peer} if peer else {})

    def run(self) -> None:
        """Every backend with every number of peers; both daemons in turn in each round."""
        for backend in self._chosen.backend:
            if wanted := self._chosen.only & ALONE:
                self._rounds(backend, 0, wanted)
            for peers in self._chosen.peers:
                if wanted := self._chosen.only & AMONG_PEERS:
                    self._rounds(backend, peers, wanted)

    def _rounds(self, backend: str, peers: int, wanted: set[Measure]) -> None:
        with make_bed(backend, peers) as bed:
            for number in range(self._chosen.rounds):
                # Idling is long and its CPU seconds hardly vary: once is enough.
                this_time = wanted - {Measure.IDLE} if number else wanted
                for side in self._commands if this_time else ():
                    self._life(bed, side, this_time)

    def _life(self, bed: Bed, side: str, wanted: set[Measure]) -> None:
        load = MachineLoad()
        time.sleep(LOOK)
        self.results.busy.append(load.busy())
        what = f"{bed.backend}, {bed.peers} peers, {side}"
        try:
            figures = live(bed, self._commands[side], wanted, self._settings)
        except FAILURES as failure:
            self.broken = True
            print(f"{what}: BROKEN: {failure}", file=sys.stderr, flush=True)
            return
        shown = "; ".join(f"{figure} {value:.3g}" for figure, value in figures.items())
        print(f"{what}: {shown}", file=sys.stderr, flush=True)
        for figure, value in figures.items():
            subject = Subject(bed.backend, bed.peers, figure)
            getattr(self.results.samples.setdefault(subject, Samples()), side).append(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the status is 0 unless something broke, whatever the figures are."""
    chosen = _read(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    bench = Bench(chosen)
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.broken = True
    except FAILURES as failure:
        bench.broken = True
        print(f"BROKEN: {failure}", file=sys.stderr)
    print(bench.results.table())
    if chosen.json:
        chosen.json.write_text(bench.results.json())
    return 1 if bench.broken else 0


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure whole daemons.")
    parser.add_argument("--peer", metavar="CMD", help="a daemon to compare with; default $FLANNELD_PEER")
    parser.add_argument("--only", type=_measures, default=set(Measure), help="some of " + ",".join(Measure))
    parser.add_argument("--backend", type=_backends, default=list(BACKENDS), help=",".join(BACKENDS))
    parser.add_argument("--peers", type=_numbers, default=[1000, 5000, 15000], help="default 1000,5000,15000")
    parser.add_argument("--rounds", type=int, default=3, help="lives of each daemon; default 3")
    parser.add_argument("--events", type=int, default=200, help="peers that come and go in latency")
    parser.add_argument("--idle-seconds", type=float, default=60, help="how long idling is watched")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    chosen = parser.parse_args(argv)
    if max(chosen.peers) + chosen.events > MOST_PEERS or min(chosen.peers) < 1:
        parser.error(f"--peers takes numbers from 1 to {MOST_PEERS - chosen.events}")
    if not 1 <= chosen.rounds <= 100:
        parser.error("--rounds takes a number from 1 to 100")
    return chosen


def _measures(text: str) -> set[Measure]:
    return {Measure(name) for name in text.split(",")}


def _backends(text: str) -> list[str]:
    if not set(text.split(",")) <= set(BACKENDS):
        raise ValueError(text)
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
