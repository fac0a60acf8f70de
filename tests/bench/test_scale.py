"""The plot of time and memory over the number of peers."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

from tests.bench.scale import DATA, PLOT, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_the_committed_plot_is_drawn_from_the_committed_data() -> None:
    assert PLOT.read_text() == draw(json.loads(DATA.read_text()))


def test_a_tenfold_number_is_as_far_as_any_other_tenfold_number() -> None:
    samples = {str(10**power): [{"seconds": 1, "cpu": 1, "rss": 10.0**power}] for power in range(1, 4)}
    *_, rss = ElementTree.fromstring(draw(samples)).iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in rss.attrib["points"].split()]
    steps = [(x2 - x1, y2 - y1) for (x1, y1), (x2, y2) in pairwise(points)]
    assert abs(steps[0][0] - steps[1][0]) < 0.2
    assert abs(steps[0][1] - steps[1][1]) < 0.2
    assert steps[0][1] < 0  # larger is higher
