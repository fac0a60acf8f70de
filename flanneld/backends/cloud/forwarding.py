"""Reconciler table of this node's permission to forward packets of containers."""

from __future__ import annotations

from collections.abc import Sequence

from flanneld.backends.cloud.call_backoff import WORKER, CallBackoff, audit_period, understood
from flanneld.backends.cloud.contract import Cloud, CloudError, CloudNode, ErrorKind
from flanneld.backends.cloud.resources import FORWARDING, Forwarding
from flanneld.errors import Retryable
from flanneld.state.report import Failure, Report
from flanneld.state.resources import Resource
from flanneld.state.table import Put, Scope, Seen


class CloudForwardingTable:
    """Table of this node's permission to forward, for clouds with such a setting."""

    name = FORWARDING
    what = "the cloud's forwarding permissions"
    worker = WORKER
    vital = False
    needs: frozenset[str] = frozenset()

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._place: CloudNode | None = None
        self._reading, self._asking = CallBackoff(), CallBackoff()

    @property
    def audit(self) -> float:
        return audit_period()

    def read(self, scope: Scope) -> list[Seen]:
        self._reading.check()
        desired = [each for each in scope.desired.values() if isinstance(each, Forwarding)]
        try:
            found = [Seen(self._permission(want)) for want in desired]
        except CloudError as failure:
            self._reading.refused(failure)
            raise
        self._reading.succeeded()
        return found

    def _permission(self, want: Forwarding) -> Forwarding:
        """Read the permission from the cloud. Raises ``CloudError``."""
        with understood():
            self._place = self._cloud.place(want.address)
        return Forwarding(want.address, self._place.forwards)

    def put(self, puts: Sequence[Put]) -> Report:
        report = Report()
        for put in puts:
            try:
                self._asking.check()
                self._allow()
            except Retryable as failure:
                if isinstance(failure, CloudError):
                    self._asking.refused(failure)
                report.failed.append(Failure(put.want, failure.problem, failure.remedy))
            else:
                self._asking.succeeded()
                report.made.append(put.want)
        return report

    def explain(self, put: Put) -> str:
        """Return the calls that ``put`` would make."""
        del put
        return "; ".join(map(str, self._cloud.forwarding_calls(self._place))) if self._place else ""

    def _allow(self) -> None:
        """Set the permission. Raises ``CloudError`` if the cloud refuses or only an operator can do it."""
        assert self._place is not None, "put follows a reading"
        calls = self._cloud.forwarding_calls(self._place)
        remedy = self._cloud.forwarding_remedy(self._place)
        problem = f"the cloud drops packets of containers at {self._place.instance}"
        if not calls:
            raise CloudError(ErrorKind.OTHER, problem, remedy)
        try:
            for call in calls:
                self._cloud.ask(call)
        except CloudError as failure:
            raise CloudError(failure.trouble, f"{problem}: {failure.problem}", remedy) from None

    def drop(self, found: Sequence[Resource]) -> Report:
        """Remove nothing: another program may need the permission."""
        return Report(removed=list(found))

    def close(self, *, remove: bool) -> None:
        """Do nothing: the table has no resources to release."""
