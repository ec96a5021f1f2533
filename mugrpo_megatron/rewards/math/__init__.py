"""The reward function `math`: finds the answer in a response and compares it with the gold."""
