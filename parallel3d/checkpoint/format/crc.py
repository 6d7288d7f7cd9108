"""crc32: isal's where that is installed (extra ``checkpoint``), several times as fast; else zlib's."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
