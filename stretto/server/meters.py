"""The figures behind `/metrics`: vLLM's names and vllm-omni's, counted where requests end.

Only what is measured has a series: there is no preemption to count, and what passes between stages
is not seen from the front. Units of `vllm:` series with a `stage` label are
that stage's own: text tokens in the Thinker, codec frames behind it. `audio_frames` counts samples,
as the bench does. Times are defined in `stretto.metrics`; a stage's queue time begins with the
request, so that behind the first stage it contains the wait for what comes from upstream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from stretto.events import Finished, Pong, Timings
from stretto.metrics import CONTINUITY_THRESHOLD_S, SoundClock, TextClock
from stretto.pipeline.pipeline import SAMPLE_RATE, PipelineRequest

FailureReason = Literal["client_abort", "client_disconnect", "stage_error", "unknown"]
SpeechAbort = Literal["closed", "error"]

MODEL = ("model_name",)
STAGE = (*MODEL, "stage", "replica")
REASON = (*MODEL, "reason")
SOCKET = (*MODEL, "handler")
FINISH = (*MODEL, "finished_reason")

# Upper bounds of buckets; those of times and of the RTF are vLLM's and vllm-omni's.
# fmt: off
FIRST = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5)
LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920, 7680)
RTF = (.1, .25, .5, .75, .9, 1, 1.25, 1.5, 2, 5, 10)
UNDERRUN = (.001, .01, .05, .1, .2, .5, 1, 2, 5, 10)
COUNT = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
HTTP = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120)
# fmt: on

GAUGES = {
    "vllm:num_requests_running": (STAGE, "requests with a place in the stage's batch"),
    "vllm:num_requests_waiting": (STAGE, "requests that wait for a place in the stage"),
    "vllm:kv_cache_usage_perc": (STAGE, "share of the stage's cache that is taken; 1 is all"),
    "vllm_omni:stage_waiting_requests": (STAGE, "requests that wait for a chunk in the stage"),
    "vllm_omni:num_requests_running": (MODEL, "requests in flight"),
    "vllm_omni:num_requests_waiting": (MODEL, "requests that wait for the first stage"),
    "vllm:websocket_connections_active": (SOCKET, "open WebSocket connections"),
}
COUNTERS = {
    "vllm:prompt_tokens": (STAGE, "prompt tokens"),
    "vllm:generation_tokens": (STAGE, "text tokens or frames that the stage made"),
    "vllm:prefix_cache_queries": (STAGE, "prompt tokens that were looked up"),
    "vllm:prefix_cache_hits": (STAGE, "prompt tokens that were found"),
    "vllm:request_success": (FINISH, "finished requests"),
    "vllm_omni:prompt_tokens": (MODEL, "prompt tokens"),
    "vllm_omni:generation_tokens": (MODEL, "text tokens and frames"),
    "vllm_omni:requests_success": (FINISH, "finished requests"),
    "vllm_omni:requests_failed": (REASON, "requests that did not finish"),
    "vllm_omni:audio_frames": (STAGE, "samples of sound"),
    "vllm_omni:audio_continuity_ok": ((*STAGE, "threshold_ms"), "answers without a longer gap"),
    "vllm_omni:speech_stream_completed": (MODEL, "speech streams sent whole"),
    "vllm_omni:speech_stream_aborted": (REASON, "speech streams that ended early"),
    # Ours: an end that a limit made, whether a client asked for it or the speech found none.
    "stretto:speech_cut": (MODEL, "answers whose sound a limit cut"),
    "vllm:websocket_connections": (SOCKET, "WebSocket connections that were accepted"),
    "http_requests": (("handler", "method", "status"), "HTTP requests"),
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (STAGE, FIRST, "until the first text"),
    "vllm:inter_token_latency_seconds": (STAGE, TOKEN, "between text tokens"),
    "vllm:request_time_per_output_token_seconds": (STAGE, TOKEN, "the mean of that in a request"),
    "vllm:e2e_request_latency_seconds": (MODEL, LATENCY, "until the end"),
    "vllm:request_queue_time_seconds": (STAGE, LATENCY, "until the stage had a place"),
    "vllm:request_inference_time_seconds": (STAGE, LATENCY, "the stage's steps that held it"),
    "vllm:request_prompt_tokens": (MODEL, COUNT, "prompt tokens of a request"),
    "vllm:request_generation_tokens": (MODEL, COUNT, "text tokens of a request"),
    "vllm:request_params_max_tokens": (MODEL, COUNT, "text tokens that a request allows"),
    "vllm_omni:e2e_request_latency_s": (MODEL, LATENCY, "until the end"),
    "vllm_omni:request_queue_wait_s": (STAGE, LATENCY, "until the stage had a place"),
    "vllm_omni:stage_gen_time_s": (STAGE, LATENCY, "the stage's steps that held it"),
    "vllm_omni:audio_ttfp_s": (STAGE, FIRST, "until the first sound"),
    "vllm_omni:audio_duration_s": (STAGE, LATENCY, "length of the sound"),
    "vllm_omni:audio_rtf": (STAGE, RTF, "time to the last sound over its length"),
    "vllm_omni:audio_underrun_s": (STAGE, UNDERRUN, "how long a player stands still"),
    "vllm:websocket_connection_duration_seconds": (SOCKET, LATENCY, "until it was closed"),
    "http_request_duration_seconds": (("handler", "method"), HTTP, "until all of it was sent"),
}


class Meters:
    """All series of one server. For the event loop's thread."""

    def __init__(self, model_name: str, stages: tuple[str, ...]) -> None:
        own = self._registry = CollectorRegistry()
        self._model = model_name
        self._entry, self._last = stages[0], stages[-1]
        self._gauges = {
            name: Gauge(name, text, labels, registry=own) for name, (labels, text) in GAUGES.items()
        }
        self._counters = {
            name: Counter(name, text, labels, registry=own)
            for name, (labels, text) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, labels, buckets=buckets, registry=own)
            for name, (labels, buckets, text) in HISTOGRAMS.items()
        }
        # What was counted of each stage's own counts so far.
        self._pongs: dict[str, Pong] = {}
        # A rate needs a series from before its first event.
        for reason in get_args(FailureReason):
            self._count(0, "vllm_omni:requests_failed", reason)
        self._count(0, "stretto:speech_cut")
        for reason in ("stop", "length"):
            self._count(0, "vllm:request_success", reason)
            self._count(0, "vllm_omni:requests_success", reason)

    # ---- requests --------------------------------------------------------------------------------

    def text_arrived(self, gaps_s: list[float]) -> None:
        for gap_s in gaps_s:
            self._observe(gap_s, "vllm:inter_token_latency_seconds", *self._at(self._entry))

    def finished(
        self, request: PipelineRequest, end: Finished, text: TextClock, sound: SoundClock
    ) -> None:
        usage, entry = end.usage, self._at(self._entry)
        self._count(1, "vllm:request_success", end.finish_reason)
        self._count(1, "vllm_omni:requests_success", end.finish_reason)
        self._count(end.audio_reason == "length", "stretto:speech_cut")
        self._count(usage.prompt_tokens, "vllm:prompt_tokens", *entry)
        self._count(usage.prompt_tokens, "vllm_omni:prompt_tokens")
        self._count(usage.completion_tokens, "vllm_omni:generation_tokens")
        self._observe(usage.prompt_tokens, "vllm:request_prompt_tokens")
        self._observe(usage.text_tokens, "vllm:request_generation_tokens")
        self._observe(request.sampling.max_tokens, "vllm:request_params_max_tokens")
        self._observe(end.timings.e2e_s, "vllm:e2e_request_latency_seconds")
        self._observe(end.timings.e2e_s, "vllm_omni:e2e_request_latency_s")
        self._observe(end.timings.ttft_s, "vllm:time_to_first_token_seconds", *entry)
        per_token_s = text.time_per_output_token_s
        self._observe(per_token_s, "vllm:request_time_per_output_token_seconds", *entry)
        for work in end.stages:
            stage = self._at(work.stage)
            self._count(work.num_units, "vllm:generation_tokens", *stage)
            self._observe(work.queue_s, "vllm:request_queue_time_seconds", *stage)
            self._observe(work.queue_s, "vllm_omni:request_queue_wait_s", *stage)
            self._observe(work.busy_s, "vllm:request_inference_time_seconds", *stage)
            self._observe(work.busy_s, "vllm_omni:stage_gen_time_s", *stage)
        if sound.first_s is not None:
            self._heard(sound, end.timings)

    def _heard(self, sound: SoundClock, timings: Timings) -> None:
        last = self._at(self._last)
        self._observe(timings.ttfp_s, "vllm_omni:audio_ttfp_s", *last)
        self._observe(timings.rtf, "vllm_omni:audio_rtf", *last)
        self._observe(sound.duration_s, "vllm_omni:audio_duration_s", *last)
        self._observe(sound.underrun_s, "vllm_omni:audio_underrun_s", *last)
        self._count(round(sound.duration_s * SAMPLE_RATE), "vllm_omni:audio_frames", *last)
        if sound.is_continuous:
            threshold_ms = f"{CONTINUITY_THRESHOLD_S * 1000:.0f}"
            self._count(1, "vllm_omni:audio_continuity_ok", *last, threshold_ms)

    def failed(self, reason: FailureReason) -> None:
        self._count(1, "vllm_omni:requests_failed", reason)

    def speech_completed(self) -> None:
        self._count(1, "vllm_omni:speech_stream_completed")

    def speech_aborted(self, reason: SpeechAbort) -> None:
        self._count(1, "vllm_omni:speech_stream_aborted", reason)

    def socket_opened(self, handler: str) -> None:
        self._count(1, "vllm:websocket_connections", handler)
        self._gauge("vllm:websocket_connections_active", handler).inc()

    def socket_closed(self, handler: str, seconds: float) -> None:
        self._gauge("vllm:websocket_connections_active", handler).dec()
        self._observe(seconds, "vllm:websocket_connection_duration_seconds", handler)

    def http(self, *, handler: str, method: str, status: int, seconds: float) -> None:
        self._counters["http_requests"].labels(handler, method, f"{status // 100}xx").inc()
        self._histograms["http_request_duration_seconds"].labels(handler, method).observe(seconds)

    # ---- scraping --------------------------------------------------------------------------------

    def exposition(self, loads: Mapping[str, Pong], num_in_flight: int) -> bytes:
        """All series as text; the gauges say what the stages said last."""
        self._set(num_in_flight, "vllm_omni:num_requests_running")
        for name, load in loads.items():
            stage = self._at(name)
            self._set(load.num_running, "vllm:num_requests_running", *stage)
            self._set(load.num_waiting, "vllm:num_requests_waiting", *stage)
            self._set(load.kv_usage, "vllm:kv_cache_usage_perc", *stage)
            self._set(load.num_waiting_for_chunk, "vllm_omni:stage_waiting_requests", *stage)
            before = self._pongs.get(name)
            self._pongs[name] = load
            queries, hits = load.prefix_queried_tokens, load.prefix_hit_tokens
            if before is not None:
                queries -= before.prefix_queried_tokens
                hits -= before.prefix_hit_tokens
            self._count(queries, "vllm:prefix_cache_queries", *stage)
            self._count(hits, "vllm:prefix_cache_hits", *stage)
            if name == self._entry:
                self._set(load.num_waiting, "vllm_omni:num_requests_waiting")
        return generate_latest(self._registry)

    def _at(self, stage: str) -> tuple[str, str]:
        # One replica each, so far.
        return stage, "0"

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return self._gauges[name].labels(self._model, *labels)

    def _set(self, value: float, name: str, *labels: str) -> None:
        self._gauge(name, *labels).set(value)

    def _count(self, amount: float, name: str, *labels: str) -> None:
        self._counters[name].labels(self._model, *labels).inc(amount)

    def _observe(self, value: float | None, name: str, *labels: str) -> None:
        """None: there was nothing to measure."""
        if value is not None:
            self._histograms[name].labels(self._model, *labels).observe(value)
