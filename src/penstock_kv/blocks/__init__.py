"""The KV block manager: blocks from free to registered, pools, eviction orders and handles, for any tier."""
