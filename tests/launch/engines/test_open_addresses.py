"""A server of this machine that other machines may reach is named in one line; nothing is said of others."""

import ipaddress
import socket
from contextlib import closing
from http.server import ThreadingHTTPServer
from unittest import mock

import pytest

from megatron_rc.launch.engines import open_addresses
from megatron_rc.launch.engines.open_addresses import warning_of_open_addresses
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import VllmClient
from tests.support.rollout_servers import Server, given, running, weights
from tests.support.training_runs import logged

# Linux answers on all of 127.0.0.0/8: it stands for the address of a network here, which a machine may not have.
OF_NETWORK = ipaddress.ip_address("127.0.0.2")


@pytest.fixture(autouse=True)
def interface():
    with mock.patch.object(open_addresses, "addresses_of_machine", return_value=[OF_NETWORK]):
        yield


def listening(address):
    return closing(socket.create_server((address, 0)))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_a_server_on_all_addresses_is_named(name):
    with listening("0.0.0.0") as server:
        url = f"http://{name}:{server.getsockname()[1]}"
        warning = warning_of_open_addresses(url)
    assert url in warning
    assert "127.0.0.2" in warning
    assert "--host 127.0.0.1" in warning


def test_a_server_on_the_loopback_alone_is_not():
    with listening("127.0.0.1") as server:
        assert warning_of_open_addresses(f"http://localhost:{server.getsockname()[1]}") is None


def test_a_private_address_that_the_user_names_is_meant():
    """A server that listens on it alone, as for several machines; but further addresses are named."""
    with listening("127.0.0.2") as server:
        url = f"http://127.0.0.2:{server.getsockname()[1]}"
        assert warning_of_open_addresses(url) is None
    other = ipaddress.ip_address("127.0.0.3")
    with listening("0.0.0.0") as server:
        open_addresses.addresses_of_machine.return_value = [OF_NETWORK, other]
        warning = warning_of_open_addresses(f"http://127.0.0.2:{server.getsockname()[1]}")
    assert "answers on 127.0.0.3 of" in warning


@pytest.mark.parametrize("url", ["http://192.0.2.77:8000", "http://no.such.name.invalid:8000"])
def test_a_server_elsewhere_is_no_matter_of_this_machine(url):
    assert warning_of_open_addresses(url) is None


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_engine_says_so_once_at_its_start(tmp_path, kind, host):
    class Open(Server):
        def server_bind(self):
            self.server_address = (host, 0)
            ThreadingHTTPServer.server_bind(self)

    with running(kind=Open) as server, logged() as message:
        engine = given(kind, server, tmp_path)
        engine.load_weights(weights().items(), 1)
    warnings = [line for line in message if "127.0.0.2" in line]
    assert len(warnings) == (host == "0.0.0.0")
