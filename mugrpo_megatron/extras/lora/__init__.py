"""LoRA: only adapters are trained; at each weight sync they are merged, so engines get plain weights (docs/lora.md)."""
