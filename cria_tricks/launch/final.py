"""Keep torchrun's agent from restarting processes that refused their input: they would refuse it again.

Importing this module imports torch, which takes seconds.
"""

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

BAD_INPUT = 2
"""The exit code of a command that refused its input (``cli/main.py``)."""


class Agent(LocalElasticAgent):
    """torchrun's agent, but exit code 2 of a process is final, however many restarts are left."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if any(failure.exitcode == BAD_INPUT for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result
