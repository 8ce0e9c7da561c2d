"""The transfer library: agents, regions, descriptors and backends that move KV between memory, files and hosts."""
