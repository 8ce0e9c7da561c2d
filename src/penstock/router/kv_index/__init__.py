"""The KV index: which worker holds which block, exactly from KV events or approximately from routing history."""
