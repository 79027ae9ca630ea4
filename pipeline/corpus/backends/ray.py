"""Ray: this project's engines as actors on the machines of a cluster, each with rows of its own under way.

The stage's process reads prompts and writes shards, so that claims, accounting and resume are those of every engine.

`ray.data` is not used; docs/corpus-engines.md says why.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from pipeline.corpus.backends.base import EngineFailure, FinishedRow, Options
from pipeline.corpus.backends.orphans import OrphanGuard
from pipeline.corpus.backends.ray_actor import EngineActor, EngineSpec, finished_rows, prompt_table
from pipeline.corpus.rows import Row

log = logging.getLogger(__name__)

#: Rows of a task, in batches. An engine runs empty at the end of each; what a killed actor had is done anew.
TASK_BATCHES = 4
#: Tasks that an actor has: one in work, and the next.
_TASKS_PER_ACTOR = 2
#: Memory for rows under way, of a Ray that is started here.
_STORE_BYTES = 2**28


def require_ray() -> None:
    """Raises ValueError where Ray is not installed; says how to get it."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "corpus.backend=ray: the package ray is not in this environment. Install the extra `ray`: "
            "pip install -e '.[ray]', on every machine of the cluster"
        )


class RayCorpusBackend:
    """Actors with an engine each.

    Args:
        spec: what an actor makes its engine from.
        address: a cluster's address, "auto" for the one that this machine belongs to; None starts Ray on this machine.
        cpus_per_actor, gpus_per_actor: what each actor reserves. A CPU is also a thread of an engine that works on them.
            None for the GPUs that the engine's model is spread over, where the cluster has any.
        max_retries: how often an actor may be started again after it was killed, and a task be given to it again.

    Raises:
        ValueError: Ray is not installed, no cluster is there, or it has no room; an engine does not start.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        address: str | None,
        num_actors: int,
        cpus_per_actor: int,
        gpus_per_actor: float | None,
        max_retries: int,
    ) -> None:
        require_ray()
        self.name = f"ray:{spec.config.corpus.backend}"
        self.task_rows = TASK_BATCHES * spec.config.corpus.batch_size
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray = ray
        self._actors: list[Any] = []
        self._guard: OrphanGuard | None = None
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._connect(address, num_actors * cpus_per_actor)
        try:
            there = ray.cluster_resources()
            if gpus_per_actor is None:
                gpus_per_actor = _model_gpus(spec) if there.get("GPU") else 0
            wanted = {"CPU": num_actors * cpus_per_actor, "GPU": num_actors * gpus_per_actor}
            _check_room(there, wanted, may_grow=address is not None)
            actor = ray.remote(EngineActor).options(
                num_cpus=cpus_per_actor,
                num_gpus=gpus_per_actor,
                max_restarts=max_retries,
                max_task_retries=max_retries,
            )
            self._actors = [actor.remote(spec) for _ in range(num_actors)]
            ray.get([one.is_ready.remote() for one in self._actors])
        except ray.exceptions.RayError as error:
            self.close()
            raise ValueError(f"corpus.backend=ray: no engine starts: {_said(error)}") from error
        except ValueError:
            self.close()
            raise

    def _connect(self, address: str | None, num_cpus: int) -> None:
        local = {
            "num_cpus": max(os.cpu_count() or 1, num_cpus),
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
        }
        # Ray sees to most of its processes itself when SIGKILL takes this one, but not to all.
        self._guard = None if address else OrphanGuard()
        try:
            self._ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.WARNING,
                **({} if address else local),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            self.close()
            raise ValueError(
                f"corpus.ray_address={address}: no Ray there: {error}. Start one (ray start --head), or set "
                "corpus.ray_address=null for one on this machine alone"
            ) from error

    def generate(self, rows: Iterable[Row], options: Options) -> Iterator[FinishedRow]:
        """See `CorpusBackend.generate`. Two tasks of `task_rows` rows are under way for each actor."""
        rows, silent = iter(rows), self._ray.put(replace(options, on_tokens=None))
        free = self._actors * _TASKS_PER_ACTOR
        under_way: dict[Any, Any] = {}
        try:
            while True:
                while free and (task := list(islice(rows, self.task_rows))):
                    actor = free.pop(0)
                    under_way[actor.answer.remote(prompt_table(task), silent)] = actor
                if not under_way:
                    return
                (done,), _ = self._ray.wait(list(under_way), num_returns=1)
                free.append(under_way.pop(done))
                for finished in finished_rows(self._answers(done), options.topk):
                    options.report(len(finished.token_ids))
                    yield finished
        finally:
            for task_left in under_way:
                self._ray.cancel(task_left, recursive=False)

    def _answers(self, done: Any) -> Any:
        try:
            return self._ray.get(done)
        except self._ray.exceptions.RayError as error:
            raise EngineFailure(
                f"corpus.backend=ray: {_said(error)}. Finished rows are kept: run again to go on from there"
            ) from error

    def close(self) -> None:
        """Ends the actors, and Ray where it was started here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._is_ours:
            self._ray.shutdown()
        if self._guard is not None:
            self._guard.close()
            self._guard = None


def _check_room(there: dict[str, float], wanted: dict[str, float], *, may_grow: bool) -> None:
    """Actors that find no room would be waited for without end; a cluster may still grow."""
    for name, amount in wanted.items():
        if amount <= there.get(name, 0):
            continue
        message = (
            f"corpus.ray_num_actors and corpus.ray_{name.lower()}s_per_actor ask for {amount:g} {name}s, and Ray has "
            f"{there.get(name, 0):g}: lower one of them"
        )
        if not may_grow:
            raise ValueError(message)
        log.warning("%s, or wait for the cluster to grow", message)


def _model_gpus(spec: EngineSpec) -> int:
    arguments = spec.config.corpus.engine_args
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


def _said(error: BaseException) -> str:
    """What the engine said, or what became of its actor, in one line and without the traceback."""
    cause = getattr(error, "cause", None)
    return str(cause) if isinstance(cause, ValueError) else f"{type(error).__name__}: {' '.join(str(error).split())}"
