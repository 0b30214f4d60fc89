"""Weights that reach a server's processes over process groups: order and content of requests, and faults.

``tests/vllm/check_weight_transfer.py`` has the same with vLLM's server.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.publishers import StreamPublisher
from megatron_rc.launch.engines.requests import Retries
from megatron_rc.launch.engines.server_client import INCOMPLETE
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import VllmClient
from megatron_rc.launch.engines.weight_sender import SglangSender, VllmSender, send_weights
from megatron_rc.launch.engines.weight_stream import (
    ARRIVED,
    PROTOCOL,
    StreamGroup,
    buckets,
    bytes_of,
    join,
    opened,
    read_shared,
    shared,
)
from tests.support.rollout_servers import make_engine, running, sample, weights
from tests.support.stream_server import SglangStreamServer, StreamServer

BUCKET_BYTES = 300  # several of the small model's tensors, and fewer bytes than its embeddings


def test_buckets_hold_all_tensors_in_their_order_and_no_more_bytes_than_the_bound():
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, generator=generator).bfloat16(),  # six bytes, so that the next begins at an odd place
        torch.randn(2, 5, generator=generator),
        torch.randn((), generator=generator, dtype=torch.float64),
        torch.randn(40, 3, generator=generator).t(),  # larger than a bucket
        torch.empty(0, 4),
        torch.randn(4, generator=generator).to(torch.float8_e4m3fn),
    ]
    packed = list(buckets(((str(number), tensor) for number, tensor in enumerate(tensors)), 100))
    assert [entries["names"] for entries, _ in packed] == [["0", "1", "2"], ["3"], ["4", "5"]]
    unpacked = []
    for entries, bucket in packed:
        size = sum(bytes_of(entries["dtype_names"], entries["shapes"]))
        assert (bucket.dtype, bucket.numel()) == (torch.uint8, size)
        unpacked += [tensor for _, tensor in opened(bucket, **entries)]
    assert [tensor.data_ptr() for tensor in unpacked if tensor.numel() == 0] == [0]
    for received, tensor in zip(unpacked, tensors, strict=True):
        assert (received.dtype, received.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(received.float(), tensor.float())


def test_memory_of_this_machine_is_read_until_it_is_given_back():
    cpu = torch.device("cpu")
    tensors = {"first": torch.randn(3, 5), "second": torch.arange(7)}
    ((entries, bucket),) = buckets(tensors.items())
    with shared(bucket) as memory:
        for _ in range(2):
            received = dict(opened(read_shared(**memory, device=cpu), **entries))
            assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
        with pytest.raises(RuntimeError, match=r"first to second .* checksums differ"):
            opened(read_shared(**memory, device=cpu), **entries | {"checksum": "0"})
        with pytest.raises(RuntimeError, match="--rollout-weight-transfer ipc needs"):
            read_shared(2**22 + 1, memory["memory"], cpu)  # no process has this number
    with pytest.raises(RuntimeError, match="--rollout-weight-transfer ipc needs"):
        read_shared(**memory, device=cpu)
    assert torch.equal(received["first"], tensors["first"])


def packed_experts():
    """A description and a bucket of four tensors of equal size, as of four experts."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"experts.{number}": torch.randn(8, 8, generator=generator) for number in range(4)}
    ((entries, bucket),) = buckets(tensors.items())
    return entries, bucket


def halves_exchanged(bucket):
    return torch.cat(bucket.chunk(2)[::-1])


def words_shuffled(bucket):
    order = torch.randperm(bucket.numel() // 8, generator=torch.Generator().manual_seed(1))
    return bucket.view(-1, 8)[order].flatten()


def two_words_exchanged(bucket):
    changed = bucket.clone()
    changed[0:4] = bucket[400:404]
    changed[400:404] = bucket[0:4]
    return changed


def a_bit_flipped(bucket):
    changed = bucket.clone()
    changed[7] ^= 128
    return changed


@pytest.mark.parametrize(
    "change", [halves_exchanged, words_shuffled, two_words_exchanged, a_bit_flipped, lambda bucket: bucket.flip(0)]
)
def test_other_bytes_than_the_senders_are_refused(change):
    entries, bucket = packed_experts()
    with pytest.raises(RuntimeError, match=r"experts\.0 to experts\.3 .* checksums differ"):
        opened(change(bucket), **entries)


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["experts.1", "experts.0", "experts.2", "experts.3"]},
        {"shapes": [[64], [8, 8], [8, 8], [8, 8]]},
        {"dtype_names": ["int32", "float32", "float32", "float32"]},
        {"shapes": [[8, 8], [8, 8], [8, 8], [8, 9]]},
        {"shapes": [[8, 4], [8, 12], [8, 8], [8, 8]]},
    ],
    ids=["names", "shape", "dtype", "longer", "other cut"],
)
def test_another_description_than_the_senders_is_refused(change):
    entries, bucket = packed_experts()
    with pytest.raises(RuntimeError, match="checksums differ"):
        opened(bucket, **entries | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": ""}, "the same release of megatron_rc"),
        ({"protocol": "megatron_rc weights 1"}, "megatron_rc weights 1"),
        ({"names": "experts.0"}, "names"),
        ({"names": ["experts.0"]}, "names"),
        ({"dtype_names": ["save", "float32", "float32", "float32"]}, "dtype_names"),
        ({"dtype_names": [["float32"]] * 4}, "dtype_names"),
        ({"shapes": [[8, -8], [8, 8], [8, 8], [8, 8]]}, "shapes"),
        ({"shapes": [[8, True], [8, 8], [8, 8], [8, 8]]}, "shapes"),
        ({"shapes": [8, 8, 8, 8]}, "shapes"),
    ],
)
def test_a_description_that_no_sender_gives_is_named(change, message):
    entries, bucket = packed_experts()
    with pytest.raises(ValueError, match=message):
        opened(bucket, **entries | change)


MEETING = {
    "address": "127.0.0.1",
    "port": 29500,
    "transport": "gloo",
    "size": 2,
    "timeout": 5.0,
    "word": "ab",
    "protocol": PROTOCOL,
}


@pytest.mark.parametrize(
    "change",
    [
        {"address": "some.host"},
        {"address": 2130706433},
        {"port": "29500"},
        {"port": 0},
        {"transport": "mpi"},
        {"size": 1},
        {"timeout": float("inf")},
        {"timeout": True},
        {"word": ""},
        {"protocol": ""},
    ],
    ids=str,
)
def test_a_meeting_that_no_sender_names_is_refused_before_any_connection(change):
    (name,) = change
    with pytest.raises(ValueError, match=name if name != "protocol" else "the same release"):
        join(1, **MEETING | change)


@pytest.fixture
def secret(tmp_path):
    """A file of eight bytes, and its number among this process's open files."""
    path = tmp_path / "secret"
    path.write_bytes(b"s3cr3t!!")
    with path.open("rb") as file:
        yield path, file.fileno()


@pytest.mark.parametrize("name_place", ["by path", "by number", "by memory of another name", "by text"])
def test_no_other_file_is_read_than_a_senders_memory(secret, name_place):
    path, number = secret
    memory = os.memfd_create("other")
    os.write(memory, b"s3cr3t!!")
    process, file = {
        "by path": ("self", f"../../../{path}"),
        "by number": (os.getpid(), number),
        "by memory of another name": (os.getpid(), memory),
        "by text": (str(os.getpid()), str(number)),
    }[name_place]
    with pytest.raises(RuntimeError) as refused:
        read_shared(process, file, torch.device("cpu"))
    os.close(memory)
    message = str(refused.value)
    assert "s3cr3t" not in message
    assert str(int.from_bytes(b"s3cr3t!!", "little")) not in message


@pytest.fixture
def server():
    with running(kind=StreamServer) as started:
        yield started


@pytest.fixture(params=[StreamServer, SglangStreamServer], ids=["vllm", "sglang"])
def either(request):
    """A server of each kind."""
    with running(kind=request.param) as started:
        yield started


def make_engine_and_senders(server, folder, seconds=5):
    """An engine, and two senders."""
    http_without_retries = HttpClient(server.url, seconds, Retries(attempts=1))

    def publisher(directory):
        return StreamPublisher(directory, torch.float32)

    if type(server) is SglangStreamServer:
        sender = SglangSender
        engine = make_engine(SglangClient, server, folder, publisher=publisher, takes_streams=True)
    else:
        sender = VllmSender
        engine = make_engine(VllmClient, server, folder, publisher=publisher, http_without_retries=http_without_retries)
    return engine, [sender(http_without_retries, stage, "gloo") for stage in range(2)]


def part(stage, seed=0):
    """Every second weight."""
    return list(weights(seed).items())[stage::2]


def send(engine, senders, seed=0):
    """Both senders at once; returns their errors."""

    def run(sender, part_of_sender):
        detached = ((name, tensor.detach()) for name, tensor in part_of_sender)
        try:
            send_weights(engine.publisher.directory.tensors(detached, dict(part_of_sender)), [sender], BUCKET_BYTES)
        except EngineError as error:
            return str(error)

    parts = [part(stage, seed) for stage in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return [error for error in pool.map(run, senders, parts) if error]


def give(engine, senders, version, seed=0):
    """A whole update."""
    engine.begin_update(version)
    assert send(engine, senders, seed) == []
    engine.end_update()


def test_two_senders_fill_a_server_of_two_processes(either, tmp_path):
    engine, senders = make_engine_and_senders(server := either, tmp_path)
    for version in (0, 1):
        give(engine, senders, version, seed=version)
        expected = {name: tensor.detach() for name, tensor in weights(version).items()}
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        for received in server.received:
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        assert (engine.version, server.version) == (version, str(version))
        assert sample(engine)[0].versions == [version] * 4
    largest = expected["lm_head.weight"].nbytes
    assert set(server.buckets) >= {largest}
    assert max(size for size in server.buckets if size != largest) <= BUCKET_BYTES
    assert [path.name for path in engine.publisher.directory.path.glob("*")] == ["config.json"]
    assert server.paths().count(server.joins) == 2, "groups are kept"


# Requests before and after the buckets of a first update.
ORDERS = {
    StreamServer: (
        ["/pause", "/weight_info", "/update_weight_version", "/start_weight_update"],
        ["/finish_weight_update", "/reset_prefix_cache", "/update_weight_version", "/resume"],
    ),
    SglangStreamServer: (["/update_weight_version"], ["/flush_cache", "/update_weight_version"]),
}


def test_the_order_of_an_update(either, tmp_path):
    engine, senders = make_engine_and_senders(server := either, tmp_path)
    engine.begin_update(3)
    assert server.version == INCOMPLETE
    assert send(engine, senders) == []
    engine.end_update()
    first, last = ORDERS[type(server)]
    paths = server.paths()[server.paths().index(first[0]) :]
    assert (paths[: len(first)], paths[-len(last) :]) == (first, last)
    assert set(paths[len(first) : -len(last)]) <= {"/get_world_size", "/get_server_info", server.joins, server.takes}


def test_torchs_own_groups_find_the_sender():
    """SGLang makes its group by these functions of torch."""
    buckets_of_server = []
    tensor = torch.arange(11, dtype=torch.float32)
    limit = timedelta(seconds=60)

    class Server(SglangStreamServer):
        processes = 1

        def _join(self, rank, info):
            url = f"tcp://{info['master_address']}:{info['master_port']}"
            name = info["group_name"]
            meeting = distributed_c10d.rendezvous(url, info["rank_offset"] + rank, info["world_size"], timeout=limit)
            store, rank, size = next(meeting)
            prefixed = distributed_c10d.PrefixStore(name, store)
            self.groups[0], _ = distributed_c10d._new_process_group_helper(
                size, rank, [], "gloo", prefixed, group_name=name, timeout=limit
            )

        def _receive(self, rank, info):
            bucket = torch.empty(tensor.nbytes, dtype=torch.uint8)
            self.groups[0].broadcast(bucket, 0).wait()
            buckets_of_server.append(bucket.view(torch.float32))

    with running(kind=Server) as server:
        sender = SglangSender(HttpClient(server.url, 60, Retries(attempts=1)), 0, "gloo")
        send_weights([("weight", tensor)], [sender])
        distributed_c10d._world.pg_group_ranks[server.groups[0]] = {}  # torch forgets the group
        distributed_c10d.destroy_process_group(server.groups[0])
    assert torch.equal(buckets_of_server[0], tensor)


@pytest.mark.parametrize("guess", [None, "0" * 32], ids=["no word", "another word"])
def test_a_stranger_who_connects_first_is_neither_counted_nor_joined(server, tmp_path, guess):
    """The stranger does all that a process of the server does, but does not know the word of the HTTP request."""
    counted = []
    groups_of_strangers = []

    def intrude(address, port):
        store = dist.TCPStore(address, port, is_master=False)
        keys = store if guess is None else dist.PrefixStore(guess, store)
        keys.add(ARRIVED, server.processes)
        counted.append(port)
        try:
            groups_of_strangers.append(StreamGroup(keys, 1, 1 + server.processes, "gloo", address, 2))
        except RuntimeError:
            groups_of_strangers.append(None)

    class Watched(VllmSender):
        def _meet(self, address, store):
            threads.append(threading.Thread(target=intrude, args=(address, store.port)))
            threads[-1].start()
            while store.port not in counted:
                time.sleep(0.01)
            return super()._meet(address, store)

    threads = []
    engine, _ = make_engine_and_senders(server, tmp_path, seconds=20)
    senders = [Watched(engine.client.http_without_retries, stage, "gloo") for stage in range(2)]
    give(engine, senders, 1)
    for thread in threads:
        thread.join()
    assert groups_of_strangers == [None, None], "a stranger is in a group"
    for received in server.received:
        assert all(torch.equal(received[name], tensor) for name, tensor in weights(0).items())
    arguments = {body["init_info"]["word"] for path, body in server.seen if path == server.joins}
    assert len(arguments) == 2
    assert min(map(len, arguments)) >= 32


def test_an_update_that_another_trainer_left_is_ended_first(server, tmp_path):
    engine, senders = make_engine_and_senders(server, tmp_path)
    engine.begin_update(1)
    send_weights(part(0), senders[:1], BUCKET_BYTES)
    next_engine, next_senders = make_engine_and_senders(server, tmp_path)
    server.seen.clear()
    server.faults["/finish_weight_update"] = [(500, {"detail": "no update is under way"})]
    next_engine.begin_update(2)
    assert [path for path in server.paths() if path.endswith("_weight_update")] == [
        "/finish_weight_update",
        "/start_weight_update",
    ]
    assert send(next_engine, next_senders) == []
    next_engine.end_update()
    assert server.version == "2"


WITHOUT_TRANSFER = {"model_config": {"logprobs_mode": "processed_logprobs"}}
UNFIT = {
    StreamServer: (
        "/server_info",
        {"vllm_config": WITHOUT_TRANSFER},
        r"--rollout-weight-transfer.*--weight-transfer-config",
    ),
    SglangStreamServer: ("/get_server_info", {"tp_size": 2, "pp_size": 2}, r"has 2 pipeline stages.*--pp-size"),
}


def test_a_server_that_cannot_take_streams_is_told_how_to_start(either, tmp_path):
    path, answer, message = UNFIT[type(either)]
    either.always[path] = lambda _: answer
    engine, _ = make_engine_and_senders(either, tmp_path)
    with pytest.raises(EngineError, match=message):
        engine.begin_update(0)


@pytest.mark.parametrize(("path", "message"), [("takes", "did not take"), ("joins", "failed 1 times")])
def test_a_server_that_refuses_is_one_error_before_the_limit(either, tmp_path, path, message):
    """Before a process of it has joined, or received anything."""
    engine, senders = make_engine_and_senders(server := either, tmp_path, seconds=3600)
    engine.begin_update(1)
    server.faults[getattr(server, path)] = [(500, {"detail": "no memory"})] * 2
    errors = send(engine, senders)
    assert len(errors) == 2
    for error in errors:
        assert message in error
        assert "no memory" in error
    assert server.version == INCOMPLETE


def test_a_process_that_falls_silent_ends_at_the_limit(server, tmp_path):
    engine, senders = make_engine_and_senders(server, tmp_path)
    engine.begin_update(1)
    senders[0].client.timeout = 0.5
    with (
        mock.patch.object(StreamServer, "_join", side_effect=lambda *_: time.sleep(2)),
        pytest.raises(EngineError, match=r"0\.5"),
    ):
        send_weights(part(0), senders[:1], BUCKET_BYTES)


def test_a_batch_ends_while_an_update_is_under_way(server, tmp_path):
    """The server's version is no number then, on the thread that samples; and a new batch may begin."""
    engine, senders = make_engine_and_senders(server, tmp_path)
    give(engine, senders, 0)
    engine.begin_update(1)
    server.version = "0"  # of the responses
    server.always["/weight_info"] = lambda _: {"weight_version": INCOMPLETE}
    assert sample(engine)[0].versions == [0] * 4


@pytest.mark.parametrize("finds_it", [sample, lambda engine: engine.begin_update(5)], ids=["rollout", "update"])
def test_a_server_that_was_started_again_ends_the_run(either, tmp_path, finds_it):
    engine, senders = make_engine_and_senders(server := either, tmp_path)
    give(engine, senders, 4)
    server.version = "default"
    with pytest.raises(EngineError, match=r"lost the weights of step 4.*--max-restarts"):
        finds_it(engine)


def test_another_trainers_groups_of_sglang_have_names_of_their_own(tmp_path):
    with running(kind=SglangStreamServer) as server:
        for version in (3, 4):
            give(*make_engine_and_senders(server, tmp_path), version)
        assert len({body["group_name"] for path, body in server.seen if path == server.joins}) == 4
        assert {body["abort_all_requests"] for path, body in server.seen if path == "/update_weight_version"} == {False}
