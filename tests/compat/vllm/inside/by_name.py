"""Run in vLLM's environment: what vLLM makes of the connector's name alone, and of the alias. Prints one line per check."""

from __future__ import annotations

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins

ALIAS = "kvbaton.engines.vllm.nixl_alias"


def found(name: str, module_path: str | None = None) -> str:
    """Where the class comes from that vLLM would start."""
    config = KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_module_path=module_path)
    try:
        kind = KVConnectorFactory.get_connector_class(config)
    except ValueError as error:
        return str(error)
    return f"{kind.__module__}.{kind.__name__} hma={KVConnectorFactory.supports_hma_config(config)}"


def main() -> None:
    """The order matters: before the plugins, after them, and with the alias, which takes the name of vLLM's own."""
    print("before:", found("KVBatonConnector"))
    load_general_plugins()
    print("after:", found("KVBatonConnector"))
    print("own nixl:", KVConnectorFactory._registry["NixlConnector"].__qualname__)
    print("alias:", found("NixlConnector", ALIAS))
    print("statistics:", KVConnectorFactory.get_connector_class_by_name("NixlConnector").__module__)
    print("is nixl:", KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both").has_connector("NixlConnector"))


if __name__ == "__main__":
    main()
