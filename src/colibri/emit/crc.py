"""CRC-32 of bytes from the checksums of their parts; after crc32_combine of zlib."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320  # of IEEE 802.3, reflected: bit 31 is x^0


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of A + B from those of A and B, and the length of B."""
    return _product(_power(second_bytes), first) ^ second


@cache
def _power(count: int) -> int:
    """x^(8 · count) modulo the polynomial."""
    power, square = 1 << 31, 1 << 23  # x^0 and x^8
    while count:
        if count & 1:
            power = _product(square, power)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    """a · b modulo the polynomial."""
    product = 0
    while a:
        if a & 1 << 31:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
