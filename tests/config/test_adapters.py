"""LoRA adapters in the settings: engines that are started for a model with adapters hold some; names are unique."""

import json

import pytest

from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems


def models(**model: object) -> str:
    return "models=" + json.dumps({"m": {"tokenizer": "builtin:sim", "pools": {"main": {}}, **model}})


def test_a_pool_of_a_model_with_adapters_holds_some_unless_it_says_how_many() -> None:
    assert load(None, [models()], {}).settings.models["m"].pools["main"].max_cpu_loras is None
    adapted = load(None, [models(adapters={"sql": "/sql"})], {}).settings.models["m"]
    assert adapted.pools["main"].max_cpu_loras == 16 and adapted.adapters == {"sql": "/sql"}
    own = load(None, [models(adapters={"sql": "/sql"}, pools={"main": {"max_cpu_loras": 3}})], {}).settings
    assert own.models["m"].pools["main"].max_cpu_loras == 3


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"adapters": {"m": "/x"}}, "a model as well"),
        ({"adapters": {"a b": "/x"}}, "not a valid name for an adapter"),
        ({"adapter_folder": "/not/there"}, "is not there"),
        ({"adapters": {"x": "/x"}, "adapter_workers": {"y": 2}}, "'y' is not an adapter of the model"),
        ({"adapters": {"x": "/x"}, "adapter_workers": {"x": -1}}, "out of range"),
        ({"adapters": {"x": "/x"}, "pools": {"main": {"engine": "llamacpp"}}}, "loads adapters"),
    ],
)
def test_what_can_not_be_is_named(model: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigProblems) as error:
        load(None, [models(**model)], {}, files=True)
    assert words in str(error.value)
