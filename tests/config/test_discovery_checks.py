"""Which settings of stores and planes contradict themselves, and does the message say what to write instead?"""

import pytest

from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("discovery.host=0.0.0.0", "which no other machine can connect to"),
        ("discovery.etcd.urls=10.0.0.5:2379", "is not a URL of etcd"),
        ("discovery.etcd.urls=http://me:word@10.0.0.5:2379", "give user and password by themselves"),
        ("discovery.etcd.urls=[]", "is empty"),
        ("discovery.etcd.user=me", "and password come together"),
        ("discovery.etcd.cert=c.pem", "and key come together"),
        ("discovery.nats.urls=http://10.0.0.5:4222", "is not a URL of nats"),
        ("discovery.nats.urls=nats://token@10.0.0.5", "which status and logs would show"),
        ("discovery.nats.password=word", "and password come together"),
        ("discovery.forwarder=10.0.0.5:5557,tcp://10.0.0.5:5558", "write it as tcp://HOST:PORT"),
        ("discovery.store=memory", "etcd"),
        ("discovery.ttl=0.5", "1"),
    ],
)
def test_a_contradiction_is_told_with_the_way_out(override: str, said: str) -> None:
    with pytest.raises(ConfigProblems) as told:
        load(None, [override], {})
    assert said in str(told.value)
    assert "word" not in str(told.value).replace("password", "")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["discovery.store=kubernetes", "name=a cluster"], "can't be a label of Kubernetes"),
        (["models.sim.pools.main.selector=inferencepool/"], "names no InferencePool"),
        (["models.sim.pools.main.selector=app=$(vllm)"], "is not a label selector"),
        (
            ["models.sim.pools.main.selector=app=vllm", "models.sim.pools.main.urls=http://a:1"],
            "make two pools of them",
        ),
        (["models.sim.pools.main.selector=app=vllm", "models.sim.pools.main.stats=tcp://a:1"], "annotate the pods"),
    ],
)
def test_what_kubernetes_would_refuse_is_told_before(overrides: list[str], said: str) -> None:
    pytest.importorskip("lightkube")
    with pytest.raises(ConfigProblems) as told:
        load(None, overrides, {})
    assert said in str(told.value)


def test_pods_of_any_engine_need_no_urls() -> None:
    pool = "models.sim.pools.main"
    for selector in ("app=vllm,tier in (a,b)", "inferencepool/vllm-pool"):
        settings = load(None, [f"{pool}.engine=sglang", f"{pool}.selector={selector}"], {}).settings
        found = settings.models["sim"].pools["main"]
        assert (found.attached, found.size) == (True, 0)


def test_a_cluster_of_several_machines_is_no_contradiction() -> None:
    given = {
        "store": "etcd",
        "host": "10.0.0.2",
        "plane": "nats",
        "kv_events": "jetstream",
        "etcd.urls": "https://a:2379,https://b:2379",
        "etcd.user": "u",
        "nats.urls": "tls://a:4222",
        "nats.creds": "user.creds",
    }
    secret = {"PENSTOCK_DISCOVERY__ETCD__PASSWORD": "word"}
    found = load(None, [f"discovery.{name}={value}" for name, value in given.items()], secret).settings.discovery
    assert (found.store, found.plane, found.kv_events) == ("etcd", "nats", "jetstream")
    assert found.etcd.urls == ("https://a:2379", "https://b:2379")
    assert found.etcd.password == "word"
