import socket

import pytest

from penstock.adapters import listen_address
from penstock.adapters.listen_address import free_port


@pytest.fixture
def outgoing(tmp_path, monkeypatch):
    """Let the system say that outgoing connections have these ports."""

    def says(text):
        file = tmp_path / text.replace("\t", "-")
        file.write_text(text)
        monkeypatch.setattr(listen_address, "OUTGOING_PORTS", file)

    return says


def test_no_outgoing_connection_is_given_an_engines_port(outgoing):
    outgoing("32768\t60999\n")
    ports = {free_port() for _ in range(200)}
    assert len(ports) > 150 and all(20_000 <= port < 32_768 for port in ports)


def test_a_port_in_use_is_no_free_one(outgoing, monkeypatch):
    outgoing("32768\t60999\n")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        drawn = iter([taken - listen_address.LOWEST_PORT, 77])
        monkeypatch.setattr(listen_address.secrets, "randbelow", lambda _: next(drawn))
        assert free_port() == listen_address.LOWEST_PORT + 77


@pytest.mark.parametrize("text", ["1024\t65535\n", "22000\t65535\n"])
def test_where_outgoing_connections_have_nearly_all_ports_the_system_chooses(outgoing, monkeypatch, text):
    outgoing(text)
    monkeypatch.setattr(listen_address.secrets, "randbelow", None)
    assert 1024 <= free_port() <= 65535


def test_a_system_that_does_not_say_it_chooses(tmp_path, monkeypatch):
    monkeypatch.setattr(listen_address, "OUTGOING_PORTS", tmp_path / "absent")
    assert free_port() > 0
