"""A cluster that the tests of a file share."""

import pytest

from tests.slurm.local import LocalSlurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
