"""The simulated engine as a live server: vLLM's HTTP dialect, KV events and metrics over one `penstock_lab.engine`."""
