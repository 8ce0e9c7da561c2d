"""LoRA adapters: which worker holds which, what is loaded for a request, and what is unloaded for it."""
