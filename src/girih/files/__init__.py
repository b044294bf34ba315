"""Small files: written whole or not at all, sealed with a checksum, read strictly. Knows nothing of girih but its errors."""
