"""LoRA, merged at the sync: only adapters are trained, and engines get plain weights (docs/lora.md)."""
