"""Settings come from four places in a fixed rank, each knows its source, and typos are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.config.deployment import PipelineConfig
from stretto.config.resolve import Layer, Resolved, bundled_profile, deployment_file, resolve
from stretto.errors import ConfigError

PROFILE = "qwen3_omni_moe"


def with_file(tmp_path: Path, text: str, flags: dict[str, Any] | None = None) -> Resolved:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return resolve(bundled_profile(PROFILE), deployment_file(path), Layer("flags", flags or {}))


def refusal(tmp_path: Path, text: str, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        with_file(tmp_path, text, flags)
    return str(refused.value)


def test_the_bundled_profile_is_a_whole_deployment() -> None:
    config = resolve(bundled_profile(PROFILE)).config
    assert [stage.name for stage in config.stages] == ["thinker", "talker", "code2wav"]
    assert [edge.label for edge in config.connectors] == ["thinker->talker", "talker->code2wav"]
    assert config.async_chunk


def test_an_unknown_kind_of_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=rf"'llama'; supported are .*{PROFILE}"):
        bundled_profile("llama")


def test_a_later_layer_wins_and_leaves_all_else_as_it_was(tmp_path: Path) -> None:
    base = resolve(bundled_profile(PROFILE)).config
    resolved = with_file(
        tmp_path,
        "stages:\n- {name: talker, max_num_seqs: 3, default_sampling: {top_k: 7}}\n"
        "chunk_timeout_s: 9",
        {"stages": {"talker": {"max_num_seqs": 4}}},
    )
    talker = resolved.config.stage("talker")
    assert talker.max_num_seqs == 4
    assert talker.default_sampling == {**base.stage("talker").default_sampling, "top_k": 7}
    assert resolved.config.chunk_timeout_s == 9
    assert resolved.config.stage("thinker") == base.stage("thinker")
    assert resolved.config.connectors == base.connectors


def test_every_value_knows_the_layer_it_came_from(tmp_path: Path) -> None:
    resolved = with_file(
        tmp_path,
        "stages: [{name: talker, max_num_seqs: 3, devices: cpu}]\n"
        "connectors: [{from_stage: talker, to_stage: code2wav, codec: {codec_chunk_frames: 5}}]",
        {"stages": {"talker": {"max_num_seqs": 4}}},
    )
    file = str(tmp_path / "mine.yaml")
    expected = {
        "stages.talker.max_num_seqs": "flags",
        "stages.talker.devices": file,
        "connectors.talker->code2wav.codec.codec_chunk_frames": file,
        "stages.thinker.output": f"profile {PROFILE}",
        "async_chunk": f"profile {PROFILE}",
    }
    assert {path: resolved.sources[path] for path in expected} == expected


def test_the_layers_are_not_changed_by_merging_them() -> None:
    profile, flags = (
        bundled_profile(PROFILE),
        Layer("flags", {"stages": {"talker": {"devices": "x"}}}),
    )
    first = resolve(profile, flags)
    assert resolve(profile).config == resolve(bundled_profile(PROFILE)).config
    assert resolve(profile, flags) == first


@pytest.mark.parametrize(
    ("text", "field", "near", "path"),
    [
        ("async_chunks: true", "async_chunks", "async_chunk", ""),
        (
            "stages: [{name: talker, max_num_seq: 3}]",
            "max_num_seq",
            "max_num_seqs",
            "$.stages[talker]",
        ),
        (
            "connectors: [{from_stage: talker, to_stage: code2wav, codec: {codec_chunk_frame: 5}}]",
            "codec_chunk_frame",
            "codec_chunk_frames",
            "$.connectors[talker->code2wav].codec",
        ),
        (
            "connectors: [{from_stage: talker, to_stage: code2wav, spec: {inline_byte: 5}}]",
            "inline_byte",
            "inline_bytes",
            "$.connectors[talker->code2wav].spec",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_its_file_its_path_and_the_nearest_name(
    tmp_path: Path, text: str, field: str, near: str, path: str
) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(str(tmp_path / "mine.yaml"))
    assert f"unknown field `{field}`" in message
    assert f"did you mean `{near}`?" in message
    assert path in message


def test_an_unknown_flag_is_blamed_on_the_flags(tmp_path: Path) -> None:
    message = refusal(tmp_path, "async_chunk: true", {"chunk_timeout": 3})
    assert message.startswith("flags: ")
    assert "did you mean `chunk_timeout_s`?" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("chunk_timeout_s: 0", ["chunk_timeout_s", "> 0"]),
        ("chunk_timeout_s: soon", ["chunk_timeout_s", "float"]),
        ("max_requests: 0", ["max_requests", ">= 1"]),
        ("async_chunk: 1", ["async_chunk", "bool"]),
        ("stages: [{name: talker, max_num_seqs: 0}]", ["max_num_seqs"]),
        ("stages: [{name: talker, dtype: float8}]", ["dtype", "float8"]),
        ("stages: [{name: talker, num_threads: many}]", ["num_threads"]),
        ("stages: [{name: talker, default_sampling: {temprature: 1}}]", ["talker", "'temprature'"]),
        ("stages: [{name: talker, default_sampling: {top_p: 7}}]", ["talker", "top_p"]),
        ("stages: [{name: talker, residual_sampling: {top_k: -1}}]", ["talker", "top_k"]),
        (
            "connectors: [{from_stage: talker, to_stage: code2wav,"
            " codec: {codec_chunk_frames: 4, initial_codec_chunk_frames: 9}}]",
            ["initial_codec_chunk_frames (9)", "codec_chunk_frames (4)"],
        ),
        (
            "connectors: [{from_stage: talker, to_stage: code2wav,"
            " codec: {initial_codec_chunk_frames: 0}}]",
            ["initial_codec_chunk_frames"],
        ),
        (
            "connectors: [{from_stage: talker, to_stage: code2wav, spec: {name: Carrier}}]",
            ["Carrier"],
        ),
        (
            "connectors: [{from_stage: thinker, to_stage: code2wav}]",
            ["thinker->talker, talker->code2wav"],
        ),
        ("stages: [{name: Talker Two}]", ["name", "[a-z]"]),
        ("stages: [{max_num_seqs: 3}]", ["does not say which one"]),
        ("connectors: [{from_stage: talker}]", ["does not say which one"]),
        ("stages: {talker: {max_num_seqs: 3}}", ["expected a list"]),
        ("stages: [talker]", ["expected a list of mappings"]),
        ("- a\n- b", ["expected a mapping"]),
        ("just words", ["expected a mapping"]),
        ("a: [", ["mine.yaml"]),
    ],
)
def test_a_wrong_file_is_refused_and_says_where_and_why(
    tmp_path: Path, text: str, told: list[str]
) -> None:
    message = refusal(tmp_path, text)
    assert str(tmp_path / "mine.yaml") in message
    for part in told:
        assert part in message


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("stages: [{name: talker, devices: cpu}, {name: talker, dtype: auto}]", "talker"),
        (
            "connectors: [{from_stage: a, to_stage: b}, {from_stage: a, to_stage: b}]",
            "a->b",
        ),
    ],
)
def test_what_stands_twice_in_one_file_is_refused(tmp_path: Path, text: str, name: str) -> None:
    assert f"{name} stands there twice" in refusal(tmp_path, text)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    assert "max_requests" in refusal(tmp_path, "max_requests: 4\nmax_requests: 5")


def test_a_stage_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, "stages: [{name: talkr, max_num_seqs: 3}]")
    assert "talkr" in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        deployment_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00binary", b"a: \x00", b"\x80"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        deployment_file(path)


@pytest.mark.parametrize("stages", [["talker"], {"talker": 5}, None, 5, "talker"])
def test_flags_in_a_wrong_form_are_a_config_error(stages: Any) -> None:
    with pytest.raises(ConfigError, match="flags"):
        resolve(bundled_profile(PROFILE), Layer("flags", {"stages": stages}))


def test_flags_may_be_written_as_a_file_is() -> None:
    by_name = Layer("flags", {"stages": {"talker": {"max_num_seqs": 3}}})
    listed = Layer("flags", {"stages": [{"name": "talker", "max_num_seqs": 3}]})
    profile = bundled_profile(PROFILE)
    assert resolve(profile, listed).config == resolve(profile, by_name).config


def test_an_empty_file_changes_nothing_or_is_refused(tmp_path: Path) -> None:
    assert with_file(tmp_path, "{}").config == resolve(bundled_profile(PROFILE)).config
    assert "expected a mapping" in refusal(tmp_path, "")


def test_the_codec_section_may_be_tuned_alone(tmp_path: Path) -> None:
    config = with_file(
        tmp_path,
        "connectors: [{from_stage: talker, to_stage: code2wav, codec: {codec_chunk_frames: 1}}]",
    ).config
    codec = config.connectors[1].codec
    assert codec is not None
    assert (codec.codec_chunk_frames, codec.initial_codec_chunk_frames) == (1, "auto")


def test_a_stage_is_found_by_its_name() -> None:
    config: PipelineConfig = resolve(bundled_profile(PROFILE)).config
    assert config.stage("code2wav").output == "audio"
