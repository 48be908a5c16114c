"""How the kinds of operands are stored in a warp's registers."""

#: Kinds that are stored alike.
BASE = {
    "s": "h", "H": "h", "F": "h", "G": "h", "i": "u", "W": "u", "V": "u", "B": "u", "f": "u", "l": "q",
    "Q": "q", "d": "q", "p": "p", "h": "h", "u": "u", "q": "q", "x": "x",
}  # fmt: skip
#: Bytes of a register in the file, each a multiple of a cache line.
SLOT = {"p": 64, "h": 64, "u": 128, "q": 256, "x": 256}
