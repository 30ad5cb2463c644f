"""Replicas as a deployment of Ray Serve. No other module knows Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from slm_core.errors import SlmError
from slm_core.server.cluster.bridge import Bridge, ReturnAddress, bring
from slm_core.server.cluster.forwarding import Ended, Request, Sent, Whole, tag_of
from slm_core.server.cluster.front import ReplicaLost
from slm_core.server.cluster.replica import Belongings, Replica
from slm_core.server.cluster.routing import Routing
from slm_core.server.options import ServerOptions
from slm_core.server.registry import ServedModel

_DEPLOYMENT = "Replica"
_STATS_S = 0.5
"""Seconds between two reports of a replica's tags. Sessions that a replica takes over wait for its next report."""
_LEAVING_S = 20.0
"""Seconds that a replica has to hand over its sessions, after its last answers."""
_PATIENCE_S = 30.0
"""Seconds after which a start that takes long is reported."""
_LOG = logging.getLogger("slm_core")
_ASK_S = 10.0
"""Seconds within which all replicas answer a request to all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How many replicas there are, and where.

    Attributes:
        address: the address of a Ray cluster ("auto" for the one of this machine); None to start one on this machine.
        app: the name of the application in the cluster; one of the same name is replaced.
        n_min: the fewest replicas.
        n_max: the largest number of replicas; Ray adds and removes them by the number of requests.
        n_parallel: the requests that a replica computes together.
        n_chars: the characters of prompts that a replica is expected to keep in its cache.
        n_cpus: the cores of a replica.
        n_gpus: the GPUs of a replica.
    """

    address: str | None = None
    app: str = "slm-core"
    n_min: int = 2
    n_max: int = 2
    n_parallel: int = 16
    n_chars: int = 4 * 32768
    n_cpus: int = 1
    n_gpus: float = 0.0


class PrefixRouter(RequestRouter):
    """Ray's request router: asks ``Routing``, and sends requests for a session to the replica that has it."""

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray with the arguments of the deployment's ``RequestRouterConfig``."""
        self._patience_s: float = options["patience_s"]
        self._known: set[str] = set()  # tags of all present and earlier replicas
        self._routing = Routing(options["n_parallel"], options["n_chars"])
        self._counted: dict[str, str] = {}  # by Ray's id of a request: the replica that it counts for
        self._lock = threading.Lock()  # other threads report the ends of requests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a request; none if it has to wait. See Ray's ``RequestRouter``."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise Ray asks again without a pause
        request = pending_request.args[0] if pending_request.args else None
        text, home = (request.text, request.home) if isinstance(request, Request) else ("", "")
        tags = {tag: each for each in candidate_replicas for tag in _tags(each)}
        self._known |= tags.keys()
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        with self._lock:
            self._routing.keep(by_name)
        if home in tags:
            return [self._count(pending_request, tags[home], text)]
        if home in self._known:  # its replica ends: another one will have its sessions
            if self._get_curr_time_s() - pending_request.created_at < self._patience_s:
                return []
            self._known.discard(home)
        with self._lock:
            chosen = self._routing.choose(text)
        return [self._count(pending_request, by_name[chosen], text)]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray at the end of a request."""
        self._uncount(internal_request_id)

    def _count(self, pending: PendingRequest, replica: RunningReplica, text: str) -> list[RunningReplica]:
        """Count a request for a replica from now on: the next choice includes it, even if it is not sent yet."""
        request_id = pending.metadata.internal_request_id
        self._uncount(request_id)
        with self._lock:
            self._counted[request_id] = replica.replica_id.unique_id
            self._routing.begin(replica.replica_id.unique_id, text)
        pending.future.add_done_callback(lambda future: self._uncount(request_id) if future.cancelled() else None)
        return [replica]

    def _uncount(self, request_id: str) -> None:
        with self._lock:
            name = self._counted.pop(request_id, None)
            if name is not None:
                self._routing.end(name)


def _tags(replica: RunningReplica) -> list[str]:
    """The tags of a replica: its own tag, and the tags that it reports."""
    return [tag_of(replica.replica_id.unique_id), *replica.routing_stats.get("tags", ())]


class Deployed:
    """A replica as Ray Serve runs it, in a process of its own."""

    async def __init__(self, models: Sequence[ServedModel], options: ServerOptions) -> None:  # type: ignore[misc]
        self._replica = Replica(serve.get_replica_context().replica_id.unique_id, models, options)
        self._all_end = False
        await self._replica.start()

    async def answer(self, request: Request, address: ReturnAddress) -> None:
        """Answer a request to an address. For Ray, the request lasts as long as its answer."""
        await bring(self._replica.answer(request), address)

    async def whole(self, request: Request) -> Whole:
        """See ``Replica.whole``."""
        return await self._replica.whole(request)

    async def end_answers(self) -> None:
        """See ``Replica.end_answers``."""
        await self._replica.end_answers()

    async def adopt(self, belongings: Belongings) -> None:
        """See ``Replica.adopt``."""
        self._replica.adopt(belongings)

    async def all_end(self) -> None:
        """All replicas will end: their sessions are not handed over."""
        self._all_end = True

    def record_routing_stats(self) -> dict[str, Any]:
        """The data of this replica for routers; Ray calls this again and again."""
        return {"tags": list(self._replica.tags)}

    async def check_health(self) -> None:
        """Raise if an engine has failed or hangs; Ray then replaces the replica."""
        if not self._replica.is_healthy:
            raise RuntimeError("an engine has failed or hangs")

    async def __del__(self) -> None:
        """Hand over, and close; Ray calls and awaits it after the last answer."""
        try:
            belongings = await self._replica.belongings()
            if not self._all_end and (belongings.sessions or belongings.responses):
                context = serve.get_replica_context()
                handle = serve.get_deployment_handle(context.deployment, context.app_name)
                await asyncio.wait_for(handle.adopt.remote(belongings), _LEAVING_S)
        except Exception as error:  # nothing else reports it
            _LOG.error("sessions were not handed over: %s", type(error).__name__)
        finally:
            await self._replica.close()


class RayReplicas:
    """Replicas of models in a Ray cluster.

    Args:
        models: the models; the functions that load them are sent to each replica.
        options: the options of each replica.
        cluster: how many there are, and where.
    """

    def __init__(self, models: Sequence[ServedModel], options: ServerOptions, cluster: ClusterOptions) -> None:
        self._models = models
        self._options = options
        self._cluster = cluster
        self._handle: Any = None
        self._answers: Any = None
        self._bridge: Bridge | None = None

    async def start(self) -> None:
        """Wait for the replicas.

        Raises:
            SlmError: there is no cluster, or the first model cannot be loaded.
        """
        deploying = asyncio.create_task(asyncio.to_thread(self._deploy))
        while not (await asyncio.wait([deploying], timeout=_PATIENCE_S))[0]:
            _LOG.warning("still waiting for replicas: %s", await asyncio.to_thread(self._state))
        await deploying
        _take_signals_back()
        host = "127.0.0.1" if self._cluster.address is None else ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._bridge = Bridge(host)
        await self._bridge.start()

    async def end_answers(self) -> None:
        """See ``Replicas``."""
        with suppress(Exception):  # a replica that does not answer sends nothing to clients, either
            await self._handle.broadcast("end_answers").results_async(timeout_s=_ASK_S)

    async def close(self) -> None:
        """End all replicas, after their answers."""
        if self._handle is not None:
            with suppress(Exception):
                await self._handle.broadcast("all_end").results_async(timeout_s=_ASK_S)
        await asyncio.to_thread(self._delete)
        if self._bridge is not None:
            await self._bridge.close()

    async def scale(self, n_replicas: int) -> None:
        """Change the number of replicas. Replicas that end leave their sessions to other replicas.

        Raises:
            SlmError: the first model cannot be loaded.
        """
        self._cluster = replace(self._cluster, n_min=n_replicas, n_max=n_replicas)
        await asyncio.to_thread(self._run)

    async def answer(self, request: Request) -> AsyncGenerator[Sent | Ended]:
        """See ``Replicas``."""
        assert self._bridge is not None
        async with self._bridge.expected() as expected:
            response = self._answers.remote(request, expected.address)
            call = asyncio.ensure_future(response)
            call.add_done_callback(lambda done: expected.fail() if done.cancelled() or done.exception() else None)
            try:
                async with aclosing(expected.parts()) as parts:
                    async for part in parts:
                        yield part
            except EOFError as error:
                raise ReplicaLost("the replica that answered has ended") from error
            finally:
                if not expected.is_connected:  # it waits for a replica
                    response.cancel()

    async def all_answers(self, request: Request) -> Sequence[Whole]:
        """See ``Replicas``."""
        response = self._handle.broadcast("whole", request)
        try:
            answers = await response.results_async(timeout_s=_ASK_S, return_exceptions=True)
        except TimeoutError as error:
            raise ReplicaLost("a replica does not answer") from error
        return sorted((each for each in answers if isinstance(each, Whole)), key=lambda whole: whole.tag)

    def _deploy(self) -> None:
        cluster = self._cluster
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
        os.environ.setdefault("RAY_worker_niceness", "0")  # models compute in workers; 15 would be Ray's default
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        local: dict[str, Any] = {"num_cpus": cluster.n_cpus * cluster.n_max, "include_dashboard": False}
        try:
            ray.init(
                cluster.address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                **({} if cluster.address else local),
            )
            serve.start(proxy_location="Disabled")
        except (RuntimeError, ConnectionError, ValueError) as error:
            raise SlmError(f"no Ray cluster: {_last_line(str(error))}") from error
        self._run()

    def _run(self) -> None:
        try:
            self._handle = serve.run(self._application(), name=self._cluster.app, route_prefix=None)
        except RuntimeError as error:
            raise SlmError(self._reason(error)) from error
        self._answers = self._handle.options(method_name="answer")

    def _application(self) -> Any:
        cluster, grace_s = self._cluster, self._options.grace_s
        scaling: dict[str, Any] = {"num_replicas": cluster.n_max}
        if cluster.n_min < cluster.n_max:
            scaling = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=cluster.n_min,
                    max_replicas=cluster.n_max,
                    target_ongoing_requests=cluster.n_parallel,
                )
            }
        routing: dict[str, Any] = {
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {
                "n_parallel": cluster.n_parallel,
                "n_chars": cluster.n_chars,
                "patience_s": 2 * grace_s + _LEAVING_S,
            },
            "request_routing_stats_period_s": _STATS_S,
        }
        deployed = serve.deployment(
            name=_DEPLOYMENT,
            ray_actor_options={"num_cpus": cluster.n_cpus, "num_gpus": cluster.n_gpus},
            max_constructor_retry_count=2,  # another attempt would fail, too
            max_ongoing_requests=self._options.max_requests + 64,  # the replica refuses requests itself, with 429
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=2 * grace_s + _LEAVING_S,
            request_router_config=RequestRouterConfig(**routing),
            **scaling,
        )
        return deployed(Deployed).bind(self._models, self._options)

    def _state(self) -> str:
        """The state of the replicas according to Ray, in one line."""
        status = serve.status().applications.get(self._cluster.app) if ray.is_initialized() else None
        deployed = status.deployments.get(_DEPLOYMENT) if status is not None else None
        return " ".join(deployed.message.split()) if deployed is not None and deployed.message else "Ray starts"

    def _reason(self, error: Exception) -> str:
        """Why there are no replicas, in one line."""
        status = serve.status().applications.get(self._cluster.app)
        deployed = status.deployments.get(_DEPLOYMENT) if status is not None else None
        text = deployed.message if deployed is not None else str(error)
        errors = re.findall(r"slm_core\.errors\.\w+: (.*)", text)
        return f"no replica starts: {errors[-1] if errors else _last_line(text)}"

    def _delete(self) -> None:
        if ray.is_initialized():
            with suppress(Exception):
                serve.delete(self._cluster.app)
            ray.shutdown()  # ends a cluster that was started here


def _take_signals_back() -> None:
    """Give SIGTERM back to its handler in Python: Ray's handler prints a stack trace, and aborts the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray does not say why"
