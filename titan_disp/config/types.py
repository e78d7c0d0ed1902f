"""The class of a run's config: TorchTitan's sections and those of ``job_config``.

TorchTitan merges the two classes while it loads a config. Type checkers cannot see
this, and read the class below instead.
"""

from typing import TYPE_CHECKING

from torchtitan.config import job_config as titan

if TYPE_CHECKING:
    from titan_disp import job_config as ours

    class Model(titan.Model, ours.Model): ...

    class Training(titan.Training, ours.Training): ...

    class Checkpoint(titan.Checkpoint, ours.Checkpoint): ...

    class JobConfig(titan.JobConfig):
        model: Model
        dispersion: ours.Dispersion
        baseline: ours.Baseline
        stream: ours.Stream
        training: Training
        budget: ours.Budget
        guard: ours.Guard
        condensation: ours.Condensation
        checkpoint: Checkpoint
else:
    JobConfig = titan.JobConfig
