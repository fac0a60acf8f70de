"""What the reconciler expects of every table, whatever holds its resources.

``tests/unit/reconcile/test_reconciler.py`` shows what it makes of that, over a simulated table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hypothesis import strategies as st

from flanneld.reconcile.reconciler import Reconciler, desired_by_table
from flanneld.runtime import clock
from flanneld.state.desired import difference
from flanneld.state.permits import Knowledge, Permits
from flanneld.state.resources import Key, Resource
from flanneld.state.table import Report, Scope, Table


class Subject:
    """One table under test and its host: what is wanted of it, and what others do to it.

    Others' deeds are commands of a shell; ``do`` runs them, or does the same to a model.
    """

    #: What the table can be asked to hold; any part of it is a desired state.
    resources: Sequence[Resource] = ()
    #: Commands by which others spoil what is wanted, each another property.
    drifts: Sequence[str] = ()
    #: Commands that make what is not ours, where ours is.
    foreign: Sequence[str] = ()
    #: Whether a reading may fail; a file that cannot be read is one to be written.
    can_be_blind = True
    #: Whether resources outlive the wish for them.
    lasts = False
    #: Whether each run writes what is right already: others wait for that.
    writes_anew = False

    def sensible(self, part: Sequence[Resource]) -> Sequence[Resource]:
        """Return what may be wanted next to a part of the resources, and without what stands on others."""
        return part

    def make(self) -> Table:
        """Make the table as a start of the daemon does: it knows nothing of an earlier one."""
        raise NotImplementedError

    def do(self, command: str, *, check: bool = True) -> str:
        """Do what others do; without ``check`` it may fail."""
        raise NotImplementedError

    def show_foreign(self) -> str:
        """Show what ``foreign`` made, and what others have beside it."""
        raise NotImplementedError

    def clear(self) -> None:
        """Take away what others put where ours should be: an operator's part."""

    @contextmanager
    def blind(self, _table: Table) -> Iterator[None]:
        """Have readings fail meanwhile."""
        raise NotImplementedError
        yield

    def close(self) -> None:
        """End what runs on the host."""


class Run:
    """The reconciler over one table, as one run of the daemon has it."""

    def __init__(self, subject: Subject, desired: Sequence[Resource], *, sweeps: bool = True) -> None:
        self.table = subject.make()
        self._lasts = subject.lasts
        self.desired: dict[Key, Resource] = {}
        self.want(desired)
        self.sweeps = sweeps
        # What it needs is there: the host was made so.
        self.reconciler = Reconciler(
            [self.table],
            {self.table.name: self.desired},
            lambda: False,
            permits=Permits(lambda: Knowledge(synced=self.sweeps)),
            converged=set(self.table.needs),
        )

    def want(self, desired: Sequence[Resource]) -> None:
        self.desired.clear()
        self.desired |= desired_by_table(desired).get(self.table.name, {})

    def converge(self) -> Report:
        return self.reconciler.converge(clock.now())

    def problem(self) -> str:
        (state,) = self.reconciler.states()
        return state.problem or "; ".join(map(str, state.failed))

    def holds_all(self) -> None:
        assert self.problem() == ""
        puts, stale = difference(self.desired, self.table.read(Scope(self.desired)))
        assert puts == []
        assert self._lasts or stale == []


def first_run_makes_all_and_a_second_writes_nothing(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    run.holds_all()
    again = Run(subject, subject.resources).converge()
    made = list(subject.resources) if subject.writes_anew else []
    assert (again.made, again.removed, again.failed) == (made, [], [])
    after = run.converge()
    assert (after.made, after.removed, after.failed) == ([], [], [])


def each_property_that_others_change_is_put_right(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    for command in subject.drifts:
        subject.do(command)
        found = run.table.read(Scope(run.desired))
        assert difference(run.desired, found) != ([], []), command
        run.converge()
        assert run.problem() == "", command
        run.holds_all()


def what_is_not_wanted_any_more_goes_and_the_rest_stays(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    run.want(subject.sensible(subject.resources[:1]))
    gone = set() if subject.lasts else {each.key for each in subject.resources} - run.desired.keys()
    assert {each.key for each in run.converge().removed} == gone
    run.holds_all()


def what_a_killed_run_left_goes_with_the_next_one(subject: Subject) -> None:
    """The first run dies between putting and dropping: the next one knows nothing of it."""
    first = Run(subject, subject.resources, sweeps=False)
    first.converge()
    rest = subject.sensible(subject.resources[1:] or subject.resources)
    first.want(rest)
    assert first.converge().removed == []
    second = Run(subject, rest)
    second.reconciler.adopt = True
    second.converge()
    second.holds_all()


def what_is_not_ours_stays(subject: Subject) -> None:
    for command in subject.foreign:
        subject.do(command)
    before = subject.show_foreign()
    assert before or not subject.foreign
    run = Run(subject, subject.resources)
    run.converge()
    run.holds_all()
    run.want([])
    run.converge()
    # The devices that our objects stand on are part of what is shown for routes.
    assert subject.show_foreign() == before


def a_reading_that_fails_changes_nothing(subject: Subject) -> None:
    run = Run(subject, subject.resources)
    run.converge()
    run.want([])
    with subject.blind(run.table):
        report = run.converge()
    assert (report.made, report.removed) == ([], [])
    assert run.problem()


def after_any_history_all_is_as_wanted(subject: Subject, data: st.DataObject) -> None:
    """Others' deeds, other wishes and restarts, in an order that ``data`` draws."""
    run = Run(subject, subject.resources)
    each = st.sampled_from(list(subject.resources)) if subject.resources else st.nothing()
    parts = st.lists(each, unique_by=lambda each: each.key)
    deeds = st.one_of(st.sampled_from([*subject.drifts, "true"]), parts)
    for deed in data.draw(st.lists(deeds, max_size=8)):
        if isinstance(deed, str):
            subject.do(deed, check=False)
        else:
            run.want(subject.sensible(deed))
        match data.draw(st.sampled_from(["converge", "restart", "go on"])):
            case "converge":
                run.converge()
            case "restart":
                run = Run(subject, list(run.desired.values()))
                run.reconciler.adopt = True
    run.want(subject.resources)
    run.converge()
    if run.problem():
        # Others were there first, or took the place while no run of ours knew it to be ours.
        assert "is not flannel's" in run.problem()
        subject.clear()
        run.converge()
    run.holds_all()
    after = run.converge()
    assert (after.made, after.removed) == ([], [])


PROPERTIES = (
    first_run_makes_all_and_a_second_writes_nothing,
    each_property_that_others_change_is_put_right,
    what_is_not_wanted_any_more_goes_and_the_rest_stays,
    what_a_killed_run_left_goes_with_the_next_one,
    what_is_not_ours_stays,
    a_reading_that_fails_changes_nothing,
)
