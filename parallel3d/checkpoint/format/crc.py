"""crc32: isal's, several times as fast as zlib's; zlib's on a machine that isal has no wheel for."""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
