"""Names that contradict each other, and defaults that can't be, are refused by name, value and way out."""

import pytest

from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems

BASE = "models={old: {tokenizer: 'builtin:sim', pools: {main: {}}}, new: {tokenizer: 'builtin:sim', pools: {main: {}}}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models.old.aliases=new", "models.old.aliases: 'new' is the name of another model"),
        ("models.old.aliases=old", "'old' is its own name"),
        ("models.old.aliases=a b", "'a b' is not a valid name"),
        ("models.old.aliases=x,x", "'x' is an alias of old already"),
        ("names={chat: {models: {old: 1, newer: 1}}}", "there is no model 'newer': models are old, new"),
        ("names={chat: {models: {sql: 1}}}", "an adapter stands in models.MODEL.adapters"),
        ("names={chat: {models: {old: 0, new: 0}}}", "names.chat.models: has no weight above 0"),
        ("names={chat: {models: {old: -1, new: 1}}}", "'-1' is out of range: 0 or more"),
        ("names={chat: {shadow: {new: 0.1}}}", "is empty, and no model is called so"),
        ("names={old: {models: {new: 1}}}", "hides the model 'old'"),
        ("names={old: {shadow: {old: 1}}}", "old would shadow itself"),
        ("names={old: {shadow: {new: 1.5}}}", "'1.5' is out of range: 0 to 1"),
        ("names={old: {shadow: {newest: 1}}}", "names.old.shadow: there is no model 'newest'"),
        ("models.old.defaults={temperature: hot}", "temperature is 'hot': it takes a number"),
        ("models.old.defaults={top_p: 2}", "top_p is 2, out of range: it takes above 0 and 1 or less"),
        ("models.old.defaults={max_tokens: 1.5}", "max_tokens is '1.5': it takes a whole number"),
        ("models.old.defaults={stream: true}", "stream can't have a default"),
        ("models.old.defaults={chat_template_kwargs: x}", "chat_template_kwargs is 'x', no object"),
        ("models.old.system_prompt=file:", "models.old.system_prompt: is empty"),
    ],
)
def test_a_wrong_setting_is_refused(text, said):
    with pytest.raises(ConfigProblems) as refused:
        load(None, [BASE, text])
    plain = " ".join(str(refused.value).replace("(", ": ").split())
    assert all(part.strip() in plain for part in said.split(": ")), plain


def test_a_name_may_lead_to_an_adapter_of_the_settings_but_not_be_one():
    adapters = "models.old.adapters={sql: /sql}"
    settings = load(None, [BASE, adapters, "names={chat: {models: {new: 9, sql: 1}, shadow: {sql: 0.1}}}"]).settings
    assert settings.names["chat"].models == {"new": 9.0, "sql": 1.0}
    with pytest.raises(ConfigProblems, match="an adapter's own name"):
        load(None, [BASE, adapters, "names={sql: {models: {old: 1}}}"])


def test_an_alias_of_two_models_and_one_that_is_shared_are_refused():
    with pytest.raises(ConfigProblems, match="alias of old already"):
        load(None, [BASE, "models.old.aliases=x", "models.new.aliases=x"])
    with pytest.raises(ConfigProblems, match="stands in names as well"):
        load(None, [BASE, "models.old.aliases=x", "names={x: {models: {old: 1}}}"])


def test_a_gateway_that_sends_bodies_on_can_not_honour_names():
    with pytest.raises(ConfigProblems, match="sends bodies on as clients wrote them"):
        load(None, [BASE, "picker.kind=envoy", "models.old.aliases=x"])


def test_files_that_are_not_there_are_named(tmp_path):
    load(None, [BASE, f"models.old.system_prompt=file:{__file__}"], files=True)
    with pytest.raises(ConfigProblems) as refused:
        gone = tmp_path / "gone"
        load(None, [BASE, f"models.old.system_prompt=file:{gone}", f"models.new.chat_template={gone}"], files=True)
    assert len(refused.value.problems) == 2
