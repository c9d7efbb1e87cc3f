"""Values that a library reads at run time, written into a copy of it: no compiler and no linker is asked.

`extern "C" { long PM_SPIN = 4000; }` is eight bytes in the library's data, which its table of dynamic symbols names. Linux
libraries alone (64-bit ELF, little-endian); of others, and of values that are not there, nothing is written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
HEADER = struct.Struct("<40xQ10xHH2x")  # offset of the sections' headers; size of one; how many there are
SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, address, size
DATA, DYNAMIC_SYMBOLS = 1, 11  # types of sections: with bytes in the file; what a library offers by name
VALUE = struct.Struct("<q")


def with_values(library: bytes, values: Mapping[str, int]) -> bytes | None:
    """The library with these values. None when it is no such library or does not hold each of them as a `long`."""
    try:
        places = dict(longs(library))
    except (struct.error, IndexError, ValueError):
        return None
    if not values.keys() <= places.keys():
        return None
    written = bytearray(library)
    for name, value in values.items():
        VALUE.pack_into(written, places[name], value)
    return bytes(written)


def longs(library: bytes) -> Iterator[tuple[str, int]]:
    """Name and place in the file of every initialised object of eight bytes that the library offers.

    Raises ValueError for what is no such library, struct.error or IndexError for one that is damaged.
    """
    if not library.startswith(MAGIC):
        raise ValueError("not a 64-bit little-endian ELF file")
    start, size, count = HEADER.unpack_from(library)
    sections = [SECTION.unpack_from(library, start + i * size) for i in range(count)]
    for section in sections:
        if section[1] != DYNAMIC_SYMBOLS:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], SYMBOL.size):
            name, _, _, home, address, length = SYMBOL.unpack_from(library, at)
            if length == VALUE.size and home < count and sections[home][1] == DATA:
                end = library.index(b"\0", names + name)
                yield library[names + name : end].decode(), sections[home][4] + address - sections[home][3]
