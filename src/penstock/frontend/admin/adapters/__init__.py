"""Admin routes of LoRA adapters."""
