"""Run in vLLM's environment: vLLM's own MoRI wrapper moves a tensor both ways, on the `mori` that its plugins put in place.

Prints one line per fact; the test reads them.
"""

from __future__ import annotations

import torch
from vllm.plugins import load_general_plugins

load_general_plugins()

import mori  # noqa: E402 - the plugin makes it importable
from mori.io import BackendType, IOEngine, IOEngineConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector import is_moriio_available  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_engine import MoRIIOWrapper  # noqa: E402

_LARGE = 16 << 20
_MACHINE_PAGE = 4096
_PAGE = 8192
_PAGES = 128


def _wrapper(key: str) -> MoRIIOWrapper:
    wrapper = MoRIIOWrapper()
    wrapper.set_moriio_engine(IOEngine(key, IOEngineConfig("127.0.0.1", 0)))
    wrapper.set_backend_type(BackendType.RDMA)
    return wrapper


def _main() -> None:
    print("drop-in", getattr(mori, "__kvbaton__", False), "available", is_moriio_available())
    print("begins on a page", torch.zeros(_LARGE, dtype=torch.int8).data_ptr() % _MACHINE_PAGE == 0)
    producer, consumer = _wrapper("producer"), _wrapper("consumer")
    source = torch.randint(1, 256, (_PAGE * _PAGES,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    theirs, ours = producer.register_local_tensor(source), consumer.register_local_tensor(target)
    offsets, sizes = [page * _PAGE for page in range(_PAGES)], [_PAGE] * _PAGES
    unpack = producer.get_unpack_memory_metadata

    producer.register_remote_engine(consumer.get_agent_metadata())
    session = producer.build_session(unpack(theirs), unpack(ours))
    posted = [producer.write_remote_data(sizes, offsets, offsets, session), producer.write_remote_data([], [], [], session)]
    producer.waiting_for_transfer_complete(posted)
    print("write", torch.equal(source, target))

    target.zero_()
    consumer.register_remote_engine(producer.get_agent_metadata())
    session = consumer.build_session(unpack(ours), unpack(theirs))
    consumer.waiting_for_transfer_complete([consumer.read_remote_data(sizes, offsets, offsets, session)])
    print("read", torch.equal(source, target))

    producer.moriio_engine.deregister_memory(unpack(theirs))
    try:
        consumer.waiting_for_transfer_complete([consumer.read_remote_data(sizes, offsets, offsets, session)])
    except Exception as error:  # noqa: BLE001 - vLLM's own error is what is shown
        print("deregistered", type(error).__name__)


if __name__ == "__main__":
    _main()
