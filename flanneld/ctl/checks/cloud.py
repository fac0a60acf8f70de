"""Checks of a cloud backend's routes and of the permission to forward."""

from __future__ import annotations

from collections.abc import Iterator

from flanneld.backends.cloud.resources import FORWARDING, ROUTES
from flanneld.ctl.facts import Facts
from flanneld.ctl.findings import Advice, Finding, check


@check("B", "cloud routes", "the cloud's table has this node's routes")
def cloud_routes(facts: Facts) -> Iterator[Finding]:
    yield from _refused(facts, ROUTES, "other nodes of the cloud do not reach the containers of this one")


@check("E", "cloud forwarding", "the cloud lets packets of containers pass")
def cloud_forwarding(facts: Facts) -> Iterator[Finding]:
    why = (
        "a cloud drops packets that carry no address of the instance itself: on AWS by the source/destination"
        " check, on Google Cloud without can-ip-forward"
    )
    yield from _refused(facts, FORWARDING, why)


def _refused(facts: Facts, table: str, why: str) -> Iterator[Finding]:
    for each in facts.document.get("refused") or ():
        if each.get("table") == table:
            remedy = Advice(each.get("remedy") or "see the daemon's log")
            yield Finding(each["reason"], each["object"], why, remedy, about=each["object"])
