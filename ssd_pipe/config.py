"""The one configuration every process of a pipeline reads.

A TOML file, then command-line overrides, give a PipelineConfig; ``digest`` lets the hub refuse a
process that was started with another one.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal, get_args, get_origin

import msgspec

from ssd_pipe.errors import ConfigError
from ssd_pipe.shape_models import is_shape

Mode = Literal["ar", "sd", "ssd"]
Rule = Literal["shared_noise", "rejection"]
Allocation = Literal["fixed", "uniform", "geometric", "confidence"]
Backup = Literal["auto", "jit", "ngram", "none"]
Dtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
LogLevel = Literal["debug", "info", "warning", "error"]
OnFailure = Literal["stop", "restart"]
OnDraftFailure = Literal["degrade", "fail"]
FanOut = int | list[int]

MODES: tuple[Mode, ...] = get_args(Mode)

MAX_K = 32
MAX_FAN_OUT = 64
MAX_BRANCHES = 256  # that one draft worker extends
MAX_DRAFT_WORKERS = 4
MAX_PROFILED = 1000


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, unknown keys refused."""


class ModelSection(Section, frozen=True, kw_only=True):
    """Where one model runs.

    Attributes:
        model: local folder, hub id, or the name of a built-in model (see ``hub``).
        dtype: arithmetic; "auto" is float32 on a CPU and the checkpoint's on a GPU.
        device: "cpu", "cuda", "cuda:N", or "auto".
        threads: CPU threads for this process, 0 = decide by the cores available.
        cpus: cores this process may run on, empty = all.
        backend: "auto", "reference" (plain torch), "native" (compiled CPU kernels) or "cuda"
            (Triton kernels).
        attention: on a GPU, "triton" (our kernel) or "flashinfer" for prompts; "auto" is "triton".
        load_format: where weights come from: the model's "safetensors" files, or "dummy": random
            ones of its shape, for timing. "auto" is dummy for a "shape:NAME" model only.
        seed: of dummy weights.
        enforce_eager: on a GPU, launch kernel by kernel instead of by CUDA graphs.
        memory_share: share of the GPU's free memory, once the weights are there, that KV may take
            where ``cache.*_blocks`` leaves its size to us.
    """

    model: str
    dtype: Dtype = "auto"
    device: str = "auto"
    threads: int = 0
    cpus: list[int] = []
    backend: Literal["auto", "reference", "native", "cuda"] = "auto"
    attention: Literal["auto", "triton", "flashinfer"] = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0
    enforce_eager: bool = False
    memory_share: float = 0.8


class TargetSection(ModelSection, frozen=True, kw_only=True):
    """The target model.

    Attributes:
        tp: tensor-parallel worker processes.
        pad_steps: on a GPU, run a decoding step of ar with as many (padded) tokens a row as a
            verification of sd and ssd has. Steps of up to 32 tokens add in the same order anyway;
            with it wider steps of the three modes do so too. Costs a few per cent.
    """

    model: str = "smollm2-135m-instruct"
    tp: int = 1
    pad_steps: bool = False


class DraftSection(ModelSection, frozen=True, kw_only=True):
    """The draft model.

    Attributes:
        workers: draft processes, each with the whole model; in ssd they share the branches of
            every round. In sd one is started, for there are no branches.
    """

    model: str = "smollm2-draft-16m"
    workers: int = 1


class SpeculationSection(Section, frozen=True, kw_only=True):
    """How chains and branches are made and judged.

    Attributes:
        adaptive: choose chain length, branches and whether to speculate at all by batch size,
            acceptance and measured times (see ``engine.adaptive``); ``k`` and ``fan_out`` are then
            the most. False: every round is made with them.
        disable_by_batch_size: speculate only while at most so many sequences run; 0 = always.
        k: draft tokens a round.
        fan_out: branches per accepted length: a number (the budget is number * (k + 1)) or a
            list of k + 1 counts; each at most MAX_FAN_OUT, their sum at least one for each draft
            worker and at most MAX_BRANCHES for each.
        fan_out_miss: the same after a miss; None = as fan_out.
        allocation: how the budget is split over accepted lengths; "fixed" takes a list as it is.
        rule: how proposals are judged.
        saguaro_c: factor on the draft's cached tokens (rejection rule only; Def. 14).
        backup: what makes the chain on a miss.
        ngram_max, ngram_min: lengths of the suffix that prompt lookup matches.
        draft_vocab: the draft extends chains with the first so many token ids only, which in a
            BPE vocabulary are the frequent ones. Costs acceptance, saves draft time, most of
            which is its output layer. 0 = half of a vocabulary over 32,768 on a CPU, else all.
        taper: share of the branches that go on from one depth to the next, the likeliest first;
            1 extends all of them to depth k, and so do CUDA graphs.
        synthetic_acceptance: for timing models that do not know each other; empty = off. The
            chance a draft token is accepted, or a file (``engine.acceptance_trace``). The text that
            comes out means nothing.
        synthetic_hit_rate: with a rate above, the chance that an outcome is a cached one.
        leased_rounds: let target and draft on two GPUs of one machine run rounds without the
            scheduler between; off, every round passes through it.
    """

    adaptive: bool = True
    disable_by_batch_size: int = 0
    k: int = 5
    fan_out: FanOut = 2
    fan_out_miss: FanOut | None = None
    allocation: Allocation = "confidence"
    rule: Rule = "shared_noise"
    saguaro_c: float = 1.0
    backup: Backup = "auto"
    ngram_max: int = 4
    ngram_min: int = 2
    draft_vocab: int = 0
    taper: float = 0.8
    synthetic_acceptance: str = ""
    synthetic_hit_rate: float = 0.86
    leased_rounds: bool = True


class CacheSection(Section, frozen=True, kw_only=True):
    """KV memory of both sides. ``*_blocks`` 0 = as many as the limits below can ever use."""

    block_size: int = 16
    target_blocks: int = 0
    draft_blocks: int = 0
    prefix_caching: bool = True


class SchedulerSection(Section, frozen=True, kw_only=True):
    """Admission and batching.

    Attributes:
        max_num_seqs: sequences running at once.
        max_model_len: prompt + output tokens of one request; 0 = the target's own limit.
        max_batched_tokens: tokens of one target step; a longer prompt is served in chunks, and
            chains get shorter where a round of all sequences would not fit.
        long_prefill_token_threshold: most tokens of one prompt in a step; 0 = a quarter of
            ``max_batched_tokens`` on a CPU, where every token of a chunk costs its time, else all.
        max_waiting: requests waiting; one more is refused with 429.
    """

    max_num_seqs: int = 64
    max_model_len: int = 0
    max_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    max_waiting: int = 256


class RunSection(Section, frozen=True, kw_only=True):
    """Where a run lives and how its processes watch each other.

    Attributes:
        name: the run's name; empty = a fresh unique one.
        shm_dir: file system of the run directory (sockets, doorbells, shared memory).
        log_dir: parent of this run's log folder; empty = the user's state folder.
        log_max_mb: million bytes of one process's log file; then it is renamed to
            ``<process>.1.jsonl``, in the place of the one before, and a new one begins. 0 = no
            limit.
        endpoint: public ZeroMQ address, besides the socket in the run directory; empty = none.
        curve_secret_key: secret certificate (``ssd-pipe keys``) that clients of a tcp endpoint
            must know the public part of; needed where other machines reach the endpoint.
        curve_clients: folder of the certificates of the clients that may use that endpoint;
            empty = all who know the public key.
        transport: "auto" probes; "shm" or "zmq" forces one for the hot path.
        cpus: cores of the processes that do no arithmetic; empty = see threads.process_cores.
        ready_timeout: seconds the group may take to become ready.
        beat_timeout: seconds without a heartbeat after which a process counts as stuck.
        grace: seconds between TERM and KILL.
        torch_profiler: target steps and draft rounds, from the first, whose operators and kernels
            torch.profiler records into the log folder; see ``procs.profiling``.
        on_failure: what the supervisor does when a process dies or hangs once the group has been
            ready: "stop" ends the group, "restart" brings it back. A group that never became
            ready ends in any case.
        on_draft_failure: "degrade" goes on without a lost draft, as mode ar does, until there is a
            new one; "fail" takes it for any other process.
        max_restarts: restarts in a row, of the group or of one process, before it is given up.
        restart_window: seconds of service after which earlier restarts are forgotten.
    """

    name: str = ""
    shm_dir: str = "/dev/shm"
    log_dir: str = ""
    log_level: LogLevel = "info"
    log_max_mb: int = 256
    endpoint: str = ""
    curve_secret_key: str = ""
    curve_clients: str = ""
    transport: Literal["auto", "shm", "zmq"] = "auto"
    cpus: list[int] = []
    ready_timeout: float = 300.0
    beat_timeout: float = 10.0
    grace: float = 5.0
    torch_profiler: int = 0
    on_failure: OnFailure = "stop"
    on_draft_failure: OnDraftFailure = "degrade"
    max_restarts: int = 5
    restart_window: float = 300.0

    @property
    def log_limit(self) -> int:
        """``log_max_mb`` in bytes."""
        return self.log_max_mb * 1_000_000


class GatewaySection(Section, frozen=True, kw_only=True):
    """The OpenAI-compatible HTTP gateway, a process of its own.

    Attributes:
        enabled: whether the run has one.
        host: address to listen on; the default is reachable from this machine only.
        port: TCP port; 0 = any free one, told in the log, the ready file and ``status``.
        api_key: what clients must send as bearer token; empty = $SSD_API_KEY, and if that is
            empty too, nothing is asked for.
        model_name: what clients call the model; empty = the last part of ``target.model``.
        max_body_bytes: larger request bodies are refused with 413.
        max_connections: open connections; further ones are refused with 503.
        request_timeout: seconds a request may take before it ends with 504; 0 = no limit.
    """

    enabled: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    model_name: str = ""
    max_body_bytes: int = 8 << 20
    max_connections: int = 1024
    request_timeout: float = 600.0


class PipelineConfig(Section, frozen=True, kw_only=True):
    """Everything. Built by ``load``; checked by ``validate``."""

    mode: Mode = "ssd"
    target: TargetSection = TargetSection()
    draft: DraftSection = DraftSection()
    speculation: SpeculationSection = SpeculationSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    gateway: GatewaySection = GatewaySection()
    run: RunSection = RunSection()

    @property
    def speculative(self) -> bool:
        return self.mode != "ar"

    @property
    def draft_workers(self) -> int:
        """Draft processes of this mode."""
        return {"ar": 0, "sd": 1, "ssd": self.draft.workers}[self.mode]

    def validate(self) -> None:
        """Raise ConfigError naming the first setting out of range."""
        _check_ranges(self)

    def digest(self) -> str:
        """Short hash of everything all processes must agree on."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def load_format(section: ModelSection) -> Literal["safetensors", "dummy"]:
    """Where a model's weights come from."""
    if section.load_format == "auto":
        return "dummy" if is_shape(section.model) else "safetensors"
    return section.load_format


def fan_out_counts(fan_out: FanOut, k: int, field: str = "speculation.fan_out") -> list[int]:
    """Branches per accepted length 0..k. Raises ConfigError if they do not fit k."""
    counts = [fan_out] * (k + 1) if isinstance(fan_out, int) else list(fan_out)
    if len(counts) != k + 1:
        raise ConfigError(field, f"a list needs k + 1 = {k + 1} counts, got {len(counts)}")
    if any(c < 0 or c > MAX_FAN_OUT for c in counts):
        raise ConfigError(field, f"each count must be 0..{MAX_FAN_OUT}, got {fan_out!r}")
    return counts


def branch_budget(spec: SpeculationSection) -> int:
    """Branches of one sequence in a round, under the larger of its fan-outs."""
    fan_outs = (spec.fan_out, spec.fan_out if spec.fan_out_miss is None else spec.fan_out_miss)
    return max(sum(fan_out_counts(fan_out, spec.k)) for fan_out in fan_outs)


def _check_ranges(config: PipelineConfig) -> None:
    spec, run = config.speculation, config.run

    def within(field: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise ConfigError(field, f"must be {low:g}..{high:g}, got {value!r}")

    within("target.tp", config.target.tp, 1, 64)
    for name, section in (("target", config.target), ("draft", config.draft)):
        within(f"{name}.threads", section.threads, 0, 1024)
        within(f"{name}.memory_share", section.memory_share, 0.01, 1)
        if is_shape(section.model) and section.load_format == "safetensors":
            raise ConfigError(f"{name}.load_format", f"{section.model} has no weight files")
        if not section.model:
            raise ConfigError(f"{name}.model", "must not be empty")
    for name, cpus in (
        ("target", config.target.cpus),
        ("draft", config.draft.cpus),
        ("run", config.run.cpus),
    ):
        if any(core < 0 for core in cpus):
            raise ConfigError(f"{name}.cpus", f"core numbers must be >= 0, got {cpus}")
    within("speculation.k", spec.k, 1, MAX_K)
    within("draft.workers", config.draft.workers, 1, MAX_DRAFT_WORKERS)
    within("speculation.disable_by_batch_size", spec.disable_by_batch_size, 0, 2**16)
    _check_branches(config, "speculation.fan_out", spec.fan_out)
    if spec.fan_out_miss is not None:
        _check_branches(config, "speculation.fan_out_miss", spec.fan_out_miss)
    within("speculation.saguaro_c", spec.saguaro_c, 0, 1)
    if spec.saguaro_c < 1 and spec.rule != "rejection":
        raise ConfigError("speculation.saguaro_c", "below 1 needs speculation.rule = 'rejection'")
    within("speculation.ngram_max", spec.ngram_max, 1, 32)
    within("speculation.ngram_min", spec.ngram_min, 1, spec.ngram_max)
    within("speculation.taper", spec.taper, 0.1, 1)
    within("speculation.draft_vocab", spec.draft_vocab, 0, 2**31)
    within("speculation.synthetic_hit_rate", spec.synthetic_hit_rate, 0, 1)
    if spec.synthetic_acceptance and spec.rule != "shared_noise":
        raise ConfigError("speculation.synthetic_acceptance", "needs the rule 'shared_noise'")
    block = config.cache.block_size
    if block < 1 or block > 256 or block & (block - 1):
        raise ConfigError("cache.block_size", f"must be a power of two 1..256, got {block}")
    within("cache.target_blocks", config.cache.target_blocks, 0, 2**24)
    within("cache.draft_blocks", config.cache.draft_blocks, 0, 2**24)
    within("scheduler.max_num_seqs", config.scheduler.max_num_seqs, 1, 256)
    within("scheduler.max_model_len", config.scheduler.max_model_len, 0, 2**20)
    within("scheduler.max_batched_tokens", config.scheduler.max_batched_tokens, 16, 2**16)
    threshold = config.scheduler.long_prefill_token_threshold
    within("scheduler.long_prefill_token_threshold", threshold, 0, 2**16)
    within("scheduler.max_waiting", config.scheduler.max_waiting, 1, 2**20)
    if config.scheduler.max_batched_tokens < config.scheduler.max_num_seqs:
        raise ConfigError(
            "scheduler.max_batched_tokens",
            f"must hold a token of every sequence: max_num_seqs = {config.scheduler.max_num_seqs}",
        )
    gateway = config.gateway
    within("gateway.port", gateway.port, 0, 65535)
    within("gateway.max_body_bytes", gateway.max_body_bytes, 1024, 2**30)
    within("gateway.max_connections", gateway.max_connections, 1, 2**16)
    within("gateway.request_timeout", gateway.request_timeout, 0, 86400)
    if not gateway.host:
        raise ConfigError("gateway.host", "must not be empty")
    if not gateway.api_key.isascii() or not gateway.api_key.isprintable():
        raise ConfigError("gateway.api_key", "printable ASCII characters only")
    within("run.log_max_mb", run.log_max_mb, 0, 2**20)
    within("run.ready_timeout", run.ready_timeout, 1, 86400)
    within("run.beat_timeout", run.beat_timeout, 0.5, 3600)
    within("run.grace", run.grace, 0.1, 600)
    within("run.torch_profiler", run.torch_profiler, 0, MAX_PROFILED)
    within("run.max_restarts", run.max_restarts, 1, 1000)
    within("run.restart_window", run.restart_window, 1, 86400)
    if run.name and not all(c.isalnum() or c in "-_." for c in run.name):
        raise ConfigError("run.name", f"letters, digits, '-', '_' and '.' only, got {run.name!r}")


def _check_branches(config: PipelineConfig, field: str, fan_out: FanOut) -> None:
    """Every worker has a branch of each row, and none more than it may."""
    workers = config.draft.workers
    low, high = workers, workers * MAX_BRANCHES
    total = sum(fan_out_counts(fan_out, config.speculation.k, field))
    if not low <= total <= high:
        raise ConfigError(field, f"branches in all must be {low}..{high}, got {total}")


def config_from_mapping(mapping: dict[str, Any]) -> PipelineConfig:
    """Build and validate. Raises ConfigError for unknown keys, wrong types and ranges."""
    try:
        config = msgspec.convert(mapping, PipelineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(*_explain(error)) from None
    config.validate()
    return config


def _explain(error: msgspec.ValidationError) -> tuple[str, str]:
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    if text.startswith("Object contains unknown field `"):
        unknown = text.split("`")[1]
        field, text = (f"{field}.{unknown}" if field else unknown), "unknown setting"
    if text.startswith("Invalid enum value ") and (allowed := _allowed(field)):
        given = text.removeprefix("Invalid enum value ")
        text = f"must be one of {', '.join(allowed)}, got {given}"
    return field or "config", text


def _allowed(setting: str) -> tuple[str, ...]:
    """What a setting with a dotted name may be, if that is one of several texts."""
    kind: Any = PipelineConfig
    for name in setting.split("."):
        kind = {f.name: f.type for f in msgspec.structs.fields(kind)}[name]
    return get_args(kind) if get_origin(kind) is Literal else ()
