"""Do the messages say what the structs say, both ways; and is the compiled description that of planner.proto?"""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.values import EngineLimits, Pool, RequestShape, StepStats, Traffic
from penstock.planner.events import AskPlugin
from penstock.planner.observation import EngineState, ModelState, Observation, PoolState
from penstock.planner.plugins import proposals
from penstock.planner.plugins.plugin_registry import PluginSlot, PluginSpec
from penstock.planner.plugins.proposals import Accept, Flip, Override, PoolTarget, Predicted, Prediction, Reason, Reject
from penstock_extras.plugins import protobuf_messages
from penstock_extras.plugins.protobuf_convert import ConversionError, fill, plain
from penstock_extras.plugins.protobuf_messages import message
from penstock_extras.plugins.stage_messages import (
    METHODS,
    answer_of,
    observation_of,
    question_of,
    result_of,
    spec_message,
    spec_of,
)
from tests.extras.plugins.harness import observation
from tests.planner.pool_states import pool_state

FOLDER = Path(protobuf_messages.__file__).parent
TWINS: dict[str, type[msgspec.Struct]] = {
    "Observation": Observation,
    "Model": ModelState,
    "Traffic": Traffic,
    "Engine": EngineState,
    "Steps": StepStats,
    "Prediction": Prediction,
    "Accept": Accept,
    "Predicted": Predicted,
    "Override": Override,
    "Reject": Reject,
    "PoolTarget": PoolTarget,
    "Flip": Flip,
    "Reason": proposals.Reason,
}


@pytest.mark.parametrize(
    ("compiled", "package"),
    [
        (protobuf_messages.COMPILED, protobuf_messages.PACKAGE),
        (protobuf_messages.COMPILED_KEDA, protobuf_messages.KEDA),
        (protobuf_messages.COMPILED_INFERENCE, protobuf_messages.INFERENCE),
    ],
)
def test_the_compiled_description_is_that_of_the_text(tmp_path: Path, compiled: str, package: str) -> None:
    tools = pytest.importorskip("grpc_tools.protoc")
    include = Path(tools.__file__).parent / "_proto"
    out = tmp_path / compiled
    words = ["protoc", f"-I{FOLDER}", f"-I{include}", "--include_imports", f"--descriptor_set_out={out}"]
    assert tools.main([*words, compiled.replace(".binpb", ".proto")]) == 0
    from google.protobuf import descriptor_pb2

    fresh, kept = (descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()) for path in (out, FOLDER / compiled))
    ours = [file for file in fresh.file if file.package == package]
    assert ours and ours == [file for file in kept.file if file.package == package], "see messages.py for the command"


@pytest.mark.parametrize(("name", "kind"), TWINS.items(), ids=TWINS)
def test_a_message_has_the_fields_of_its_struct(name: str, kind: type[msgspec.Struct]) -> None:
    fields = set(kind.__struct_fields__)
    beside = {Prediction: ("shape", RequestShape), EngineState: ("limits", EngineLimits)}.get(kind)
    if beside is not None:
        fields = fields - {beside[0]} | set(beside[1].__struct_fields__)
    assert set(message(name).DESCRIPTOR.fields_by_name) == fields


def test_a_pool_has_the_fields_of_the_pool_and_of_its_state() -> None:
    own = set(Pool.__struct_fields__) - {"model", "acknowledged", "replicas"}
    state = set(PoolState.__struct_fields__) - {"pool"}
    assert not own & state and set(message("Pool").DESCRIPTOR.fields_by_name) == own | state


def test_a_spec_has_the_fields_of_its_struct() -> None:
    assert set(message("PluginSpec").DESCRIPTOR.fields_by_name) == set(PluginSpec.__struct_fields__) - {"outside"}
    assert {field.name for field in message("PluginState").DESCRIPTOR.fields} <= {"outside", "circuit"} | set(
        PluginSlot.__slots__
    )


def test_what_was_seen_arrives_as_it_was() -> None:
    steps = StepStats(passes=3, wall=0.5, decode_kv=0, estimated=("decode_kv",))
    engine = EngineState(worker="w", role="prefill", steps=steps, waiting=0)  # type: ignore[arg-type]
    pool = pool_state(
        model="a/b", role="prefill", desired=3, ready=1, starting=(9.5, 0.0), engines=(engine,), problem="no GPU"
    )
    traffic = Traffic(seconds=0.0, arrived=0, prompt_tokens=0, ttft={-12: 3}, shapes={2**40: 1}, accept_length=1.5)
    seen = Observation(
        at=3.0,
        window=5.0,
        models={
            "a/b": ModelState(traffic=traffic, pools={"p": pool}),
            "unreadable": ModelState(traffic=None, pools={}, health="broken", why="no such metric"),
        },
    )
    sent = fill(message("Observation")(), seen)
    again = observation_of(message("Observation").FromString(sent.SerializeToString()))
    assert again == seen
    assert again.models["unreadable"].traffic is None
    assert again.models["a/b"].traffic is not None and again.models["a/b"].queued is None
    arrived = again.models["a/b"].pools["p"].engines[0]
    assert (arrived.waiting, arrived.running) == (0, None)


PREDICTIONS = st.builds(
    Prediction,
    seconds=st.floats(0, 1e6),
    requests=st.none() | st.floats(0, 1e9),
    shape=st.builds(RequestShape, st.none() | st.floats(0, 1e6), st.none()),
    horizons=st.just((0.0, 60.0)),
    quantiles=st.dictionaries(st.floats(0, 1), st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=3),
    source=st.text(max_size=9),
    weights=st.dictionaries(st.text(max_size=5), st.floats(0, 1), max_size=3),
)
BECAUSE = st.builds(
    Reason,
    code=st.text(max_size=9),
    text=st.text(max_size=20),
    facts=st.dictionaries(st.text(max_size=5), st.floats(-1e6, 1e6) | st.booleans() | st.text(max_size=5), max_size=3),
)
REASONS = st.lists(BECAUSE, max_size=2).map(tuple)
FLIPS = st.builds(Flip, model=st.text(max_size=4), frm=st.just("prefill"), to=st.just("decode"))
OVERRIDES = st.builds(
    Override,
    targets=st.lists(
        st.builds(
            PoolTarget,
            pool=st.text(min_size=1, max_size=9),
            replicas=st.integers(0, 1000),
            kind=st.sampled_from(("set", "at_least", "at_most")),
        ),
        max_size=3,
    ).map(tuple),
    flips=st.lists(FLIPS, max_size=1).map(tuple),
    reasons=REASONS,
    final=st.booleans(),
    evidence=st.dictionaries(st.text(max_size=5), st.lists(st.floats(0, 9), max_size=3), max_size=2),
)


@given(OVERRIDES | st.builds(Accept, reasons=REASONS) | st.builds(Reject, reasons=REASONS))
def test_an_answer_arrives_as_it_was(result: Any) -> None:
    sent = message("Answer").FromString(answer_of(result).SerializeToString())
    assert result_of(sent, "propose") == result


@given(st.dictionaries(st.text(max_size=5), PREDICTIONS, max_size=2), st.booleans())
def test_a_prediction_arrives_as_it_was(models: dict[str, Prediction], final: bool) -> None:
    result = Predicted(models=models, final=final)
    assert result_of(message("Answer").FromString(answer_of(result).SerializeToString()), "predict") == result


def test_a_question_carries_only_what_is_needed() -> None:
    ask = AskPlugin(
        id=7, plugin="p", stage="constrain", deadline=2.0, tick=7, observation=None, predictions={}, proposal={"d": 0}
    )
    asked = question_of(ask)
    assert not asked.HasField("observation") and dict(asked.proposal) == {"d": 0}
    assert plain(asked)["stage"] == "constrain"
    asked = question_of(msgspec.structs.replace(ask, observation=observation(3.0, {"d": 2})))
    assert asked.observation.models["m"].pools["d"].desired == 2


def predicted(**given: Any) -> dict[str, Any]:
    return {"predicted": {"models": {"m": {"seconds": 1.0, **given}}}}


def flip(**given: Any) -> dict[str, Any]:
    return {"override": {"flips": [{"model": "m", "frm": "prefill", "to": "decode", **given}]}}


@pytest.mark.parametrize(
    ("answer", "stage", "words"),
    [
        ({}, "propose", "answered nothing"),
        ({"accept": {}}, "propose", None),
        ({"predicted": {}}, "propose", "not an answer to stage propose"),
        ({"override": {}}, "predict", "not an answer to stage predict"),
        ({"reject": {}}, "predict", None),
        ({"override": {"targets": [{"replicas": 1}]}}, "propose", "takes a pool"),
        ({"override": {"targets": [{"pool": "p", "replicas": 2_000_000}]}}, "propose", "2000000"),
        ({"override": {"targets": [{"pool": "p", "kind": 9}]}}, "propose", "Invalid enum value"),
        (flip(count=0), "propose", "flip of 0"),
        (flip(count=1, frm="cook"), "propose", "Invalid enum"),
        (predicted(requests=math.nan), "predict", "requests of m is nan"),
        (predicted(isl=-1.0), "predict", "isl of m is -1"),
        (predicted(horizons=[0.0], quantiles=[{"rank": 0.5}]), "predict", "0 rates for 1"),
        (predicted(quantiles=[{"rank": 1.5}]), "predict", "ranks go from 0 to 1"),
        (predicted(weights={"mine": -1.0}), "predict", "the weight of 'mine' for m is -1"),
    ],
)
def test_what_means_nothing_is_not_taken(answer: dict[str, Any], stage: Any, words: str | None) -> None:
    sent = _message("Answer", answer)
    if words is None:
        result_of(sent, stage)
        return
    with pytest.raises(ConversionError) as caught:
        result_of(sent, stage)
    assert words in str(caught.value)


def _message(name: str, given: dict[str, Any]) -> Any:
    return message(name)(**given)


def test_a_spec_arrives_as_it_was_and_a_wrong_one_is_not_taken() -> None:
    for stage in METHODS:
        spec = PluginSpec(id="p", stage=stage, hold="hold_last", needs=("traffic",), interval=5.0, outside=True)
        assert spec_of(spec_message(spec)) == spec
    for changes in ({"stage": 0}, {"stage": 9}, {"interval": -1.0}, {"window": math.inf}, {"hold": 7}):
        given = spec_message(PluginSpec(id="p", stage="predict"))
        for name, value in changes.items():
            setattr(given, name, value)
        with pytest.raises(ConversionError):
            spec_of(given)
