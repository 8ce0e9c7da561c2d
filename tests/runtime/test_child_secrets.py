"""Do the frontends know every secret of the config, though none of them stands in the run folder?"""

from pathlib import Path

from penstock.config.reading.load import load, load_resolved, resolved_yaml
from penstock.runtime.supervision.child_process import secrets_of

GIVEN = {
    "PENSTOCK_CLUSTER_SECRET": "a secret of the tests of children",
    "PENSTOCK_FRONTEND__SECURITY__API_KEYS": '["k1", "k2"]',
    "PENSTOCK_DISCOVERY__ETCD__USER": "u",
    "PENSTOCK_DISCOVERY__ETCD__PASSWORD": "of etcd",
    "PENSTOCK_DISCOVERY__NATS__TOKEN": "of nats",
}


def test_what_is_left_out_of_the_run_folder_reaches_a_child_by_its_environment(tmp_path: Path) -> None:
    settings = load(None, [], GIVEN).settings
    text = resolved_yaml(settings)
    (tmp_path / "config.yaml").write_text(text)
    assert not any(secret in text for secret in ("of etcd", "of nats", "k1", "of children"))
    handed = secrets_of(settings)
    assert set(handed) == set(GIVEN) - {"PENSTOCK_DISCOVERY__ETCD__USER"}
    child = load_resolved(tmp_path / "config.yaml", handed)
    assert child.discovery == settings.discovery
    assert child.frontend.security.api_keys == ("k1", "k2")
    assert child.cluster_secret == settings.cluster_secret
