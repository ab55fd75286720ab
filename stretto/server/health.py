"""What operators and clients ask about the server itself.

`/health` tells the truth about each stage: 200 only while every one of them works and the server
takes requests. `/ping` is the same under the name that some load balancers know.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from stretto._version import __version__
from stretto.server.errors import check_model, json_response
from stretto.server.service import Service


class StageHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    status: Literal["healthy", "dead"]
    reason: str | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_for_chunk: int | None = None
    # Whether it has done what an idle stage does ahead; until then first calls may be slower.
    prepared: bool | None = None


class Health(msgspec.Struct, frozen=True):
    status: Literal["healthy", "unhealthy", "draining"]
    stages: dict[str, StageHealth]


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["stretto"] = "stretto"
    root: str
    parent: None = None
    max_model_len: int
    permission: tuple[()] = ()


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelBody]
    object: Literal["list"] = "list"


def health_of(service: Service) -> Health:
    pipeline = service.omni.pipeline
    stages: dict[str, StageHealth] = {}
    for name in service.stages:
        if name in pipeline.dead_stages:
            stages[name] = StageHealth("dead", reason=pipeline.dead_stages[name])
        elif name in pipeline.stage_loads:
            load = pipeline.stage_loads[name]
            stages[name] = StageHealth(
                "healthy",
                running=load.num_running,
                waiting=load.num_waiting,
                waiting_for_chunk=load.num_waiting_for_chunk,
                prepared=load.is_prepared,
            )
        else:
            # It has not been asked yet, or lives in this very process.
            stages[name] = StageHealth("healthy")
    if pipeline.dead_stages:
        return Health("unhealthy", stages)
    return Health("draining" if service.gate.is_draining else "healthy", stages)


def health_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        health = health_of(service)
        return json_response(health, status=200 if health.status == "healthy" else 503)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/load")
    async def load() -> Response:
        return json_response({"server_load": service.omni.pipeline.num_in_flight})

    @router.get("/metrics")
    async def metrics() -> Response:
        pipeline = service.omni.pipeline
        return Response(
            service.meters.exposition(pipeline.stage_loads, pipeline.num_in_flight),
            headers={"content-type": CONTENT_TYPE_LATEST},
        )

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList([_model(service, name) for name in service.names]))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, service.names)
        return json_response(_model(service, name))

    @router.get("/")
    async def root() -> Response:
        return json_response(
            {"server": "stretto", "version": __version__, "model": service.names[0],
             "openapi": "/openapi.json"}
        )  # fmt: skip

    return router


def _model(service: Service, name: str) -> ModelBody:
    frontend = service.omni.frontend
    return ModelBody(
        id=name,
        created=service.created,
        root=str(service.omni.model.directory),
        max_model_len=frontend.context_lengths[service.stages[0]],
    )
