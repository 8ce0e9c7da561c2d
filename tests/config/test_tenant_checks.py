"""Are contradictions in settings of tenants, tokens and the audit log found, and are keys never written down?"""

import pytest

from penstock.config.derived.yaml_writer import resolved_yaml
from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems
from penstock.config.redact import without_secrets

ACME = "tenants={acme: {keys: [secret-of-acme]}}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["tenants={acme: {}}"], "has no key, so nobody is of it"),
        (["tenants={a b: {keys: [k]}}"], "is not a valid name for a tenant"),
        (["tenants={a: {keys: [k]}, b: {keys: [k]}}"], "has a key of tenants.a"),
        (["tenants={a: {keys: [k]}}", "frontend.security.admin_keys=[k]"], "has a key of frontend.security.admin_keys"),
        ([ACME, "router.queue.shares={acmee: 1}"], "acmee is not a tenant"),
        ([ACME, "frontend.security.jwt={issuer: 'https://i'}"], "a token for any other service would be accepted"),
        ([ACME, "frontend.security.jwt={issuer: 'http://i', audience: a}"], "is not an https URL"),
        (["frontend.security.jwt={issuer: 'https://i', audience: a}"], "stands without tenants"),
        (["audit.folder=/log"], "has no key_file"),
        (["tenants={a: {keys: [k], budget: 5}}", "picker.kind=envoy"], "its limits would not hold"),
    ],
)
def test_a_contradiction_is_named(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load(None, settings)
    assert said in str(caught.value)


def test_off_loopback_a_tenants_key_is_enough() -> None:
    assert load(None, [ACME, "frontend.host=0.0.0.0"]).settings.tenants["acme"].keys


def test_a_key_is_in_no_config_and_no_command_line_that_is_written_down() -> None:
    assert "secret-of-acme" not in resolved_yaml(load(None, [ACME]).settings, secrets=True)
    for words in (["--set", ACME], ["--set", "tenants.acme.keys=[secret-of-acme]"]):
        assert "secret-of-acme" not in " ".join(without_secrets(["penstock", "up", *words]))
