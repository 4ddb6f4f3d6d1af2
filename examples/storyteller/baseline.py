"""What the validation text costs without a neural network: byte n-grams and a compressor, in bits per byte.

Run `python examples/storyteller/baseline.py`. The n-grams are counted on the training text and interpolated as by
Witten and Bell (1991, doi:10.1109/18.87000, their method C): each context trusts the shorter one the more, the more
different bytes have followed it. As for the model, the marks between documents are predicted, but not counted as text.
"""

from __future__ import annotations

import lzma

import corpus
import numpy as np
from numpy.typing import NDArray

LONGEST = 8  # bytes of an n-gram: seven of context and the one predicted
Codes = NDArray[np.uint64]


def as_bytes(documents: list[corpus.Document]) -> NDArray[np.uint8]:
    """The text with a zero byte for each mark between documents, and one in front."""
    text = corpus.END + corpus.join(documents)
    return np.frombuffer(text.replace(corpus.END, "\0").encode("ascii"), np.uint8)


def codes(text: NDArray[np.uint8], length: int) -> Codes:
    """For every byte the number that the `length` bytes up to it make; zeros stand before the text."""
    padded = np.concatenate([np.zeros(LONGEST, np.uint8), text]).astype(np.uint64)
    code = np.zeros(len(text), np.uint64)
    for back in range(length - 1, -1, -1):
        code = code << np.uint64(8) | padded[LONGEST - back : len(padded) - back]
    return code


def count(keys: Codes, counts: NDArray[np.int64], wanted: Codes) -> NDArray[np.int64]:
    """`counts` of each of `wanted` among the sorted `keys`, and 0 for those that are not there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, counts[place], 0)


def probabilities(training: NDArray[np.uint8], text: NDArray[np.uint8]) -> list[NDArray[np.float64]]:
    """The probability of every byte of `text` but the first, for each length of context from none on."""
    probability = np.full(len(text) - 1, 1 / 256)
    every = []
    for length in range(1, LONGEST + 1):
        grams, gram_counts = np.unique(codes(training, length), return_counts=True)
        contexts, first = np.unique(grams >> np.uint64(8), return_index=True)  # sorted, as the grams are
        context_counts = np.add.reduceat(gram_counts, first)
        followers = np.diff(np.append(first, len(grams)))  # different bytes seen after a context
        wanted = codes(text, length)[1:]
        seen = count(grams, gram_counts, wanted)
        total = count(contexts, context_counts, wanted >> np.uint64(8))
        different = count(contexts, followers, wanted >> np.uint64(8))
        known = total > 0
        mixed = (seen + different * probability) / np.maximum(total + different, 1)
        probability = np.where(known, mixed, probability)
        every.append(probability)
    return every


def compressed_bits_per_byte(training: bytes, text: bytes) -> float:
    """Of `text`, by how much longer xz makes the training text when it follows; xz looks back over all of it."""

    def size(content: bytes) -> int:
        return len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))

    return 8 * (size(training + text) - size(training)) / np.count_nonzero(np.frombuffer(text, np.uint8))


def main() -> None:
    """Print the baselines."""
    training, text = map(as_bytes, corpus.split())
    characters = np.count_nonzero(text)
    for context, probability in enumerate(probabilities(training, text)):
        bits = -np.log2(probability).sum() / characters
        print(f"{context} bytes of context  {bits:.3f} bits per byte, perplexity {2**bits:.3f}")
    bits = compressed_bits_per_byte(training.tobytes(), text[1:].tobytes())
    print(f"xz after the training text  {bits:.3f} bits per byte, perplexity {2**bits:.3f}")


if __name__ == "__main__":
    main()
