"""Requests say clearly what is wrong with them, and the table of a stage holds each one once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidRequest
from stretto.payloads import Payload
from stretto.request import (
    Inbox,
    Request,
    RequestStatus,
    RequestTable,
    SamplingParams,
    StageRequest,
    merge_sampling,
)

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "0"),
    ("temperature", 100.5, "100"),
    ("temperature", float("nan"), "100"),
    ("temperature", float("inf"), "100"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.01, "1"),
    ("top_p", float("nan"), "1"),
    ("top_k", -1, "0"),
    ("min_p", -0.01, "0"),
    ("min_p", 1.5, "1"),
    ("repetition_penalty", 0.0, "above 0"),
    ("repetition_penalty", -1.0, "above 0"),
    ("presence_penalty", 2.5, "2.0"),
    ("frequency_penalty", -2.5, "-2.0"),
    ("max_tokens", 0, "1"),
    ("max_tokens", -3, "1"),
    ("stop", ("",), "empty"),
    ("seed", 2**63, "64-bit"),
    ("seed", -(2**63) - 1, "64-bit"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_its_name_and_what_is_allowed(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert str(refused.value).startswith(f"{name} is {value!r}; allowed is ")
    assert allowed in str(refused.value)


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE)
def test_it_is_refused_under_the_same_name_when_it_is_merged(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        merge_sampling(SamplingParams(), {"temperature": 0.5, name: value})
    assert refused.value.param == name
    assert name in str(refused.value)


def test_fewer_tokens_at_most_than_at_least_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5; allowed is at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


@pytest.mark.parametrize(
    ("given_fields", "param"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_k": 1.5}, "top_k"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 7]}, "stop"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"seed": "lucky"}, "seed"),
        ({"max_tokens": 3, "min_tokens": 5}, "min_tokens"),
        ({"stop": ["."], "stop_token_ids": ["x"]}, "stop_token_ids"),
    ],
)
def test_a_wrong_field_is_named(given_fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        merge_sampling(SamplingParams(), given_fields)
    assert refused.value.param == param


def test_an_unknown_field_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match="temperature") as refused:
        merge_sampling(SamplingParams(), {"temprature": 1.0})
    assert "'temprature'" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**64]),
        ("top_k", 2**64),
        ("min_tokens", 2**64),
        ("max_tokens", 2**64),
        ("seed", 2**64),
    ],
)
def test_a_number_that_no_stage_could_take_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        merge_sampling(SamplingParams(), {name: value})
    assert refused.value.param == name


def test_what_is_given_goes_over_the_defaults_and_nothing_else_changes() -> None:
    defaults = SamplingParams(temperature=0.9, top_k=50, max_tokens=100, stop=("x",))
    merged = merge_sampling(defaults, {"top_k": 0, "stop": ["a", "b"]})
    assert merged == SamplingParams(temperature=0.9, top_k=0, max_tokens=100, stop=("a", "b"))
    assert merge_sampling(defaults, {}) == defaults


def test_one_stop_string_needs_no_list() -> None:
    assert merge_sampling(SamplingParams(), {"stop": "END"}).stop == ("END",)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.1).greedy


def test_a_ticket_travels_as_it_is() -> None:
    ticket = StageRequest(
        request_id="r",
        sampling=SamplingParams(temperature=0.7, stop=("é",), stop_token_ids=(3,), seed=-5),
        max_positions=12,
        prompt_token_ids=(1, 2),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=StageRequest) == ticket


# ---- the table -----------------------------------------------------------------------------------


class EmptyInbox:
    def push(self, payload: Payload) -> None:
        raise AssertionError("nothing comes")

    def end(self) -> None:
        raise AssertionError("nothing comes")


def a_request(name: str) -> Request[Inbox]:
    ticket = StageRequest(request_id=name, sampling=SamplingParams(), max_positions=1)
    return Request(ticket, EmptyInbox(), None)


moves = st.lists(
    st.tuples(st.sampled_from(["add", "move", "remove"]), st.integers(0, 7),
              st.sampled_from(RequestStatus)),
    max_size=60,
)  # fmt: skip


@settings(max_examples=200)
@given(moves)
def test_each_request_stands_in_exactly_the_queue_of_its_status(
    steps: list[tuple[str, int, RequestStatus]],
) -> None:
    table: RequestTable[Request[Inbox]] = RequestTable()
    queues: dict[RequestStatus, list[str]] = {status: [] for status in RequestStatus}
    for action, number, status in steps:
        name = f"r{number}"
        request = table.find(name)
        if action == "add" and request is None:
            table.add(a_request(name))
            queues[RequestStatus.WAITING_FOR_CHUNK].append(name)
        elif action == "move" and request is not None:
            queues[request.status].remove(name)
            table.move(request, status)
            queues[status].append(name)
        elif action == "remove" and request is not None:
            queues[request.status].remove(name)
            table.remove(request)
    for status, names in queues.items():
        assert [r.request_id for r in table.with_status(status)] == names
        assert all(r.status is status for r in table.with_status(status))
        assert table.count(status) == len(names)
    assert len(table) == sum(map(len, queues.values()))
    assert {r.request_id for r in table} == {n for names in queues.values() for n in names}


def test_an_id_is_never_in_the_table_twice() -> None:
    table: RequestTable[Request[Inbox]] = RequestTable()
    table.add(a_request("r"))
    with pytest.raises(AssertionError, match="r is reused"):
        table.add(a_request("r"))
