"""The calls of the API: what each path answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dflash_batch.worker.contract import CHAT, TEXT, Endpoint, ErrorCode, ModelRef, RowResult
from dflash_batch.worker.gateway import errors
from dflash_batch.worker.gateway.batches import Asked, Batches, BatchRecord
from dflash_batch.worker.gateway.bodies import asked_batch, asked_row, body_of
from dflash_batch.worker.gateway.catalogue import Catalogue
from dflash_batch.worker.gateway.clerk import Clerk
from dflash_batch.worker.gateway.disk import Named
from dflash_batch.worker.gateway.errors import ApiError, error_response
from dflash_batch.worker.gateway.files import FileRecord, Files
from dflash_batch.worker.gateway.guard import Guard
from dflash_batch.worker.gateway.intake import first_model
from dflash_batch.worker.gateway.live import Desk
from dflash_batch.worker.gateway.metrics import exposition
from dflash_batch.worker.gateway.pool import Pool
from dflash_batch.worker.gateway.results import new_lines, pick_failed
from dflash_batch.worker.gateway.tokens import Rulers
from dflash_batch.worker.gateway.upload import Upload
from dflash_batch.worker.queue import QueueUnreachable

_N = TypeVar("_N", bound=Named)


@dataclass(frozen=True)
class Options:
    """What a gateway is made of."""

    home: Path  # its folder is `gateway` in it
    url: str  # of the queue
    models: tuple[ModelRef, ...] = ()
    tokens: frozenset[bytes] = frozenset()  # hashes; none: anyone on this machine may call
    revive: Callable[[], None] = lambda: None  # brings the queue's server back


class Gateway:
    """The state behind the calls, and the calls."""

    def __init__(self, options: Options) -> None:
        folder = options.home / "gateway"
        self.files = Files(folder / "files")
        self.batches = Batches(folder / "batches")
        self.pool = Pool(options.url)
        self.catalogue = Catalogue(list(options.models), self.pool)
        self.rulers = Rulers()
        self.clerk = Clerk(self.batches, self.files, options.url, options.revive)
        self.desk = Desk(options.url, options.home, options.revive)

    # --- files -------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        upload = Upload(self.files.part())
        try:
            await upload.receive(request)
            purpose = upload.fields.get("purpose")
            if purpose != "batch":
                raise _invalid("purpose must be batch", "purpose")
            if upload.filename is None:
                raise _missing("file")
            record = await run_in_threadpool(self.files.adopt, upload.path, upload.filename)
        finally:
            upload.path.unlink(missing_ok=True)
        return JSONResponse(record.shown())

    def list_files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        found = [f for f in self.files.shelf.all() if purpose in (None, f.purpose)]
        return _page(request, found, lambda f: f.created_at, FileRecord.shown, most=10_000)

    def get_file(self, request: Request) -> Response:
        return JSONResponse(self._file(request.path_params["id"]).shown())

    def delete_file(self, request: Request) -> Response:
        with self.batches.shelf.lock:  # or a batch could take it up meanwhile
            record = self._file(request.path_params["id"])
            users = [b.id for b in self.batches.shelf.all() if b.input_file_id == record.id]
            if any(not self._batch(name).is_over for name in users):
                raise ApiError(409, "a batch that runs needs the file", code="file_in_use")
            self.files.remove(record.id)
        return JSONResponse({"id": record.id, "object": "file", "deleted": True})

    def content(self, request: Request) -> Response:
        record = self._file(request.path_params["id"])
        return FileResponse(self.files.path(record.id), media_type="application/octet-stream")

    # --- batches -----------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        body, key = await body_of(request), request.headers.get("idempotency-key")
        return JSONResponse((await run_in_threadpool(self._create, body, key)).shown())

    def _create(self, body: dict[str, Any], key: str | None) -> BatchRecord:
        asked = asked_batch(body)
        if key is not None and not 0 < len(key) <= 255:
            raise _invalid("Idempotency-Key must have 1 to 255 characters", "Idempotency-Key")
        with self.batches.shelf.lock:
            earlier = self.batches.earlier(asked, key)
            if earlier is not None:
                return self.clerk.progress(earlier)
            file = self._file(asked.input_file_id, 400)
            if file.purpose != "batch":
                raise _invalid("input_file_id names a file that is no batch", "input_file_id")
            model = first_model(self.files.path(file.id))
            ref = self.catalogue.find(model, 400)
            return self.batches.create(asked, key, model, ref)

    def list_batches(self, request: Request) -> Response:
        found = self.batches.shelf.all()
        return _page(request, found, lambda b: b.created_at, self._shown, most=100)

    def get_batch(self, request: Request) -> Response:
        return JSONResponse(self._shown(self._batch(request.path_params["id"])))

    def results(self, request: Request) -> Response:
        batch = self._batch(request.path_params["id"])
        paths = [self.files.path(batch.output_id(kind)) for kind in ("out", "err")]
        follow = request.query_params.get("follow", "0") in ("1", "true")

        def is_over() -> bool:
            found = self.batches.shelf.get(batch.id)
            return not follow or found is None or found.is_over

        return StreamingResponse(new_lines(paths, is_over), media_type="application/x-ndjson")

    def retry(self, request: Request) -> Response:
        batch = self._batch(request.path_params["id"])
        if not batch.is_over:
            raise ApiError(409, "the batch is not over", code="batch_not_over")
        with self.batches.shelf.lock:
            source = self._file(batch.input_file_id, 409)
            if batch.error_file_id is None:
                raise ApiError(409, "no row of the batch failed", code="nothing_failed")
            failed = self._file(batch.error_file_id, 409)
            part = self.files.part()
            pick_failed(self.files.path(source.id), self.files.path(failed.id), part)
            file = self.files.adopt(part, f"retry-{source.filename}"[:255])
            asked = Asked(
                file.id,
                batch.endpoint,
                batch.completion_window,
                batch.expires_at - batch.created_at,
                batch.metadata,
                batch.priority,
            )
            again = self.batches.create(asked, None, batch.model, batch.ref)
        return JSONResponse(again.shown())

    def cancel(self, request: Request) -> Response:
        record = self.batches.cancel(self._batch(request.path_params["id"]).id)
        return JSONResponse(self._shown(record))

    # --- live --------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        return await self._live(request, CHAT)

    async def text(self, request: Request) -> Response:
        return await self._live(request, TEXT)

    async def _live(self, request: Request, endpoint: Endpoint) -> Response:
        row = asked_row(await body_of(request), endpoint)
        ref = await run_in_threadpool(self.catalogue.find, row.model, 404)
        answer = asyncio.ensure_future(self.desk.ask(row, ref))
        leaves = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((answer, leaves), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return error_response(499, "the caller left", "caller_left")
            return _response(answer.result())
        finally:
            for task in (answer, leaves):
                task.cancel()
                with suppress(asyncio.CancelledError, ApiError):
                    await task

    async def tokenize(self, request: Request) -> Response:
        body = await body_of(request)
        return JSONResponse(await run_in_threadpool(self._tokenize, body))

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body.pop("model", None)
        if not isinstance(name, str | None):
            raise _invalid("model must be a string", "model")
        return self.rulers.tokenize(self.catalogue.find(name, 404).target, body)

    def tokenizer_info(self, request: Request) -> Response:
        name = request.query_params.get("model")
        return JSONResponse(self.rulers.facts(self.catalogue.find(name, 404).target))

    # --- about -------------------------------------------------------------------------------

    def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.catalogue.shown()})

    def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = {model["id"]: model for model in self.catalogue.shown()}
        if name not in found:
            code = ErrorCode.MODEL_NOT_FOUND.value
            raise ApiError(404, f"there is no model {name[:200]}", code=code, param="model")
        return JSONResponse(found[name])

    def health(self, request: Request) -> Response:
        with self.pool.queue() as queue:
            queue.client.ping()
            workers = len(queue.workers())
        return JSONResponse({"status": "ok", "workers": workers})

    def metrics(self, request: Request) -> Response:
        with self.pool.queue() as queue:
            text, kind = exposition(queue.workers(), self.batches.shelf.all(), self.desk.callers)
        return Response(text, media_type=kind)

    # -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """The threads run as long as the server does."""
        self.clerk.start()
        self.desk.start()
        try:
            yield
        finally:
            await run_in_threadpool(self.desk.stop)
            await run_in_threadpool(self.clerk.stop)
            self.pool.close()

    def _file(self, file_id: str, status: int = 404) -> FileRecord:
        return _found(self.files.shelf.get(file_id), "file", file_id, status)

    def _batch(self, batch_id: str) -> BatchRecord:
        return _found(self.batches.shelf.get(batch_id), "batch", batch_id, 404)

    def _shown(self, record: BatchRecord) -> dict[str, Any]:
        return self.clerk.progress(record).shown()


def build(options: Options) -> Starlette:
    """The ASGI application. Raises HomeError when its folder cannot be used."""
    gateway = Gateway(options)
    routes: list[tuple[str, str, Callable[[Request], Any]]] = [
        ("POST", "/v1/files", gateway.upload),
        ("GET", "/v1/files", gateway.list_files),
        ("GET", "/v1/files/{id}", gateway.get_file),
        ("DELETE", "/v1/files/{id}", gateway.delete_file),
        ("GET", "/v1/files/{id}/content", gateway.content),
        ("POST", "/v1/batches", gateway.create),
        ("GET", "/v1/batches", gateway.list_batches),
        ("GET", "/v1/batches/{id}", gateway.get_batch),
        ("POST", "/v1/batches/{id}/cancel", gateway.cancel),
        ("GET", "/v1/batches/{id}/results", gateway.results),
        ("POST", "/v1/batches/{id}/retry", gateway.retry),
        ("POST", "/tokenize", gateway.tokenize),
        ("GET", "/tokenizer_info", gateway.tokenizer_info),
        ("GET", "/v1/models", gateway.models),
        ("GET", "/v1/models/{name:path}", gateway.model),
        ("POST", CHAT, gateway.chat),
        ("POST", TEXT, gateway.text),
        ("GET", "/health", gateway.health),
        ("GET", "/metrics", gateway.metrics),
    ]
    return Starlette(
        routes=_routes(routes),
        middleware=[Middleware(Guard, tokens=options.tokens)],
        lifespan=gateway.life,
        exception_handlers={
            ApiError: errors.on_api_error,
            HTTPException: errors.on_http_error,
            redis.RedisError: _on_outage,
            QueueUnreachable: _on_outage,
            Exception: errors.on_fault,
        },
    )


def _routes(table: list[tuple[str, str, Callable[[Request], Any]]]) -> list[Route]:
    """One route a path, so that a wrong method is told from a wrong path."""
    by_path: dict[str, dict[str, Callable[[Request], Any]]] = {}
    for method, path, call in table:
        by_path.setdefault(path, {})[method] = call
    return [Route(path, _by_method(calls), methods=list(calls)) for path, calls in by_path.items()]


def _by_method(calls: dict[str, Callable[[Request], Any]]) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        call = calls.get(request.method) or calls["GET"]  # HEAD
        if asyncio.iscoroutinefunction(call):
            return await call(request)  # type: ignore[no-any-return]
        return await run_in_threadpool(call, request)

    return answer


async def _on_outage(request: Request, error: Exception) -> Response:
    return error_response(503, "the queue is away; try again", "queue_unreachable")


async def _left(request: Request) -> None:
    """Ends when the caller closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(result: RowResult) -> Response:
    """The row's record as the answer of the call."""
    if result.response is None:
        error = result.error or {}
        return error_response(
            500, error.get("message", "not run"), error.get("code", "internal_error")
        )
    return JSONResponse(
        result.response["body"],
        result.response["status_code"],
        {"x-request-id": result.response["request_id"]},
    )


def _page(
    request: Request,
    records: list[_N],
    when: Callable[[_N], int],
    shown: Callable[[_N], dict[str, Any]],
    *,
    most: int,
) -> Response:
    """One page of a list, the newest first. Raises ApiError."""
    query = request.query_params
    text, order = query.get("limit", "20"), query.get("order", "desc")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise _invalid(f"limit must be 1 to {most:,}", "limit")
    if order not in ("asc", "desc"):
        raise _invalid("order must be asc or desc", "order")
    records.sort(key=lambda record: (when(record), record.id), reverse=order == "desc")
    after = query.get("after")
    if after is not None:
        at = next((at for at, record in enumerate(records) if record.id == after), None)
        if at is None:
            raise _invalid("after names nothing in this list", "after")
        records = records[at + 1 :]
    page = [shown(record) for record in records[:limit]]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(records) > limit,
        }
    )


def _found(record: _N | None, kind: str, name: str, status: int) -> _N:
    if record is None:
        raise ApiError(status, f"there is no {kind} {name[:100]}", code=f"{kind}_not_found")
    return record


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, code=ErrorCode.INVALID_VALUE.value, param=param)


def _missing(name: str) -> ApiError:
    code = ErrorCode.MISSING_REQUIRED_PARAMETER.value
    return ApiError(400, f"{name} is missing", code=code, param=name)
