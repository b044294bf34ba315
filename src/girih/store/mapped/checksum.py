"""The CRC-32 of bytes that were looked at in another order than that in which they lie."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1: the highest bit is the coefficient of x⁰


def joined(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two pieces one behind the other, as ``zlib.crc32`` gives it.

    Args:
        first, second: the CRC-32 of each. second_bytes: the size of the second.
    """
    shift, power = _ONE, 3  # by x⁸ for each byte
    while second_bytes:
        if second_bytes & 1:
            shift = _product(_squared(power), shift)
        second_bytes, power = second_bytes >> 1, power + 1
    return _product(shift, first) ^ second


@cache
def _squared(times: int) -> int:
    """The polynomial x, squared so many times."""
    if times == 0:
        return _ONE >> 1
    half = _squared(times - 1)
    return _product(half, half)


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the checksum."""
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = (a << 1) & 0xFFFF_FFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return found
