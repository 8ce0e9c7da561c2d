"""A command line is kept in the run folder; the keys in it are not."""

import pytest

from penstock.config.redact import without_secrets


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["up", "--router.mode", "kv", "c.yaml"], ["up", "--router.mode", "kv", "c.yaml"]),
        (["up", "--frontend.security.api_keys", "hush"], ["up", "--frontend.security.api_keys", "***"]),
        (["up", "--frontend.security.api-keys=hush", "c.yaml"], ["up", "--frontend.security.api-keys=***", "c.yaml"]),
        (["up", "--set", "frontend.security.admin_keys=hush"], ["up", "--set", "frontend.security.admin_keys=***"]),
        (["up", "--set=frontend.security.admin_keys=hush"], ["up", "--set=frontend.security.admin_keys=***"]),
        (["up", "--set", "frontend={security: {api_keys: hush}}"], ["up", "--set", "frontend=***"]),
        (["bench", "--api-key", "hush", "--json"], ["bench", "--api-key", "***", "--json"]),
        (["bench", "--api-key=hush=hush", "--json"], ["bench", "--api-key=***", "--json"]),
        (["join", "--admin-key", "hush"], ["join", "--admin-key", "***"]),
    ],
)
def test_keys_are_replaced_and_the_rest_stays(given, kept):
    assert without_secrets(given) == kept
