"""The reward of `routing.py`, alone in its module: the verifier's processes have little memory to import it with."""


def share_of_small_digits(response: str, answer: str) -> float:
    """The share of a response's characters that are 0 to 4, in which random responses differ."""
    return sum(character in "01234" for character in response) / max(1, len(response))
