"""The HTTP application: routes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from staffel.api.engine import Engine
from staffel.api.envelope import Envelope
from staffel.api.errors import ApiError, json_response, not_ready
from staffel.api.grammars import Grammars
from staffel.api.metrics import Metrics
from staffel.api.record import CLIENT_LEFT
from staffel.api.serving import CHAT, COMPLETIONS, ApiOptions, Serving
from staffel.api.tokens import Tokenizer
from staffel.config import ModelSpec


def create_app(
    engine: Engine,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    grammars: Grammars,
    options: ApiOptions | None = None,
    *,
    dropped_lines: Callable[[], int] = lambda: 0,
    crowded: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """The OpenAI-compatible API of one model. Starts nothing; engine and grammars are the caller's.

    `dropped_lines` counts the log lines that could not be written; while `crowded`, only the
    operator's routes are answered.
    """
    options = options or ApiOptions()
    serving = Serving(engine, spec, tokenizer, grammars, options)
    metrics = Metrics(engine, dropped_lines)
    app = FastAPI(
        title="Staffel", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.add_middleware(Envelope, metrics=metrics, api_key=options.api_key, crowded=crowded)
    _handle_errors(app)
    _add_openai_routes(app, serving)
    _add_operator_routes(app, engine, metrics)
    return app


def _add_openai_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [serving.card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        serving.check_model(name)
        return json_response(serving.card())

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await serving.generate(http, COMPLETIONS)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await serving.generate(http, CHAT)

    @app.post("/tokenize")
    async def tokenize(http: Request) -> Response:
        return await serving.tokenize(http)

    @app.post("/detokenize")
    async def detokenize(http: Request) -> Response:
        return await serving.detokenize(http)


def _add_operator_routes(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        state, missing = engine.state(), _missing(engine)
        if state != "ready":
            raise not_ready(state, missing)
        return json_response({"state": state, "missing": missing})

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(
            generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )


def _missing(engine: Engine) -> dict[str, str]:
    """The instances that aren't ready, and why."""
    return {
        status.instance: f"{status.state}{f' ({status.reason})' if status.reason else ''}"
        for status in engine.status()
        if not status.ready
    }


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(http: Request, error: HTTPException) -> Response:
        text = f"{error.detail}: {http.method} {http.url.path}"
        response = ApiError(error.status_code, text).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def bug(http: Request, _: Exception) -> Response:
        response = ApiError(500, "The server failed; its log says more.").response()
        response.headers["X-Request-Id"] = http.state.record.request_id
        return response
