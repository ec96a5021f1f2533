"""LoRA, merged at the sync: adapters train in place of the weights, and engines get plain weights (docs/lora.md)."""
