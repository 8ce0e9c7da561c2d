"""Under which name a cluster keeps its engines, and what happens to those who come to a name that is taken."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.connectors.state_file import StateEntry, StateFile
from penstock.adapters.listen_address import bind, free_port
from penstock.config.cluster_secret_file import keep_secret
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.runtime.supervision import namespace
from penstock.runtime.supervision.namespace import earlier_secret, take_namespace


def settings(port: int = 0, wished: str | None = None, **more: Any) -> ClusterSettings:
    base = ClusterSettings(**more)
    supervise = msgspec.structs.replace(base.supervise, namespace=wished, orphan_grace=7.0)
    return msgspec.structs.replace(
        base, supervise=supervise, frontend=msgspec.structs.replace(base.frontend, port=port)
    )


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"PENSTOCK_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}


def test_a_cluster_with_a_port_comes_back_under_its_name(env):
    port = free_port()
    for _ in range(2):
        found = take_namespace(settings(port, name="my cluster"), env)
        assert (found.state.namespace, found.grace) == (f"my-cluster-{port}", 7.0)
        found.state.close()


def test_a_port_of_the_systems_choice_is_no_name_so_engines_end_with_their_supervisor(env):
    one, two = take_namespace(settings(), env), take_namespace(settings(), env)
    assert one.state.namespace != two.state.namespace and one.grace == two.grace == 0.0
    one.state.close()
    two.state.close()


def test_a_wished_name_counts_whatever_the_port(env):
    found = take_namespace(settings(wished="prod"), env)
    assert (found.state.namespace, found.grace) == ("prod", 7.0)
    with pytest.raises(ConfigError, match=r"--supervise\.namespace"):
        take_namespace(settings(wished="prod"), env)
    found.state.close()
    with pytest.raises(ConfigError, match="a-b would be one"):
        take_namespace(settings(wished="a/b"), env)


def test_a_second_start_names_the_cluster_that_has_the_port(env):
    port = free_port()
    first = take_namespace(settings(port), env).state
    first.own(Path("/runs/first"))
    first.put("main", 0, StateEntry(command=["x"]))
    with socket.socket() as frontend:
        frontend.bind(("127.0.0.1", port))
        frontend.listen()
        with pytest.raises(ConfigError, match=r"with the run folder /runs/first.*another --frontend\.port"):
            take_namespace(settings(port), env)
    first.entries.clear()
    first.close()


def test_the_port_of_a_stranger_is_named_and_not_waited_for(env):
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        started = time.monotonic()
        with pytest.raises(ConfigError, match=r"--frontend\.port"):
            take_namespace(settings(port), env)
        assert time.monotonic() - started < namespace.PORT_PATIENCE, "a stranger on the port is not waited for"


def test_the_port_of_a_cluster_that_was_killed_is_waited_for(env):
    port = free_port()
    before = take_namespace(settings(port), env).state
    before.put("main", 0, StateEntry(command=["x"], lease="somebody"))
    before.close()
    other = socket.socket()
    other.bind(("127.0.0.1", port))
    other.listen()
    threading.Timer(0.3, other.close).start()
    found = take_namespace(settings(port), env)
    assert "somebody" in {entry.lease for entry in found.state.entries.values()}
    found.state.entries.clear()
    found.state.close()


def test_the_secret_of_engines_that_may_be_taken_over_is_taken_over(env, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    keep_secret(run, "a secret of sixteen characters")
    before = take_namespace(settings(wished="prod"), env).state
    before.own(run)
    before.put("main", 0, StateEntry(command=["x"], lease="somebody"))
    before.close()
    state = take_namespace(settings(wished="prod"), env).state
    assert earlier_secret(state) == "a secret of sixteen characters"
    state.entries.clear()
    assert earlier_secret(state) is None, "no engine of it is left"
    state.close()


def test_a_user_without_a_home_gets_a_cluster_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    home = {"HOME": str(tmp_path / "file")}
    monkeypatch.setattr(namespace.os, "access", lambda path, mode: False)
    found = take_namespace(settings(free_port()), home)
    assert found.grace == 0.0 and found.state.path.parent == tmp_path / "runs" / ".state"
    found.state.close()
    chosen = {"PENSTOCK_STATE_DIR": str(tmp_path / "file" / "below")}
    with pytest.raises(ConfigError, match="PENSTOCK_STATE_DIR"):
        take_namespace(settings(free_port()), chosen)


def test_an_address_is_bound_whole_or_not_at_all():
    made = bind("localhost", 0)
    ports = {one.getsockname()[1] for one in made}
    assert len(ports) == 1, "one port for every address of the name"
    with pytest.raises(OSError, match="in use"):
        made[0].listen()
        bind("127.0.0.1", ports.pop())
    for one in made:
        one.close()
    first = bind("127.0.0.1", 0, shared=True)
    second = bind("127.0.0.1", first[0].getsockname()[1], shared=True)
    for one in (*first, *second):
        one.close()


def test_the_state_file_is_the_cluster_s_own(env, tmp_path):
    found = take_namespace(settings(wished="prod"), env)
    assert found.state.path == tmp_path / "state" / "prod.json"
    assert isinstance(found.state, StateFile)
    found.state.close()
