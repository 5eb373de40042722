"""The two heat maps: what their captions say of them is so."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from gva.cli import main
from gva.report.scale import FIGURES, POSITIONS, figure, weights


@pytest.mark.parametrize("name", FIGURES)
def test_every_cell_is_drawn_once_and_tells_its_weight(name):
    tree = ET.fromstring(figure(name))
    titles = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(FIGURES[name]) * POSITIONS**2
    last = FIGURES[name][-1]
    assert titles[-1] == f"query 9, key 9: {weights(last.sigma_q, last.sigma_k)[9, 9]:.4f}"


def test_scale_decides_between_flat_selective_and_peaked():
    flat, unit, four, eight = (weights(sigma, sigma) for sigma in (0.006, 1, 4, 8))
    for found in (flat, unit, four, eight):
        assert np.allclose(found.sum(1), 1)
    assert np.abs(flat - 0.1).max() < 1e-4
    sharp = [found.max(1).mean() for found in (flat, unit, four, eight)]
    assert sharp == sorted(sharp)
    assert 0.15 < sharp[1] < 0.5
    assert sharp[3] > 0.9
    assert np.abs(weights(1, 0.02) - 0.1).max() < 0.01
    assert weights(1, 8).max(1).mean() > 0.7


def test_they_are_written_alone_and_the_same_each_time(tmp_path, capsys):
    for folder in ("a", "b"):
        assert main(["figures", "scale", "--out", str(tmp_path / folder)]) == 0
    names = ["attention-scale.svg", "attention-joint-scale.svg"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(names)
    told = capsys.readouterr().out
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert told.count(name) == 2
