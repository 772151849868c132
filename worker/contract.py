"""The contract: every record, error code and Redis key that crosses a process, and nothing else.

A producer needs only this file to submit, a consumer only this file to read results. Records are
JSON, never pickle. What we write ourselves may carry unknown fields when read back (a newer
version wrote it); what a user writes may not.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

SCHEMA = 1
"""Version of records, keys and scripts. A worker leases only batches of a schema it knows."""

SHARD_ROWS = 32
"""Most rows of a shard: one RQ job and one lease."""

TOP_PRIORITY = 10
"""Priorities are -10..10, 0 if not said. A higher one goes first, always."""

MAX_CUSTOM_ID = 1024
"""Longest `custom_id`, in characters."""


class ErrorCode(StrEnum):
    """Why a line or a row has no completion. The text of each is stable; people filter on it."""

    INVALID_JSON_LINE = "invalid_json_line"
    INVALID_ENCODING = "invalid_encoding"
    MISSING_REQUIRED_PARAMETER = "missing_required_parameter"
    INVALID_VALUE = "invalid_value"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    MISMATCHED_ENDPOINT = "mismatched_endpoint"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    UNSUPPORTED_ENDPOINT = "unsupported_endpoint"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    CHAT_TEMPLATE_MISSING = "chat_template_missing"
    CHAT_TEMPLATE_ERROR = "chat_template_error"
    TOKENIZER_MISSING = "tokenizer_missing"
    OUT_OF_MEMORY = "out_of_memory"
    NUMERICAL_ERROR = "numerical_error"
    WORKER_LOST = "worker_lost"
    GENERATION_TIMEOUT = "generation_timeout"
    INTERNAL_ERROR = "internal_error"
    BATCH_EXPIRED = "batch_expired"
    BATCH_CANCELLED = "batch_cancelled"


PASSING = frozenset({ErrorCode.OUT_OF_MEMORY.value})
"""Codes of failures that may pass, or not happen elsewhere: the row is tried again later."""


class Record(BaseModel):
    """A frozen record we write and read ourselves; fields of a newer version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def dump(self) -> str:
        """The record as compact JSON, None fields left out."""
        return self.model_dump_json(exclude_none=True)

    @classmethod
    def parse(cls, data: str | bytes) -> Self:
        """Inverse of `dump`. Raises pydantic.ValidationError."""
        return cls.model_validate_json(data)


Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
TEXT: Endpoint = "/v1/completions"

Prompt = str | list[int]
"""A prompt of `/v1/completions`: text, or token ids."""


class JobSpec(Record):
    """One row: a validated input line. `index` names it everywhere; `custom_id` is only data."""

    index: Annotated[int, Field(ge=0)]
    line: Annotated[int, Field(ge=1)]  # 1-based line number in the input
    custom_id: str
    endpoint: Endpoint
    model: str | None = None  # as the line said it; echoed in the answer
    messages: list[dict[str, Any]] | None = None  # CHAT
    prompts: list[Prompt] | None = None  # TEXT: n choices for each
    max_tokens: int | None = None  # None: the model's default, or what room is left
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_tokens: int = 0  # nothing ends the text before
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # by token id
    seed: int | None = None  # None: drawn anew for the row, and told in its result
    n: Annotated[int, Field(ge=1)] = 1  # choices for each prompt
    logprobs: int | None = None  # alternatives told with each token's log p; None: no log p
    return_token_ids: bool = False
    echo: bool = False  # TEXT: the prompt, and its log p, before the answer
    skip_special_tokens: bool = True  # in the text
    template: dict[str, Any] = {}  # CHAT: what the template is told besides the messages
    thinking_token_budget: int | None = None  # CHAT: most tokens in the thinking block
    tools: list[dict[str, Any]] = []  # CHAT: functions the model may call
    trace: bool = False  # body key `dflash_trace`
    metadata: dict[str, Any] | None = None  # top-level `metadata`, echoed in the output line

    @model_validator(mode="after")
    def _has_one_input(self) -> Self:
        if (self.endpoint == CHAT) != (self.messages is not None) or (self.endpoint == TEXT) != (
            self.prompts is not None
        ):
            raise ValueError(f"{self.endpoint} does not match the prompt given")
        return self


_ROWS = TypeAdapter(list[JobSpec])


Spec = Literal["auto", "on", "off"]
"""Whether to draft: where it pays, always, or never. Not of a `ModelRef`: it changes no token."""


class ModelRef(Record):
    """What a worker must load to do a batch. Its key decides which worker sees which shard."""

    target: str  # Hugging Face id, absolute folder, or "demo"
    draft: str = "auto"  # "auto" | "none" | "ngram" | folder | Hugging Face id, + "+ngram"
    block: int | None = None  # tokens of a draft block; None: what the draft was trained for
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    draft_quant: Literal["none", "w4", "w8"] = "none"  # what the draft is quantised to when loaded

    @property
    def key(self) -> str:
        """16 hex digits over all fields and the schema."""
        named = [SCHEMA, self.target, self.draft, self.block, self.dtype]
        if self.draft_quant != "none":  # or keys would not be those of older clients
            named.append(self.draft_quant)
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


class Batch(Record):
    """What a client asks for, as stored when the upload starts."""

    id: str
    model: ModelRef
    name: str = ""  # of the input file, for people
    total: int = 0  # rows; known when sealed
    created: float = 0.0  # Unix seconds
    max_attempts: int = 3
    priority: Annotated[int, Field(ge=-TOP_PRIORITY, le=TOP_PRIORITY)] = 0  # when it was submitted
    weight: Annotated[float, Field(gt=0)] = 1.0  # share of the rows among batches of one priority
    schema_: Annotated[int, Field(alias="schema")] = SCHEMA

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    def dump(self) -> str:
        return self.model_dump_json(exclude_none=True, by_alias=True)


class BatchState(StrEnum):
    UPLOADING = "uploading"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    DONE = "done"
    CANCELLED = "cancelled"


class BatchStatus(Record):
    """A batch as the queue sees it now. ok + failed + left == total once sealed."""

    batch: Batch
    state: BatchState
    total: int
    left: int
    ok: int
    failed: int
    shards: int
    leased: int = 0  # shards held by workers now
    priority: int = 0  # now, as the next two
    weight: float = 1.0
    sealed: float | None = None
    started: float | None = None
    finished: float | None = None
    exported: str = "0-0"  # stream id up to which a client has the results on disk

    @property
    def done(self) -> bool:
        return self.state in (BatchState.DONE, BatchState.CANCELLED)


class Shard(Record):
    """At most SHARD_ROWS rows that run, as far as possible, behind one prefix."""

    id: str  # "<batch id>-<n>"
    batch_id: str
    group: str = ""  # hex of the prefix the rows share; a hint, never a correctness input
    rows: list[JobSpec]

    def packed(self) -> PackedShard:
        """The rows as zlib-compressed JSON: what the queue stores."""
        rows = _ROWS.dump_json(self.rows, exclude_none=True, exclude_defaults=True)
        return PackedShard(self.id, self.batch_id, self.group, len(self.rows), compressed(rows))

    @staticmethod
    def unpacked(data: bytes) -> list[JobSpec]:
        """Inverse of `packed`."""
        return _ROWS.validate_json(zlib.decompress(data))


def compressed(rows: bytes) -> bytes:
    """A JSON list of rows as a shard's payload."""
    return zlib.compress(rows, 1)  # 7 % larger than at level 6, in a quarter of the time


class PackedShard(NamedTuple):
    """A shard as the queue stores it."""

    id: str
    batch_id: str
    group: str
    rows: int
    payload: bytes


class Lease(Record):
    """A shard in a worker's hands until `deadline_ms` (the server's clock).

    `epoch` and `owner` together are the fence: a commit that carries an older epoch or another
    owner changes nothing.
    """

    shard: Shard
    epoch: int
    owner: str
    deadline_ms: int
    pending: list[int]  # row indices without a terminal record yet; only these are to be run
    model_key: str
    tried: dict[int, int] = {}  # row index -> attempts that failed before, in other shards
    deaths: int = 0  # suspicion against the shard: see `Care` in holdings.py
    max_attempts: int = 3


class Crash(Record):
    """How an engine died on a shard last: what decides whether a row of it is condemned."""

    words: str  # the engine's last ones, for people
    row: int | None = None  # the row that ran by itself, if one did
    lone: int = 0  # engines in succession that this row killed by itself


class RowMetrics(Record):
    """What one row cost. Sums over rows are what `run --json` prints."""

    worker: str = ""
    attempts: int = 1
    queue_ms: float = 0.0  # from the lease to the first forward
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    ttft_ms: float = 0.0  # from admission to the first token
    batch_width: int = 0  # most rows decoded together while this one ran
    cycles: int = 0
    prompt_tokens: int = 0  # each prompt once, however many choices it has
    prefill_tokens: int = 0  # really computed for this row
    cached_tokens: int = 0  # prompt_tokens - prefill_tokens, or 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of these, before the answer
    draft_tokens: int = 0
    accepted_tokens: int = 0
    spec: Literal["on", "off", "auto-off"] = "off"
    cache_source: Literal["none", "batch", "ram", "ssd"] = "none"  # of most cached_tokens
    cached_ram_tokens: int = 0  # of cached_tokens: in memory before the row came
    cached_ssd_tokens: int = 0  # of cached_tokens: read from SSD
    cache_miss: str | None = None  # why nothing on SSD served the row
    draft: str | None = None  # effective settings: name of the draft,
    draft_quant: str = "none"  # what its weights are quantised to,
    draft_notice: str | None = None  # why there is none, or why it is hardly used,
    block: int = 1  # tokens of a block,
    dtype: str = ""  # dtype of the weights' arithmetic
    seed: int | None = None  # of a row that was sampled: given with the request, same text
    template: dict[str, Any] | None = None  # what the chat template was told,
    thinking_token_budget: int | None = None
    warnings: list[str] | None = None  # of these settings, what cannot have had an effect
    emitted_per_cycle: list[list[int]] | None = None  # one list a choice; with dflash_trace only
    drafted_per_cycle: list[list[list[int]]] | None = None


class RowStatus(StrEnum):
    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    POISON = "poison"


class RowResult(Record):
    """The terminal record of a row. The first one written wins."""

    index: int
    custom_id: str
    status: RowStatus
    response: dict[str, Any] | None = None  # {"status_code", "request_id", "body"}
    error: dict[str, str] | None = None  # {"code", "message"} of a row that never ran
    metrics: RowMetrics = RowMetrics()
    metadata: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.status is RowStatus.OK

    @property
    def code(self) -> str | None:
        """The error code of a row that failed, else None."""
        if self.error is not None:
            return self.error["code"]
        if self.ok or self.response is None:
            return None
        code: str = self.response["body"]["error"]["code"]
        return code

    def packed(self) -> bytes:
        return zlib.compress(self.dump().encode(), 6)

    @classmethod
    def unpacked(cls, data: bytes) -> Self:
        return cls.parse(zlib.decompress(data))


class WorkerInfo(Record):
    """What a worker says of itself; kept in Redis with a TTL."""

    name: str  # "<host>-<uuid>", never reused
    host: str
    pid: int
    model: ModelRef | None = None
    model_key: str = ""
    state: Literal["starting", "loading", "idle", "busy", "parked", "draining"] = "starting"
    version: str = ""
    schema_min: int = SCHEMA
    schema_max: int = SCHEMA
    started: float = 0.0
    rows_done: int = 0
    active: int = 0  # rows in the decoder now
    tokens_per_s: float = 0.0
    hot: list[str] = []  # groups whose prefix it has in its cache, last used first
    note: str = ""  # last trouble, for people
    resting: str = ""  # why it takes no rows though it could; no `state`: older readers go on


class Key:
    """Every Redis key, all in the hash slot of `{dfb}`. `b` is a batch id, `s` a shard id."""

    TAG = "{dfb}"
    META = f"{TAG}:meta"  # hash: schema, created, paused (by whom; nobody leases)
    LEASES = f"{TAG}:lease"  # zset: shard id -> deadline, ms
    LATER = f"{TAG}:later"  # zset: shard of a row to be tried again -> when, ms
    AGING = f"{TAG}:aging"  # zset: batch with ready shards -> when it rises by a class, ms
    BATCHES = f"{TAG}:batches"  # zset: batch id -> created
    MODELS = f"{TAG}:models"  # hash: model key -> ModelRef JSON
    WORKERS = f"{TAG}:workers"  # set of worker names
    RQ_PREFIX = f"{TAG}:rq"  # RQ's own keys, the view
    QUEUE = "dflash"  # RQ queue name

    @staticmethod
    def batch(b: str) -> str:
        """hash: st, model_key, spec (Batch JSON), prio, weight, vt, total, left, n_ok, times, …"""
        return f"{Key.TAG}:b:{b}"

    @staticmethod
    def shard(s: str) -> str:
        """hash: b, g, n, d (recorded), st, epoch, owner, deaths, p (zlib JSON rows), f (failed)"""
        return f"{Key.TAG}:s:{s}"

    @staticmethod
    def crash(s: str) -> str:
        """string with TTL: Crash JSON"""
        return f"{Key.TAG}:crash:{s}"

    @staticmethod
    def runnable(model_key: str) -> str:
        """zset: batches of the model with ready shards, in the order of turns.lua"""
        return f"{Key.TAG}:rb:{model_key}"

    @staticmethod
    def ready(b: str) -> str:
        """zset: groups with ready shards that no worker is at -> number of the first shard"""
        return f"{Key.TAG}:rgn:{b}"

    @staticmethod
    def shared(b: str) -> str:
        """zset: groups with ready shards that workers are at -> ready shards a worker"""
        return f"{Key.TAG}:rgs:{b}"

    @staticmethod
    def group_of(b: str, group: str | None = None) -> str:
        """list: ready shards of a group of a batch, in prefix order"""
        return f"{Key.TAG}:rg:{b}" + ("" if group is None else f":{group}")

    @staticmethod
    def suspects(b: str) -> str:
        """list: ready shards on which an engine may have died"""
        return f"{Key.TAG}:sus:{b}"

    @staticmethod
    def owners(b: str) -> str:
        """hash: "group|worker" -> shards held, "group" -> workers at it"""
        return f"{Key.TAG}:own:{b}"

    @staticmethod
    def shards(b: str) -> str:
        """set: all shard ids of a batch"""
        return f"{Key.TAG}:bs:{b}"

    @staticmethod
    def done(b: str) -> str:
        """bitmap: one bit a row, set once; the exactly-once point"""
        return f"{Key.TAG}:done:{b}"

    @staticmethod
    def results(b: str) -> str:
        """stream: i (row index), r (RowResult, zlib), e (epoch), w (worker)"""
        return f"{Key.TAG}:res:{b}"

    @staticmethod
    def failed(b: str) -> str:
        """hash: row that failed -> error code"""
        return f"{Key.TAG}:rf:{b}"

    @staticmethod
    def attempts(b: str) -> str:
        """hash: row that is tried again -> attempts that failed"""
        return f"{Key.TAG}:ra:{b}"

    @staticmethod
    def worker_leases(worker: str) -> str:
        """set: shards the worker holds"""
        return f"{Key.TAG}:wl:{worker}"

    @staticmethod
    def worker(worker: str) -> str:
        """string with TTL: WorkerInfo JSON"""
        return f"{Key.TAG}:w:{worker}"

    @staticmethod
    def drain(worker: str) -> str:
        """string with TTL: the worker is to end, with so many seconds of grace ("inf": any)"""
        return f"{Key.TAG}:drain:{worker}"

    @staticmethod
    def hot(group: str) -> str:
        """string with TTL: the worker that leased shards of the group last"""
        return f"{Key.TAG}:hot:{group}"

    @staticmethod
    def hungry(model_key: str) -> str:
        """string with TTL: a worker that found nothing to do just now"""
        return f"{Key.TAG}:hungry:{model_key}"
