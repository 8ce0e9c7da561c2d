"""How does a process come by the cluster's secret, and who else could read it on the way?"""

import os
import stat

import msgspec
import pytest

from penstock.config.checks import file_problems
from penstock.config.cluster_secret_file import (
    SECRET_ENV,
    SECRET_FILE,
    drop_secret,
    keep_secret,
    secret_of_env,
    secret_of_process,
    secret_text,
    stored_secret,
    without_secrets,
)
from penstock.config.derived.yaml_writer import shown_yaml
from penstock.config.reading.load import load, resolved_yaml
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError

GIVEN = "MARK-a-given-secret"


def test_each_start_makes_a_new_one_unless_one_is_given(tmp_path):
    plain = ClusterSettings()
    assert len({secret_text(plain) for _ in range(3)}) == 3 and len(secret_text(plain)) > 40
    assert secret_text(load(None, (), {SECRET_ENV: GIVEN}).settings) == GIVEN
    file = tmp_path / "s"
    file.write_text(GIVEN + "\n")
    file.chmod(0o600)
    assert secret_text(load(None, (f"cluster_secret_file={file}",)).settings) == GIVEN


def test_it_is_kept_for_this_user_alone_and_goes_with_the_run(tmp_path):
    os.umask(0o000)
    try:
        path = keep_secret(tmp_path, GIVEN)
    finally:
        os.umask(0o022)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.name == SECRET_FILE
    assert stored_secret(tmp_path) == GIVEN
    with pytest.raises(ConfigError, match="can't be kept"):
        keep_secret(tmp_path, GIVEN)  # nobody may have put a file or a link there before us
    drop_secret(tmp_path)
    drop_secret(tmp_path)
    assert stored_secret(tmp_path) is None


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / SECRET_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        keep_secret(tmp_path, GIVEN)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_that_others_can_read_is_refused_with_the_next_step(tmp_path, mode):
    path = keep_secret(tmp_path, GIVEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        stored_secret(tmp_path)
    assert GIVEN not in str(caught.value)


@pytest.mark.parametrize("raw", [b"MARK-short", b"", b"\xff" * 40])
def test_a_bad_file_is_refused_without_being_repeated(tmp_path, raw):
    path = tmp_path / SECRET_FILE
    path.write_bytes(raw)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        stored_secret(tmp_path)
    assert "MARK" not in str(caught.value)


def test_config_says_what_is_wrong_with_it_and_never_shows_it(tmp_path):
    with pytest.raises(ConfigProblems) as caught:
        load(None, ("cluster_secret=MARK-short",))
    assert "MARK" not in str(caught.value) and "cluster_secret" in str(caught.value)
    with pytest.raises(ConfigProblems):
        load(None, (f"cluster_secret={GIVEN}", "cluster_secret_file=x"))
    missing = load(None, (f"cluster_secret_file={tmp_path / 'none'}",))
    assert [problem.path for problem in file_problems(missing.settings, missing.root)] == ["cluster_secret_file"]
    loaded = load(None, (f"cluster_secret={GIVEN}",))
    assert GIVEN not in resolved_yaml(loaded.settings) + shown_yaml(loaded.settings, loaded.origins)


def test_a_child_takes_it_from_its_environment_else_from_the_run_folder(tmp_path):
    bare = ClusterSettings()
    assert secret_of_process(bare, tmp_path) is None
    keep_secret(tmp_path, GIVEN)
    found = secret_of_process(bare, tmp_path)
    given = secret_of_process(msgspec.structs.replace(bare, cluster_secret=GIVEN), tmp_path / "none")
    of_env = secret_of_env({SECRET_ENV: GIVEN})
    assert found and given and of_env and found.derive("a") == given.derive("a") == of_env.derive("a")
    assert secret_of_env({}) is None


def test_a_stock_engine_gets_none_of_our_secrets():
    env = {
        SECRET_ENV: GIVEN,
        "PENSTOCK_FRONTEND__SECURITY__API_KEYS": "k",
        "PENSTOCK_FRONTEND__SECURITY__ADMIN_KEYS": "k",
        "PENSTOCK_ADMIN_KEY": "k",
        "PENSTOCK_API_KEY": "k",
        "HOME": "/",
        "PENSTOCK_LOGS__LEVEL": "debug",
    }
    assert without_secrets(env) == {"HOME": "/", "PENSTOCK_LOGS__LEVEL": "debug"}


@pytest.mark.parametrize(
    "override",
    [
        "models={m: {pools: {p: {engine: openai, urls: ['http://a:MARK@h:1']}}}}",
        "models={m: {pools: {p: {engine: openai, urls: ['http://MARK@h:1']}}}}",
        "frontend.otlp_endpoint=http://a:MARK@h:4318",
    ],
)
def test_a_url_with_a_password_is_refused_without_being_repeated(override):
    with pytest.raises(ConfigProblems, match="user or password") as caught:
        load(None, (override,))
    assert "MARK" not in str(caught.value)
