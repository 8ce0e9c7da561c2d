"""The transfer library: moves KV between memory, files, object stores and hosts, and says per block what arrived."""
