"""Connectors change the replica counts of pools: processes of this machine, virtual keys in etcd, a webhook."""
