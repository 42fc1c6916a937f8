"""Whatever is damaged in a file, it loads or is refused with a ValueError that names it, soon and in little memory."""

import pathlib
import resource
import runpy

import pytest
from hypothesis import HealthCheck, given, settings

FORMATS = runpy.run_path(str(pathlib.Path(__file__).parent / "damage.py"))["FORMATS"]


@pytest.mark.parametrize("kind", FORMATS, ids=[kind.name for kind in FORMATS])
def test_a_damaged_file_loads_or_is_refused_by_name(kind, tmp_path):
    kind.write(tmp_path)
    file = tmp_path / kind.file
    kind.read(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(
        max_examples=25,
        deadline=2000,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(kind.damaged(file.read_bytes()))
    def check(content):
        file.write_bytes(content)
        message = ""
        try:
            kind.read(tmp_path)
        except kind.refusals as error:
            message = str(error)
        assert not message or str(tmp_path) in message
        assert "\n" not in message
        assert len(message) < 1000

    check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 500_000
