"""Who can change how many replicas a pool has: processes of this machine."""
