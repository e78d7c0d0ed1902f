"""One local SLURM of four nodes for all tests of this folder, because its start and its end take seconds."""

import pytest

from tests.slurm.local import LocalSlurm


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    with LocalSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
