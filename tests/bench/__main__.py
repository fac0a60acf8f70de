"""Run the measurements: ``.venv/bin/python -m tests.bench --help``."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from compileall import compile_dir
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.bench import page
from tests.bench.bed import Bed, make_bed, make_kube_bed, make_server_bed
from tests.bench.cluster import MOST_PEERS
from tests.bench.figures import Figure, Measure, Samples, Subject
from tests.bench.flow import CONFIGS, NEEDS, PATH, flow, side_by_side
from tests.bench.process import MachineLoad
from tests.bench.report import Results
from tests.bench.trial import WARM_UP, Figures, Settings, live
from tests.bench.tunnels import MAKERS
from tests.lab import CommandError, EtcdError, own_command, peer_command
from tests.lab.daemon import ROOT
from tests.vm.machine import lacks

#: The backends whose peers exist in etcd alone.
BACKENDS = ("vxlan", "host-gw")
STORES: Mapping[str, Callable[[str, int], AbstractContextManager[Bed]]] = {
    "etcd": make_bed,
    "etcd3": partial(make_bed, api="v3"),
    "dual": partial(make_bed, api="v3", dual=True),
    "kube": make_kube_bed,
    "server": make_server_bed,
}
#: What is measured by the kernel's notifications.
TOLD = {Measure.LATENCY, Measure.BURST, Measure.AMONG, Measure.RESTART, Measure.DRAIN}
#: What is measured on a node without peers, and on one with some.
ALONE = {Measure.LATENCY, Measure.BURST, Measure.START, Measure.RSS, Measure.IDLE}
AMONG_PEERS = {
    Measure.BULK,
    Measure.RSS,
    Measure.IDLE,
    Measure.AMONG,
    Measure.RESTART,
    Measure.DRAIN,
    Measure.DOCTOR,
}
#: What the stores cannot do, or daemons do not with them.
LACKS = {
    "etcd": {Measure.DRAIN},
    "etcd3": {Measure.FLOW},
    "dual": {Measure.FLOW, Measure.DOCTOR},
    "kube": {Measure.FLOW, Measure.DOCTOR, Measure.DRAIN},
    "server": {Measure.FLOW, Measure.DOCTOR, Measure.DRAIN},
}
LOOK = 0.3  # seconds for which the machine is watched before each start
#: The commands of both nodes' daemons.
_Pair = tuple[Sequence[str], Sequence[str]]
FAILURES = (AssertionError, CommandError, EtcdError, OSError)


class Bench:
    """A whole run. ``broken`` says whether some life of a daemon did not go well."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.results = Results()
        self.broken = False
        self._chosen = chosen
        self._settings = Settings(chosen.idle_seconds, chosen.events, chosen.burst, chosen.flow_seconds)
        peer = shlex.split(chosen.peer) if chosen.peer else peer_command()
        self._commands = {"ours": own_command()} | ({"peer": peer} if peer else {})

    def run(self) -> None:
        """Every backend with every number of peers; both daemons in turn in each round."""
        if Measure.FLOW in self._chosen.only:
            for backend in self._chosen.backend or filter(_is_possible, CONFIGS):
                if backend in MAKERS:
                    self._tunnels(backend)
                else:
                    self._flows(backend)
        for backend in self._chosen.backend or BACKENDS:
            if backend not in (*BACKENDS, "wireguard"):
                continue
            # No kernel tells of WireGuard's peers.
            if wanted := self._chosen.only & (ALONE - TOLD if backend == "wireguard" else ALONE):
                self._rounds(backend, 0, wanted)
            for peers in self._chosen.peers:
                # Peers answer through vxlan alone.
                left_out = set() if backend == "vxlan" else {Measure.DOCTOR}
                left_out |= TOLD if backend == "wireguard" else set()
                if wanted := self._chosen.only & AMONG_PEERS - left_out:
                    self._rounds(backend, peers, wanted)

    def _rounds(self, backend: str, peers: int, wanted: set[Measure]) -> None:
        with STORES[self._chosen.store](backend, peers) as bed:
            for number in range(self._chosen.rounds):
                # Idling is long and its CPU seconds hardly vary: once is enough.
                this_time = wanted - {Measure.IDLE} if number else wanted
                for side in self._commands:
                    # The other daemon has no flannelctl.
                    if some := this_time - ({Measure.DOCTOR} if side == "peer" else set()):
                        self._life(bed, side, some)

    def _flows(self, backend: str) -> None:
        """Both nodes with one daemon each, and last with one of either kind."""
        both: dict[str, _Pair | None] = {side: (each, each) for side, each in self._commands.items()}
        ours, peer = self._commands["ours"], self._commands.get("peer")
        mixed = {"to peer": (ours, peer), "from peer": (peer, ours)} if peer else {}
        if backend == PATH:
            both, mixed = {"ours": None}, {}
        for _ in range(self._chosen.rounds):
            for side, daemons in both.items():
                self._flow(backend, side, backend, daemons)
            for which, pair in mixed.items():
                self._flow(f"{backend} {which}", "ours", backend, pair)

    def _tunnels(self, backend: str) -> None:
        """A tunnel of our daemons beside one that was made by hand, instead of the peer's."""
        ours, seconds = self._commands["ours"], self._settings.flow_seconds
        for _ in range(self._chosen.rounds):
            subject = Subject(f"{backend}, peer by hand", 1, Figure.TCP)
            self._try_all(subject, "both", lambda: side_by_side(backend, ours, seconds))

    def _flow(self, name: str, side: str, backend: str, daemons: _Pair | None) -> None:
        seconds = self._settings.flow_seconds
        self._try(Subject(name, 1, Figure.TCP), side, lambda: flow(backend, daemons, seconds))

    def _life(self, bed: Bed, side: str, wanted: set[Measure]) -> None:
        subject = Subject(bed.title, bed.peers, Figure.ENV)
        self._try(subject, side, lambda: live(bed, self._commands[side], wanted, self._settings))

    def _try(self, subject: Subject, side: str, measure: Callable[[], Figures]) -> None:
        self._try_all(subject, side, lambda: {side: measure()})

    def _try_all(self, subject: Subject, who: str, measure: Callable[[], Mapping[str, Figures]]) -> None:
        """Measure once and keep what was found, by side; of the subject only the figure differs."""
        load = MachineLoad()
        time.sleep(LOOK)
        self.results.busy.append(load.busy())
        what = f"{subject.backend}, {subject.peers} peers"
        try:
            found = measure()
        except FAILURES as failure:
            self.broken = True
            print(f"{what}, {who}: BROKEN: {failure}", file=sys.stderr, flush=True)
            return
        for side, figures in found.items():
            shown = "; ".join(f"{figure} {value:.3g}" for figure, value in figures.items())
            print(f"{what}, {side}: {shown}", file=sys.stderr, flush=True)
            for figure, value in figures.items():
                samples = self.results.samples.setdefault(replace(subject, figure=figure), Samples())
                getattr(samples, side).append(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the status is 0 unless something broke, whatever the figures are."""
    chosen = _read(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # As pip does; else each start after an edit would compile, where Python is told to keep nothing.
    compile_dir(ROOT / "flanneld", quiet=1)
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
    if chosen.page and not bench.broken:
        load = f"{os.cpu_count()} CPUs, {bench.results.noise()}"
        run = f"{time.strftime('%Y-%m-%d')}, {load}: tests.bench {shlex.join(argv or sys.argv[1:])}"
        page.DATA.write_text(page.written(page.merged(page.load(), bench.results.samples, chosen.page, run)))
    return 1 if bench.broken else 0


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure whole daemons.")
    parser.add_argument("--peer", metavar="CMD", help="a daemon to compare with; default $FLANNELD_PEER")
    parser.add_argument("--only", type=_measures, default=set(Measure), help="some of " + ",".join(Measure))
    parser.add_argument("--backend", type=_backends, default=[], help="some of " + ",".join(CONFIGS))
    parser.add_argument("--store", choices=STORES, default="etcd", help="where the leases are; default etcd")
    parser.add_argument("--peers", type=_numbers, default=[1000, 5000, 15000], help="default 1000,5000,15000")
    parser.add_argument("--rounds", type=int, default=3, help="lives of each daemon; default 3")
    parser.add_argument("--events", type=int, default=200, help="peers that come and go in latency")
    parser.add_argument("--burst", type=int, default=200, help="peers that come and go in a burst")
    parser.add_argument("--idle-seconds", type=float, default=60, help="how long idling is watched")
    parser.add_argument("--flow-seconds", type=float, default=3, help="how long each flow lasts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    parser.add_argument(
        "--page", metavar="NAME", help='merge the ratios to "Go v0.12.0" into docs/performance.json'
    )
    chosen = parser.parse_args(argv)
    if max(chosen.peers) > MOST_PEERS or min(chosen.peers) < 1:
        parser.error(f"--peers takes numbers from 1 to {MOST_PEERS}")
    if max(chosen.events, chosen.burst) > MOST_PEERS:
        parser.error(f"--events and --burst take numbers up to {MOST_PEERS}")
    if Measure.AMONG in chosen.only and max(chosen.peers) + WARM_UP + chosen.events > MOST_PEERS:
        parser.error("--only among needs subnets for its --events beside those of --peers")
    if not 1 <= chosen.rounds <= 100:
        parser.error("--rounds takes a number from 1 to 100")
    chosen.only -= LACKS[chosen.store]
    return chosen


def _is_possible(backend: str) -> bool:
    return backend not in NEEDS or not lacks(NEEDS[backend])


def _measures(text: str) -> set[Measure]:
    return {Measure(name) for name in text.split(",")}


def _backends(text: str) -> list[str]:
    if not set(text.split(",")) <= set(CONFIGS):
        raise ValueError(text)
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
